"""Folders of runs: where a checkpoint lies, where a run writes, and to which process it belongs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities import rank_zero_only

from catnat.callbacks.checkpoints import write_whole


def find_checkpoint(home: Path, wanted: str) -> Path:
    """A file, or the checkpoint called "last" or "best" of the newest run in home that has one."""
    if wanted not in ("last", "best"):
        return Path(wanted)
    for run in reversed(_runs(home)):
        path = run / "checkpoints" / f"{wanted}.ckpt"
        if path.is_file():
            return path
    raise ValueError(f"--ckpt_path {wanted}: there is no {wanted}.ckpt in any run under {home}")


def open_run(home: Path, ckpt_path: Path | None, config: str | None) -> Path:
    """The folder of the checkpoint's run, or home/version_k with the next free k.

    Where a configuration is given, it is written there, and the folder belongs to this process
    until :func:`closing_runs` ends; otherwise nothing is written. What goes on from another
    checkpoint than the last is a new run: the last one of the old run stays.
    """
    runs = _runs(home)
    number = int(runs[-1].name.removeprefix("version_")) + 1 if runs else 0
    folder, resumed = home / f"version_{number}", False
    if ckpt_path is not None and ckpt_path.parent.name == "checkpoints":
        resumed = config is None or ckpt_path.name == "last.ckpt"
        folder = ckpt_path.parent.parent if resumed else folder
    if (
        config is None or getattr(rank_zero_only, "rank", 0) != 0
    ):  # other ranks only need to know a path
        return folder
    while not resumed:
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:  # another process was faster
            number += 1
            folder = home / f"version_{number}"
    _lock(folder)
    write_whole(folder / "config.yaml", config.encode())
    return folder


_LOCKS: list[IO[str]] = []  # of the runs that belong to this process


@contextmanager
def closing_runs() -> Iterator[None]:
    """Runs that are opened in here are free for other processes afterwards."""
    before = len(_LOCKS)
    try:
        yield
    finally:
        while len(_LOCKS) > before:
            _LOCKS.pop().close()


def _lock(folder: Path) -> None:
    """Make a run this process's own; the kernel frees it when the process ends, however it does."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    lock = open(folder / ".lock", "a+")  # noqa: SIM115 - open for as long as the run is
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise ValueError(
            f"process {holder} is training in {folder}; wait for it, or stop it"
        ) from None
    except OSError:  # a file system without locks
        lock.close()
        return
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    _LOCKS.append(lock)


def _runs(home: Path) -> list[Path]:
    runs = [run for run in home.glob("version_*") if run.name[8:].isdigit()]
    return sorted(runs, key=lambda run: int(run.name[8:]))
