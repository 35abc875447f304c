"""Progress where there is no terminal: one line at each validation instead of a moving bar."""

from __future__ import annotations

import time

from lightning.pytorch import Callback, LightningModule, Trainer


class ProgressLines(Callback):
    """Prints step, speed and the validation metrics, one line at a time: for logs and pipes."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began, self._first = time.monotonic(), trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        rate = (trainer.global_step - self._first) / max(time.monotonic() - self._began, 1e-9)
        metrics = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        shown = "  ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
        print(f"step {trainer.global_step}  {rate:.3g} steps/s  {shown}", flush=True)
