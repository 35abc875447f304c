"""Folders of runs: finding a checkpoint, making a folder for a run, and locking the folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import IO, Any

from catnat.cli.errors import UsageError
from catnat.files import write_whole


def record_of(ckpt_path: Path) -> Path | None:
    """The config.yaml of the run that a checkpoint file belongs to, None if it belongs to none."""
    record = ckpt_path.parent.parent / "config.yaml"
    return record if ckpt_path.parent.name == "checkpoints" and record.is_file() else None


def find_checkpoint(homes: list[Path], wanted: str) -> Path:
    """The path of a checkpoint.

    Args:
        homes: folders of all runs of a model, each with one head.
        wanted: a file; or "last" or "best", for that checkpoint of the newest run that has one.
    """
    if wanted in ("last", "best"):
        for run in (run for home in homes for run in reversed(_runs(home))):
            path = run / "checkpoints" / f"{wanted}.ckpt"
            if path.is_file():
                return path
        raise UsageError(
            f"--ckpt_path {wanted}: there is no {wanted}.ckpt in any run under {homes[0]}"
        )
    path = Path(wanted)
    if not path.is_file():
        raise UsageError(
            f"--ckpt_path: there is no checkpoint {wanted!r}; give a file, last or best"
        )
    return path


class RunFolder:
    """The folder of a run, which belongs to this process until :meth:`close`.

    A run that resumes from ``last.ckpt`` stays in its folder. From another checkpoint it is a new
    run: the old one keeps its ``last.ckpt``.

    Args:
        home: the folder of all runs of a model with a head.
        ckpt_path: the checkpoint that the run resumes or tests.
        train: whether the run trains; one that does not train makes no folder.
    """

    def __init__(self, home: Path, ckpt_path: Path | None, train: bool) -> None:
        runs = _runs(home)
        number = int(runs[-1].name.removeprefix("version_")) + 1 if runs else 0
        self.path = home / f"version_{number}"
        of_run = ckpt_path is not None and ckpt_path.parent.name == "checkpoints"
        self.resumed = of_run and (not train or ckpt_path.name == "last.ckpt")  # type: ignore[union-attr]
        if self.resumed:
            assert ckpt_path is not None
            self.path = ckpt_path.parent.parent
        self._home, self._number = home, number
        self._lock: IO[str] | None = None
        self._made = False
        self._before: dict[str, Any] = {}

    def open(self, config: str) -> None:
        """Make the folder, lock it, and write the options of the run to config.yaml."""
        while not self.resumed and not self._made:
            try:
                self.path.mkdir(parents=True)
                self._made = True
            except FileExistsError:  # another process was faster
                self._number += 1
                self.path = self._home / f"version_{self._number}"
            except OSError as error:
                raise UsageError(
                    f"no folder can be made at {self.path}: {error.strerror}"
                ) from error
        self._lock_it()
        self._before = self._state()
        (self.path / "metrics.json").unlink(missing_ok=True)  # it marks a run as finished
        write_whole(self.path / "config.yaml", config.encode())

    def close(self, stepped: bool) -> None:
        """Free the folder for other processes; leave it as it was if the run was refused.

        Args:
            stepped: whether the run took a step. A new folder of a run that did not is removed. A
                resumed run without a new last.ckpt keeps the options and metrics it had.
        """
        finished = (self.path / "metrics.json").exists()
        if self._made and not finished and not stepped:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                for parent in (self._home, self._home.parent, self._home.parent.parent):
                    parent.rmdir()
        elif self.resumed and not finished and self._state()["saved"] == self._before.get("saved"):
            for name in ("config.yaml", "metrics.json"):
                if content := self._before.get(name):
                    write_whole(self.path / name, content)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _state(self) -> dict[str, Any]:
        """The options and metrics in the folder, and the time of its last checkpoint."""
        files = [self.path / name for name in ("config.yaml", "metrics.json")]
        last = self.path / "checkpoints" / "last.ckpt"
        saved = last.stat().st_mtime_ns if last.is_file() else 0
        return {path.name: path.read_bytes() for path in files if path.is_file()} | {"saved": saved}

    def _lock_it(self) -> None:
        """Lock the run; the kernel frees the lock when the process ends or is killed."""
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - stays open while the run lasts
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UsageError(f"another process is training in {self.path}") from None
        except OSError:  # a file system without locks
            lock.close()
            return
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock


def _runs(home: Path) -> list[Path]:
    """The folders version_0, version_1 and so on, in the order of their numbers."""
    runs = [run for run in home.glob("version_*") if run.name[8:].isdigit()]
    return sorted(runs, key=lambda run: int(run.name[8:]))
