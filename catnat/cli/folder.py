"""The folder of a run: its number, its lock, and the options that the run began with."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from itertools import count
from pathlib import Path
from typing import IO

from catnat.callbacks.files import write_whole


class RunFolder:
    """The folder of a run.

    A run that resumes from ``last.ckpt`` stays in its folder. From another checkpoint it is a new
    run: the old one keeps its ``last.ckpt``. One process at a time writes to a folder.

    Args:
        home: the folder of all runs of a model with a head.
        ckpt_path: the checkpoint that the run resumes or tests.
        train: whether the run trains; one that does not train makes no folder.
    """

    def __init__(self, home: Path, ckpt_path: Path | None, train: bool) -> None:
        self.path = home / "version_0"
        self.resumed = False
        self._lock: IO[str] | None = None
        self._has_begun = False
        if ckpt_path is not None and ckpt_path.parent.name == "checkpoints":
            self.resumed = not train or ckpt_path.name == "last.ckpt"
            if self.resumed:
                self.path = ckpt_path.parent.parent

    def open(self) -> None:
        """Make the folder of a new run, the first that is free; lock it.

        Raises:
            ValueError: another process trains in this folder.
        """
        for number in count() if not self.resumed else ():
            self.path = self.path.with_name(f"version_{number}")
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(parents=True)
                break
        self._take_lock()

    def _take_lock(self) -> None:
        """The system frees the lock of a process that is gone, however it ended."""
        lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - open as long as the run lasts
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            lock.seek(0)
            process = lock.read()
            lock.close()
            raise ValueError(f"{process} is still training in {self.path}: end it first") from None
        except OSError:
            pass  # a file system without locks
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        self._lock = lock

    def begin(self, options: str) -> None:
        """Write the options of a run, once: those of a resumed run belong to its checkpoint."""
        if self._has_begun:
            return
        self._has_begun = True
        metrics = self.path / "metrics.json"  # it marks a run as finished
        if metrics.exists():
            earlier = len(list(self.path.glob("metrics_*.json")))
            metrics.rename(self.path / f"metrics_{earlier + 1}.json")
        (self.path / "hparams.yaml").unlink(missing_ok=True)  # Lightning does not write over it
        write_whole(self.path / "config.yaml", options.encode())

    def close(self) -> None:
        """Give the folder back; that of a new run goes if it is empty."""
        if self._lock is None:
            return
        (self.path / ".lock").unlink()
        self._lock.close()
        self._lock = None
        with contextlib.suppress(OSError):  # not empty
            for folder in (self.path, *list(self.path.parents)[:3]):
                folder.rmdir()
