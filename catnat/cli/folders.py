"""Folders of runs: finding a checkpoint, making a folder for a run, and locking the folder."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import IO

from catnat.files import write_whole


def record_of(ckpt_path: Path) -> Path | None:
    """The config.yaml of the run that a checkpoint file belongs to, None if it belongs to none."""
    record = ckpt_path.parent.parent / "config.yaml"
    return record if ckpt_path.parent.name == "checkpoints" and record.is_file() else None


def find_checkpoint(home: Path, head: str | None, wanted: str) -> Path:
    """The path of a checkpoint.

    Args:
        home: folder of all runs of a model.
        head: name of the head; None: any.
        wanted: a file; or "last" or "best", for the newest checkpoint of this name.
    """
    if wanted not in ("last", "best"):
        if not Path(wanted).is_file():
            raise ValueError(f"there is no checkpoint {wanted!r}; give a file, last or best")
        return Path(wanted)
    found = list(home.glob(f"{head or '*'}/version_*/checkpoints/{wanted}.ckpt"))
    if not found:
        raise ValueError(f"there is no {wanted}.ckpt in any run under {home / (head or '')}")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def write_options(folder: Path, config: str, *_: object) -> None:
    """Write the options of a run that begins to train; so it is not finished."""
    (folder / "metrics.json").unlink(missing_ok=True)  # it marks a run as finished
    write_whole(folder / "config.yaml", config.encode(), shared=True)


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
        used = [run.name.removeprefix("version_") for run in home.glob("version_*")]
        self._number = max((int(each) + 1 for each in used if each.isdigit()), default=0)
        self.path = home / f"version_{self._number}"
        self.resumed = False
        if ckpt_path is not None and ckpt_path.parent.name == "checkpoints":
            self.resumed = not train or ckpt_path.name == "last.ckpt"
        if self.resumed and ckpt_path is not None:
            self.path = ckpt_path.parent.parent
        self._lock: IO[str] | None = None
        self._made = False

    def open(self, config: str) -> None:
        """Make the folder, lock it, and write the options of a new run to config.yaml."""
        while not self.resumed and not self._made:
            try:
                self.path.mkdir(parents=True)
                self._made = True
            except FileExistsError:  # another process was faster
                self._number += 1
                self.path = self.path.with_name(f"version_{self._number}")
            except OSError as error:
                raise ValueError(
                    f"no folder can be made at {self.path}: {error.strerror}"
                ) from error
        self._lock_it()
        if self._made:
            write_options(self.path, config)

    def close(self, stepped: bool) -> None:
        """Free the folder for other processes; remove a new one if the run was refused.

        Args:
            stepped: whether the run took a step.
        """
        if self._made and not stepped and not (self.path / "metrics.json").exists():
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                for parent in list(self.path.parents)[:3]:
                    parent.rmdir()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _lock_it(self) -> None:
        """Lock the run; the kernel frees the lock when the process ends or is killed."""
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        self._lock = open(self.path / ".lock", "a")  # noqa: SIM115 - open while the run lasts
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {self.path}") from None
        except OSError:  # a file system without locks
            pass
