"""A progress bar for the whole run, and the duration of a test."""

import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_only

_LONG = 10.0  # seconds; a shorter test is not announced


class RunProgressBar(TQDMProgressBar):
    """Lightning's progress bar, with all optimizer steps of a run in one bar.

    Lightning's own bars and their remaining times cover one epoch.
    """

    def __init__(self) -> None:
        super().__init__()

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The logged metrics, without the version of the logger: it is the folder of the run."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin with the steps that the run has taken before it was resumed."""
        super().on_train_start()
        bar = self.train_progress_bar
        steps = trainer.estimated_stepping_batches
        if 0 < steps < float("inf"):
            bar.reset(int(steps))
        bar.initial = bar.n = trainer.global_step
        self.on_train_epoch_start(trainer)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Show the number of the epoch; a run that resumes within an epoch does not call this."""
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Show the steps so far, and the latest metrics."""
        bar = self.train_progress_bar
        bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
        bar.update(trainer.global_step - bar.n)  # tqdm draws ten times a second

    def on_train_end(self, *_: Any) -> None:
        """Draw the last step."""
        self.train_progress_bar.refresh()
        super().on_train_end()


class TestTime(Callback):
    """Prints the expected duration of a long test after its first batch.

    A model may describe the work of a batch with an attribute ``test_work``, a text such as
    "64 samples of each image".
    """

    __test__ = False  # pytest takes a class of this name for a test

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start = time.monotonic()

    @rank_zero_only
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Print a line after the first batch."""
        if batch_idx or dataloader_idx:
            return
        batches = sum(trainer.num_test_batches)
        seconds = (time.monotonic() - self._start) * batches
        if seconds < _LONG:
            return
        work = getattr(pl_module, "test_work", "")
        line = f"testing: {batches:,} batches{f', {work}' if work else ''}, about "
        line += str(timedelta(seconds=round(seconds)))
        bar = trainer.progress_bar_callback
        if bar is None:
            print(line, flush=True)
        else:
            bar.print(line)
