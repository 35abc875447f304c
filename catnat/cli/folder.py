"""The folder of a run."""

from __future__ import annotations

import contextlib
import shutil
from itertools import count
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only

from catnat.callbacks.checkpoints import write_whole
from catnat.callbacks.tensorboard import RunLogger


class RunFolder:
    """The folder of a run.

    A run that resumes from ``last.ckpt`` stays in its folder. From another checkpoint it is a new
    run: the old one keeps its ``last.ckpt``.

    Args:
        home: the folder of all runs of a model with a head.
        ckpt_path: the checkpoint that the run resumes or tests.
        train: whether the run trains; one that does not train makes no folder.
    """

    def __init__(self, home: Path, ckpt_path: Path | None, train: bool) -> None:
        self.path, self.resumed, self._made = home / "version_0", False, False
        self._before: dict[Path, bytes] = {}  # files of the resumed run that this one may change
        if ckpt_path is not None and ckpt_path.parent.name == "checkpoints":
            self.resumed = not train or ckpt_path.name == "last.ckpt"
            if self.resumed:
                self.path = ckpt_path.parent.parent
                kept = ("config.yaml", "hparams.yaml", "metrics.json") if train else ()
                files = (self.path / name for name in kept)
                self._before = {file: file.read_bytes() for file in files if file.is_file()}

    def make(self) -> None:
        """Make the folder of a new run, the first that is free."""
        for number in count() if not self.resumed else ():
            self.path = self.path.with_name(f"version_{number}")
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(parents=True)
                self._made = True
                return

    def undo_if_refused(self, stepped: bool) -> None:
        """Undo what a run did that was refused, that is, it took no step and has no end."""
        if stepped or (self.path / "metrics.json").exists():
            return
        for file, content in self._before.items():
            write_whole(file, content)
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                for parent in list(self.path.parents)[:3]:
                    parent.rmdir()


@rank_zero_only
def begin(folder: Path, config: str, trainer: Trainer | None = None, *_: object) -> None:
    """Write the options of a run that nothing refuses any more, and let its loggers write."""
    (folder / "metrics.json").unlink(missing_ok=True)  # it marks a run as finished
    (folder / "hparams.yaml").unlink(missing_ok=True)  # Lightning writes it anew, not over it
    write_whole(folder / "config.yaml", config.encode())
    for logger in trainer.loggers if trainer else ():
        if isinstance(logger, RunLogger):
            logger.begun = True
