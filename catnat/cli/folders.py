"""Folders of runs: finding a checkpoint, and making a folder for a run."""

from __future__ import annotations

import contextlib
import shutil
from itertools import count
from pathlib import Path

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
        if ckpt_path is not None and ckpt_path.parent.name == "checkpoints":
            self.resumed = not train or ckpt_path.name == "last.ckpt"
            if self.resumed:
                self.path = ckpt_path.parent.parent

    def make(self, config: str) -> None:
        """Make the folder of a new run, the first that is free, and write its options there."""
        for number in count() if not self.resumed else ():
            self.path = self.path.with_name(f"version_{number}")
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(parents=True)
                self._made = True
                write_options(self.path, config)
                return

    def remove_if_refused(self, stepped: bool) -> None:
        """Remove a new folder if the run was refused, that is, it took no step and has no end."""
        if self._made and not stepped and not (self.path / "metrics.json").exists():
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                for parent in list(self.path.parents)[:3]:
                    parent.rmdir()
