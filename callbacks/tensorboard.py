"""What TensorBoard shows of a run: event files without double values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment, rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.writer import SummaryWriter

_QUEUE = 1000  # events; a row of each step would wait for the default, 10
_WRITTEN_AGAIN = ("_hparams_/", "test/")  # at the end of a resumed run

# -- event files -----------------------------------------------------------------------------------


def open_writer(folder: str | Path, resumed_at: int | None = None) -> SummaryWriter:
    """A writer of a run's event file.

    Args:
        folder: of the run.
        resumed_at: the step from which the run resumes. Values of this step and later ones, which
            an earlier process wrote, are deleted, because the run writes them again. Its files get
            a counter in place of the time: TensorBoard reads them in the order of their names.
    """
    if resumed_at is None:
        return SummaryWriter(str(folder), max_queue=_QUEUE)
    for number, path in enumerate(sorted(Path(folder).glob("events.out.tfevents.*"))):
        _drop_events(path, resumed_at)
        path.rename(path.with_name(f"events.out.tfevents.{number:010d}.resumed"))
    # purge_step is for a TensorBoard that is running
    return SummaryWriter(str(folder), purge_step=resumed_at, max_queue=_QUEUE)


def _drop_events(path: Path, step: int) -> None:
    """Delete values from a step on, those of a test, and hyperparameters."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        writer = RecordWriter(file)
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            tags = [value.tag for value in event.summary.value]
            if not tags or (event.step < step and not tags[0].startswith(_WRITTEN_AGAIN)):
                writer.write(record)
    os.replace(partial, path)


def write_rows(logger: Logger, rows: dict[int, dict[str, float]]) -> None:
    """Give a logger the values of some steps, by step and then by tag."""
    if not isinstance(logger, TensorBoardLogger):
        for step, row in rows.items():
            logger.log_metrics(row, step)
        return
    writer = logger.experiment._get_file_writer()
    for step, row in rows.items():  # one event for each step, not one for each value
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.items()]
        writer.add_summary(Summary(value=values), step)


# -- in a Trainer ----------------------------------------------------------------------------------


class RunLogger(TensorBoardLogger):
    """A TensorBoard logger that writes every value once.

    A run that resumes writes nothing, and deletes nothing, before it has ``begun``.
    """

    resumed_at: int | None = None  # the step from which the run resumes
    begun = False
    _latest: tuple[int | None, dict[str, float]] = (None, {})

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The writer of the event file."""
        if self._experiment is None:
            if self.resumed_at is not None and not self.begun:
                return _DummyExperiment()  # type: ignore[return-value]
            self._experiment = open_writer(self.log_dir, self.resumed_at)
        assert isinstance(self._experiment, SummaryWriter)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars once, but not the epoch, which Lightning adds to every call."""
        kept = {name: value for name, value in metrics.items() if name != "epoch"}
        if (step, kept) != self._latest:  # a step that is saved is logged before that, and after
            super().log_metrics(kept, step)
            self._latest = (step, kept)


class RunRecord(Callback):
    """Remembers the metrics of the latest validation until the weights change.

    Args:
        lines: print step and metrics at each validation, for logs and pipes.
    """

    def __init__(self, lines: bool = False) -> None:
        self.lines = lines
        self.validated: dict[str, float] = {}

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Forget: the model changes."""
        self.validated = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the metrics."""
        if trainer.sanity_checking:
            return
        found = trainer.callback_metrics.items()
        self.validated = {name: float(value) for name, value in found if name.startswith("val")}
        if self.lines and trainer.state.fn == "fit" and trainer.is_global_zero:
            print(progress_line(trainer.global_step, trainer.max_steps, self.validated), flush=True)


def progress_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """A line of text: step of all steps, if these are known, and metrics.

    >>> progress_line(50, 200, {"val/loss": 1.25})
    'step 50 of 200  val/loss 1.25'
    """
    words = [f"step {step} of {total}" if total > 0 else f"step {step}"]
    return "  ".join(words + [f"{name} {value:.4g}" for name, value in metrics.items()])
