"""The folder of a run: its number, its lock, and the options that the run began with."""

from contextlib import suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

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
        self._lock: FileLock | None = None

    def open(self) -> None:
        """Make the folder of a new run, the first that is free, and lock it.

        Raises:
            ValueError: another process trains in this folder.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for number in count() if not self.resumed else ():
            self.path = self.path.with_name(f"version_{number}")
            with suppress(FileExistsError):
                self.path.mkdir()
                break
        self._lock = FileLock(self.path / ".lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(f"another process trains in {self.path}: end it first") from None
        except NotImplementedError:
            pass  # a file system without locks

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
        """Release an open folder; delete it if the run is new and has left nothing.

        The lock file stays in a folder with content: deleting it could remove the lock of another
        process.
        """
        if self._lock is None:
            return
        self._lock.release()
        self._lock = None
        if [path.name for path in self.path.iterdir()] in ([], [".lock"]):
            (self.path / ".lock").unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                for folder in (self.path, *list(self.path.parents)[:3]):
                    folder.rmdir()
