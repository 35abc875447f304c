"""Folders of runs: finding a checkpoint, making a folder for a run, and locking the folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities import rank_zero_only

from catnat.files import write_whole


class NoFolderError(OSError, ValueError):
    """A folder cannot be made where the user wants it."""

    def __str__(self) -> str:
        # Under /proc the reason is "No such file or directory", which helps nobody.
        reason = "" if self.errno == errno.ENOENT else f": {self.strerror}"
        return f"no folder can be made at {self.filename}{reason}"


def find_checkpoint(home: Path, wanted: str) -> Path:
    """The path of a checkpoint.

    Args:
        home: the folder of all runs of a model with a head.
        wanted: a file; or "last" or "best", for that checkpoint of the newest run that has one.
    """
    if wanted not in ("last", "best"):
        inside = Path(wanted, "checkpoints", "last.ckpt")
        if inside.is_file():
            raise ValueError(f"--ckpt_path {wanted} is the folder of a run; did you mean {inside}?")
        return Path(wanted)
    for run in reversed(_runs(home)):
        path = run / "checkpoints" / f"{wanted}.ckpt"
        if path.is_file():
            return path
    found = home.parent.glob(f"*/version_*/checkpoints/{wanted}.ckpt")
    others = sorted({path.parents[2].name for path in found})
    hint = f"; there is one of --head {' and '.join(others)}" if others else ""
    raise ValueError(
        f"--ckpt_path {wanted}: there is no {wanted}.ckpt in any run under {home}{hint}"
    )


def open_run(home: Path, ckpt_path: Path | None, config: str | None) -> Path:
    """The folder of the checkpoint's run, or home/version_k with the next free k.

    A run that continues from another checkpoint than last.ckpt is a new run, in a new folder: the
    old run keeps its last.ckpt.

    Args:
        home: the folder of all runs of a model with a head.
        ckpt_path: the checkpoint that the run continues or tests.
        config: written to config.yaml; the folder then belongs to this process until
            :func:`closing_runs` ends. None writes nothing.

    Raises:
        NoFolderError: no folder can be made in home.
    """
    runs = _runs(home)
    number = int(runs[-1].name.removeprefix("version_")) + 1 if runs else 0
    folder, resumed = home / f"version_{number}", False
    if ckpt_path is not None and ckpt_path.parent.name == "checkpoints":
        resumed = config is None or ckpt_path.name == "last.ckpt"
        folder = ckpt_path.parent.parent if resumed else folder
    if config is None or getattr(rank_zero_only, "rank", 0) != 0:  # only rank 0 makes the folder
        return folder
    while not resumed:
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:  # another process was faster
            number += 1
            folder = home / f"version_{number}"
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):  # the disk's fault
                raise
            raise NoFolderError(error.errno, error.strerror, str(folder)) from error
    _lock(folder)
    (folder / "metrics.json").unlink(missing_ok=True)  # it marks a run as finished
    write_whole(folder / "config.yaml", config.encode())
    return folder


_LOCKS: list[IO[str]] = []  # open files, one for each run that belongs to this process


@contextmanager
def closing_runs() -> Iterator[None]:
    """At the end of the block, free the runs that were opened in it for other processes."""
    before = len(_LOCKS)
    try:
        yield
    finally:
        while len(_LOCKS) > before:
            _LOCKS.pop().close()


def _lock(folder: Path) -> None:
    """Lock a run for this process. The kernel frees the lock when the process ends or is killed."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    lock = open(folder / ".lock", "a+")  # noqa: SIM115 - stays open while the run lasts
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
    """The folders version_0, version_1 and so on, in the order of their numbers."""
    runs = [run for run in home.glob("version_*") if run.name[8:].isdigit()]
    return sorted(runs, key=lambda run: int(run.name[8:]))
