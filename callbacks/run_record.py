"""The record of a run: one event file for TensorBoard, each value once, and the last validation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only


class RunLogger(TensorBoardLogger):
    """Writes training, validation and test into one event file; :meth:`close` ends it.

    Lightning's own logger begins a new file after each of them.
    """

    _epoch_step: int | None = None  # where the epoch was written last

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars; the epoch, which Lightning adds to each of several rows, only once."""
        if "epoch" in metrics:
            if step == self._epoch_step:
                metrics = {name: value for name, value in metrics.items() if name != "epoch"}
            self._epoch_step = step
        super().log_metrics(metrics, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """After success there may be more to write; what is there is on the disk."""
        if status == "success":
            self.save()
        else:
            super().finalize(status)

    @rank_zero_only
    def forget_from(self, step: int) -> None:
        """Drop what earlier processes wrote for this step and later, and the hyperparameters."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        for path in sorted(Path(self.log_dir).glob("events.out.tfevents.*")):
            _drop_events(path, step)
        # A TensorBoard that has read the files already forgets its values by this.
        start = Event(step=step, session_log=SessionLog(status=SessionLog.START))
        self.experiment._get_file_writer().add_event(start, step)

    @rank_zero_only
    def close(self) -> None:
        """End the file."""
        super().finalize("success")


class RunRecord(Callback):
    """Keeps the record of a run straight, also when it is resumed.

    What an earlier process wrote after the checkpoint is dropped: the resumed run writes it again.
    The metrics of the latest validation are part of every checkpoint.
    """

    def __init__(self) -> None:
        self.step = -1
        self.metrics: dict[str, float] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the metrics."""
        if not trainer.sanity_checking:
            found = trainer.callback_metrics.items()
            self.metrics = {name: float(value) for name, value in found if name[:3] == "val"}
            self.step = trainer.global_step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After training, write at the number of steps."""
        if trainer.state.fn != "fit":
            self._write_at_global_step(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write at the number of steps."""
        self._write_at_global_step(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """What an earlier process wrote after this checkpoint does not count."""
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, RunLogger):
                    logger.forget_from(checkpoint["global_step"])

    def state_dict(self) -> dict[str, Any]:
        """The latest validation."""
        return {"step": self.step, "metrics": self.metrics}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As it was."""
        self.step, self.metrics = state_dict["step"], state_dict["metrics"]

    def _write_at_global_step(self, trainer: Trainer) -> None:
        # Lightning's count for loggers is one behind in a resumed run that has no step left.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def last_validation(trainer: Trainer) -> dict[str, float]:
    """Metrics of the model as it is now; empty if it was not validated since it changed."""
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    records = (each for each in callbacks if isinstance(each, RunRecord))
    return next((r.metrics for r in records if r.step == trainer.global_step), {})


def _drop_events(path: Path, step: int) -> None:
    """Leave out the values from a step on, and the hyperparameters: readers keep the first."""
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
                if tags and (event.step >= step or tags[0].startswith("_hparams_")):
                    continue
                writer.write(record)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_hparams(logger: TensorBoardLogger, hparams: dict[str, Any], metrics: list[str]) -> None:
    """Fill a run's row of the HPARAMS tab, which finds the metrics among the scalars."""
    from torch.utils.tensorboard.summary import hparams as summaries

    plain = (bool, int, float, str)
    shown = {name: v if isinstance(v, plain) else str(v) for name, v in hparams.items()}
    writer = logger.experiment._get_file_writer()
    for summary in summaries(shown, dict.fromkeys(metrics, 0.0)):
        writer.add_summary(summary)
