"""TensorBoard writers that describe their tags, and write each value once."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_BLOB_SEQUENCE,
    DATA_CLASS_SCALAR,
    Summary,
)
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.writer import FileWriter, SummaryWriter

from catnat.callbacks.monitors import check_monitors
from catnat.callbacks.tags import description
from catnat.lightning_compat import DummyExperiment
from catnat.rng import State

_QUEUE = 1000  # events; a row of each step would wait for the default, 10
_SHOWN_FIRST = ("env", "head", "learning_rate", "num_categories", "num_latents", "seed")  # HPARAMS

# -- event files -----------------------------------------------------------------------------------


class DescribedWriter(SummaryWriter):
    """A writer of event files in which the first value of each tag carries its description.

    TensorBoard's fast loader ignores a description without a data class.
    """

    def _get_file_writer(self) -> FileWriter:
        is_new = self.file_writer is None
        writer = super()._get_file_writer()  # type: ignore[no-untyped-call]
        if is_new:
            writer.add_summary = partial(_add_described, writer.add_summary, set())
        return writer


def _add_described(
    add_summary: Callable[..., None], described: set[str], summary: Summary, *when: Any
) -> None:
    for value in summary.value:
        if value.tag in described:
            continue
        described.add(value.tag)
        if value.tag == EXPERIMENT_TAG:  # TensorBoard begins with hyperparameters that differ
            content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
            for hparam in content.experiment.hparam_infos:
                hparam.differs = hparam.name in _SHOWN_FIRST
            value.metadata.plugin_data.content = content.SerializeToString()
        elif text := description(value.tag):
            is_image = value.HasField("image")
            value.metadata.summary_description = text
            value.metadata.plugin_data.plugin_name = "images" if is_image else "scalars"
            value.metadata.data_class = DATA_CLASS_BLOB_SEQUENCE if is_image else DATA_CLASS_SCALAR
    add_summary(summary, *when)


def open_writer(folder: str | Path, resumed_at: int | None = None) -> SummaryWriter:
    """A writer of a new event file; files that exist stay as they are.

    Args:
        folder: folder of the run.
        resumed_at: step from which the run resumes. TensorBoard leaves out the values of this step
            and later ones in earlier files, because the run writes them again. None for a run that
            starts; in a folder with event files this leaves out all of their values.
    """
    earlier = sorted(path.name for path in Path(folder).glob("events.out.tfevents.*"))
    if earlier and resumed_at is None:
        resumed_at = 0
    # TensorBoard reads files in the order of their names, which begin with the second of creation.
    while earlier and earlier[-1].split(".")[3] == f"{int(time.time()):010d}":
        time.sleep(0.01)
    try:
        return DescribedWriter(str(folder), purge_step=resumed_at, max_queue=_QUEUE)
    except OSError as error:
        raise _in_folder(error, folder) from None


def _in_folder(error: OSError, folder: str | Path) -> OSError:
    """The error with the place of the file: a full disk does not name it."""
    error.filename = error.filename or f"{folder}/events.out.tfevents.*"
    return error


def write_row(logger: Logger, row: dict[str, float], step: int) -> None:
    """Give a logger the values of a step, by tag."""
    if not isinstance(logger, TensorBoardLogger):
        logger.log_metrics(row, step)
        return
    # One event for the step, not one for each value.
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.items()]
    logger.experiment._get_file_writer().add_summary(Summary(value=values), step)


# -- in a Trainer ----------------------------------------------------------------------------------


class RunLogger(TensorBoardLogger):
    """A TensorBoard logger that writes every value once.

    The event file is opened with the first value, and not while ``begun`` is False. A run that is
    refused or fails before that leaves its folder as it was.
    """

    resumed_at: int | None = None  # the step from which the run resumes
    begun = True
    _latest = ""  # row, as text: NaN is not equal to NaN

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The writer of the event file."""
        if not self.begun:
            return DummyExperiment()  # type: ignore[return-value]
        if self._experiment is None:
            self._experiment = open_writer(self.log_dir, self.resumed_at)
        return self._experiment

    def save(self) -> None:
        """Write what waits, and ``hparams.yaml``, if there is an event file."""
        if self._experiment is not None:
            super().save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what waits. The file stays open: a test after the training writes to it, too.

        A second file of the same second might come before this one in the order of names, and
        TensorBoard would leave out its values.
        """
        if self._experiment is not None:
            self._experiment.flush()
        if status == "success":
            self.save()

    def close(self) -> None:
        """Close the event file."""
        if self._experiment is not None:
            self._experiment.close()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars once, but not the epoch, which Lightning adds to every call."""
        scalars = {name: value for name, value in metrics.items() if name != "epoch"}
        row = repr((scalars, step))
        if row != self._latest:  # a step that is saved is logged before that, and after
            self._latest = row
            try:
                super().log_metrics(scalars, step)
            except ValueError as error:  # Lightning takes every failure for a value of a wrong type
                if isinstance(error.__cause__, OSError):
                    raise _in_folder(error.__cause__, self.log_dir) from None
                raise


class RunRecord(Callback):
    """Remembers the metrics of the latest validation until the weights change.

    They are part of a checkpoint: a run that resumes after its last step does not validate again.
    A monitored metric that the model does not log is refused after the sanity check.

    Args:
        lines: print step, time left and metrics at each validation, for logs and pipes.
    """

    sees_blocks = True  # of replayed steps

    def __init__(self, lines: bool = False) -> None:
        self.lines = lines
        self.validated: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._progress = Progress(trainer.global_step)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the names of the monitored metrics."""
        check_monitors(trainer)

    def state_dict(self) -> State:
        """The metrics."""
        return {"validated": self.validated}

    def load_state_dict(self, state_dict: State) -> None:
        """Remember the metrics of the run that is resumed."""
        self.validated = state_dict["validated"]

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Forget: the model changes."""
        self.validated = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the metrics."""
        if trainer.sanity_checking:
            return
        self.validated = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val")
        }
        if self.lines and trainer.state.fn == "fit" and trainer.is_global_zero:
            line = self._progress.line(trainer.global_step, trainer.max_steps, self.validated)
            print(line, flush=True)


class Progress:
    """The line that a run prints: its step, the time left, and metrics.

    Args:
        first_step: from which this process takes steps.
    """

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._start = time.monotonic()

    def line(self, step: int, total: int, metrics: Mapping[str, float]) -> str:
        """A line of text: step of all steps and time left, if these are known, and metrics."""
        words = [f"step {step} of {total}" if total > 0 else f"step {step}"]
        if self._first_step < step < total:
            seconds_per_step = (time.monotonic() - self._start) / (step - self._first_step)
            words.append(f"ETA {timedelta(seconds=round(seconds_per_step * (total - step)))}")
        return "  ".join(words + [f"{name} {value:.4g}" for name, value in metrics.items()])
