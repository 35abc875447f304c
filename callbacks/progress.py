"""Progress of a run: a bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class StepBar(RichProgressBar):
    """Lightning's progress bar, titled with the steps done of the whole run, not with the epoch."""

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
        """Metrics beside the bar, without the version number of the run."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class ProgressLines(Callback):
    """Prints a line at each validation: step, speed and metrics. For logs and pipes.

    During a test it prints how many batches are done, and the time left.

    Args:
        test_seconds: time between two lines of a test; a shorter test prints no line.
    """

    def __init__(self, test_seconds: float = 10.0) -> None:
        self.test_seconds = test_seconds
        self._said = 0.0  # time of the latest line of a test

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
        """Print a line if ``test_seconds`` have passed since the latest line."""
        now = time.monotonic()
        if now - self._said < self.test_seconds or not trainer.is_global_zero:
            return
        self._said = now
        batches = trainer.num_test_batches[dataloader_idx]
        print(line_of_test(batch_idx + 1, batches, now - self._began), flush=True)


def line_of_test(done: int, batches: float, seconds: float) -> str:
    """A line of text: the batches done of a test, and the time left."""
    if batches == float("inf"):
        return f"test  batch {done}"
    left = seconds * (batches - done) / done
    return f"test  batch {done} of {batches:.0f}  about {left:.0f} s left"


def progress_line(step: int, rate: float, metrics: Mapping[str, Any]) -> str:
    """A line of text: step, steps per second and metrics."""
    shown = "  ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
    return f"step {step}  {rate:.3g} steps/s  {shown}"
