"""Progress: a bar on a terminal; elsewhere a line at each validation, and some during a test."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class StepBar(RichProgressBar):
    """Lightning's bar for one epoch, titled with the steps done: runs here are so many steps."""

    def _get_train_description(self, current_epoch: int) -> str:
        steps = f"{self.trainer.global_step:,}"
        most = self.trainer.max_steps
        return f"step {steps} of {most:,}" if most > 0 else f"step {steps}"

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Move the bar to the last batch that was trained on: a model may take several at once."""
        latest = trainer.fit_loop.epoch_loop.batch_idx
        super().on_train_batch_end(trainer, pl_module, outputs, batch, latest)

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Metrics beside the bar; the number of the run was said before."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class ProgressLines(Callback):
    """Prints step, speed and the validation metrics, one line at a time: for logs and pipes.

    A test prints how far it has come, and how long it will take.

    Args:
        test_seconds: time between two lines of a test; a test that is over before prints none.
    """

    def __init__(self, test_seconds: float = 10.0) -> None:
        self.test_seconds = test_seconds
        self._said = 0.0  # when the latest line of a test was printed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began, self._first = time.monotonic(), trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line."""
        training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if not training or not trainer.is_global_zero:
            return
        rate = (trainer.global_step - self._first) / max(time.monotonic() - self._began, 1e-9)
        metrics = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        print(progress_line(trainer.global_step, rate, metrics), flush=True)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began = self._said = time.monotonic()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Print a line if the latest is some time ago."""
        now = time.monotonic()
        if now - self._said < self.test_seconds or not trainer.is_global_zero:
            return
        self._said = now
        batches = trainer.num_test_batches[dataloader_idx]
        print(line_of_test(batch_idx + 1, batches, now - self._began), flush=True)


def line_of_test(done: int, batches: float, seconds: float) -> str:
    """How far a test has come after so many seconds, in one line."""
    if batches == float("inf"):
        return f"test  batch {done}"
    left = seconds * (batches - done) / done
    return f"test  batch {done} of {batches:.0f}  about {left:.0f} s left"


def progress_line(step: int, rate: float, metrics: Mapping[str, Any]) -> str:
    """Step, steps per second and metrics in one line."""
    shown = "  ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
    return f"step {step}  {rate:.3g} steps/s  {shown}"
