"""The folder of a run: its number, its lock, and the options that the run began with."""

import fcntl
import os
import socket
from contextlib import suppress
from itertools import count
from pathlib import Path

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
        checkpoint = ckpt_path or Path()
        is_in_a_run = checkpoint.parent.name == "checkpoints"
        self.resumed = is_in_a_run and (not train or checkpoint.name == "last.ckpt")
        self.path = checkpoint.parent.parent if self.resumed else home / "version_0"
        self._has_begun = False

    def open(self) -> None:
        """Make the folder of a new run, the first that is free; lock it.

        The system frees the lock of a process that is gone, however it ended.

        Raises:
            ValueError: another process trains in this folder.
        """
        for number in count() if not self.resumed else ():
            self.path = self.path.with_name(f"version_{number}")
            with suppress(FileExistsError):
                self.path.mkdir(parents=True)
                break
        self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - as long as the run lasts
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._lock.seek(0)
            process = self._lock.read()
            raise ValueError(f"{process} is still training in {self.path}: end it first") from None
        except OSError:
            pass  # a file system without locks
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()

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
        """Give an open folder back; that of a new run goes if it is empty."""
        (self.path / ".lock").unlink()
        self._lock.close()
        with suppress(OSError):  # not empty
            for folder in (self.path, *list(self.path.parents)[:3]):
                folder.rmdir()
