"""The record of a run: one TensorBoard file without double values, and the latest validation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from catnat.callbacks.dashboard import WRITTEN_ONCE, RunWriter, kind_of, write_layout


class RunLogger(TensorBoardLogger):
    """A TensorBoard logger with one event file for training, validation and test.

    Lightning's own logger begins a new file after each of the three. :meth:`close` ends the file.
    Beside the values the file has a line of explanation for each tag.
    """

    @property
    @rank_zero_experiment
    def experiment(self) -> RunWriter:
        """The writer of the event file."""
        if self._experiment is None:
            self._experiment = RunWriter(log_dir=self.log_dir)
        assert isinstance(self._experiment, RunWriter)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars, but not the epoch, which Lightning adds to every call."""
        kept = {name: value for name, value in metrics.items() if name != "epoch"}
        super().log_metrics(kept, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write everything to disk; after a success keep the file open for what follows."""
        if status == "success":
            self.save()
        else:
            super().finalize(status)

    @rank_zero_only
    def forget_from(self, step: int) -> None:
        """Delete values of this step and later ones, and what a run writes once, from the files."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        for path in sorted(Path(self.log_dir).glob("events.out.tfevents.*")):
            _drop_events(path, step)
        # This event makes a TensorBoard that is running drop the values it has read already.
        start = Event(step=step, session_log=SessionLog(status=SessionLog.START))
        self.experiment._get_file_writer().add_event(start, step)

    @rank_zero_only
    def close(self) -> None:
        """End the file."""
        super().finalize("success")


class RunRecord(Callback):
    """Keeps every value of a run once in its record, also when the run is resumed.

    When a run resumes from a checkpoint, values that an earlier process wrote after the checkpoint
    are deleted, because the run writes them again. Every checkpoint holds the metrics of the latest
    validation.
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
        """Delete values that an earlier process wrote after this checkpoint."""
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, RunLogger):
                    logger.forget_from(checkpoint["global_step"])

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
