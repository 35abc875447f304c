"""Where the seconds of a run went."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer

from catnat.callbacks.terminal import duration


class TimeSpent(Callback):
    """Measures the seconds of training steps, validations, checkpoints and the test.

    ``seconds`` has them by name. ``first`` is when the first of them began.

    Args:
        clock: gives the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.first: float | None = None
        self.seconds = dict.fromkeys(("steps", "validation", "checkpoints", "test"), 0.0)
        self._clock = clock
        self._began: dict[str, float] = {}

    def line(self, began: float, imported: float) -> str:
        """A line of text with the time of each part of a run.

        Args:
            began: when the run began, by the clock.
            imported: when all libraries were there; what follows up to ``first`` is the start.
        """
        start = (self.first or imported) - imported
        parts = {"imports": imported - began, "start": start, **self.seconds}
        said = (f"{name} {duration(each)}" for name, each in parts.items() if each > 0)
        return "time: " + ", ".join(said)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._begin("steps")
        self._saved_before = _seconds_of_saving(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock: of the time of training, what is left for the steps."""
        self._end("steps")
        self._count_checkpoints(trainer)
        self.seconds["steps"] -= self.seconds["validation"] + self.seconds["checkpoints"]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        if not trainer.sanity_checking:
            self._begin("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        if not trainer.sanity_checking:
            self._end("validation")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._begin("test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._end("test")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Count the checkpoint after the last step, which is saved when training has ended."""
        if stage == "fit":
            self._count_checkpoints(trainer)

    def _count_checkpoints(self, trainer: Trainer) -> None:
        before = getattr(self, "_saved_before", 0.0)
        self.seconds["checkpoints"] = _seconds_of_saving(trainer) - before

    def _begin(self, name: str) -> None:
        self._began[name] = self._clock()
        if self.first is None:
            self.first = self._began[name]

    def _end(self, name: str) -> None:
        self.seconds[name] += self._clock() - self._began.get(name, self._clock())


def _seconds_of_saving(trainer: Trainer) -> float:
    """Seconds that our writer of checkpoints has taken; 0 for another one."""
    return float(getattr(trainer.strategy.checkpoint_io, "seconds", 0.0))
