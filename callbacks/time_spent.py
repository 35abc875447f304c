"""Where the seconds of a run of Lightning went."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer

from catnat.callbacks.stopwatch import Stopwatch


class TimeSpent(Callback):
    """Measures the seconds of training steps, validations, checkpoints and the test.

    Args:
        clock: gives the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.watch = Stopwatch("steps", "validation", "checkpoints", "test", clock=clock)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.watch.begin("steps")
        self._saved_before = _seconds_of_saving(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock: of the time of training, what is left for the steps."""
        self.watch.end("steps")
        self._count_checkpoints(trainer)
        seconds = self.watch.seconds
        seconds["steps"] -= seconds["validation"] + seconds["checkpoints"]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        if not trainer.sanity_checking:
            self.watch.begin("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        if not trainer.sanity_checking:
            self.watch.end("validation")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.watch.begin("test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.watch.end("test")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Count the checkpoint after the last step, which is saved when training has ended."""
        if stage == "fit":
            self._count_checkpoints(trainer)

    def _count_checkpoints(self, trainer: Trainer) -> None:
        before = getattr(self, "_saved_before", 0.0)
        self.watch.seconds["checkpoints"] = _seconds_of_saving(trainer) - before


def _seconds_of_saving(trainer: Trainer) -> float:
    """Seconds that our writer of checkpoints has taken; 0 for another one."""
    return float(getattr(trainer.strategy.checkpoint_io, "seconds", 0.0))
