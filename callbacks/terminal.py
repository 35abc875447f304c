"""Progress of a run as lines of text, where there is no terminal for Lightning's bar."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class ProgressLines(Callback):
    """Prints a line at each validation: step, speed, time left and metrics. For logs and pipes."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began, self._first = time.monotonic(), trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or not trainer.is_global_zero:
            return
        step, total = trainer.global_step, float(trainer.max_steps)
        if total < 0:
            total = trainer.estimated_stepping_batches
        rate = (step - self._first) / max(time.monotonic() - self._began, 1e-9)
        metrics = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val")}
        print(progress_line(step, total, rate, metrics), flush=True)


def progress_line(step: int, total: float, rate: float, metrics: Mapping[str, Any]) -> str:
    """A line of text: step of all steps, steps per second, time left and metrics.

    >>> progress_line(50, 200, 2.5, {"val/loss": 1.25})
    'step 50 of 200  2.5 steps/s  about 0:01:00 left  val/loss 1.25'
    """
    known = math.isfinite(total)
    words = [f"step {step}" + (f" of {total:.0f}" if known else ""), f"{rate:.3g} steps/s"]
    if known and total > step and rate > 0:
        words.append(f"about {timedelta(seconds=round((total - step) / rate))} left")
    words += [f"{name} {float(value):.4g}" for name, value in metrics.items()]
    return "  ".join(words)
