"""The only file that uses private names of Lightning.

``tests/lightning/test_lightning_compat.py`` has one test for each of these names, and fails with a
sentence when a release of Lightning moves one. ``pyproject.toml`` bounds the releases.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment as DummyExperiment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
)
from lightning.pytorch.loops.optimization.automatic import (
    _AutomaticOptimization as AutomaticOptimization,
)
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.optim import Optimizer

__all__ = [
    "AutomaticOptimization",
    "DummyExperiment",
    "accumulates",
    "configured_optimizers",
    "count_batch",
    "count_step",
    "detects_anomalies",
    "log_step_now",
    "logged_step",
    "logging_in",
    "optimization_loop",
    "save_interval",
    "set_logged_step",
    "set_optimization_loop",
    "start_method",
    "step_schedulers",
    "trainer_of",
    "validates_now",
]


def trainer_of(module: LightningModule) -> Trainer | None:
    """The trainer of a module; None if it has none."""
    return module._trainer


def detects_anomalies(trainer: Trainer) -> bool:
    """Whether the trainer looks for the operation behind a NaN in a backward pass."""
    return trainer._detect_anomaly


# -- the loop of training --------------------------------------------------------------------------


def optimization_loop(trainer: Trainer) -> AutomaticOptimization:
    """The loop that takes the optimizer step of a batch."""
    return trainer.fit_loop.epoch_loop.automatic_optimization


def set_optimization_loop(trainer: Trainer, loop: AutomaticOptimization) -> None:
    """Let a loop take the optimizer steps; it continues the counts of the present loop."""
    loop.optim_progress = optimization_loop(trainer).optim_progress
    trainer.fit_loop.epoch_loop.automatic_optimization = loop


def count_step(loop: AutomaticOptimization) -> None:
    """Count an optimizer step that was taken without the loop's own code."""
    progress = loop.optim_progress.optimizer
    progress.zero_grad.increment_ready()
    progress.zero_grad.increment_started()
    progress.zero_grad.increment_completed()
    progress.step.increment_ready()
    progress.step.increment_completed()


def count_batch(trainer: Trainer) -> None:
    """Count a batch with an optimizer step that Lightning did not fetch itself."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    fetcher.fetched += 1
    fetcher.done = fetcher.fetched >= fetcher.length
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.increment_by(1, fetcher.done)
    loop._batches_that_stepped += 1


def step_schedulers(trainer: Trainer) -> None:
    """Step the schedulers that follow optimizer steps."""
    trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=False)


def accumulates(trainer: Trainer) -> bool:
    """Whether the present batch only adds to gradients, without an optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def validates_now(trainer: Trainer) -> bool:
    """Whether the present batch is followed by a validation."""
    loop: Any = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


# -- logging ---------------------------------------------------------------------------------------


def logged_step(trainer: Trainer) -> int:
    """The step under which Lightning writes metrics."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_logged_step(trainer: Trainer, step: int) -> None:
    """Set the step under which Lightning writes metrics."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def log_step_now(trainer: Trainer) -> None:
    """Write the metrics of the present step, before Lightning does."""
    trainer._logger_connector.update_train_step_metrics()


@contextmanager
def logging_in(module: LightningModule, hook: str) -> Iterator[None]:
    """Let ``module.log`` work inside the block as in a hook."""
    before = module._current_fx_name
    module._current_fx_name = hook
    try:
        yield
    finally:
        module._current_fx_name = before


# -- other objects ---------------------------------------------------------------------------------


def save_interval(callback: Any) -> int:
    """Number of steps between the checkpoints of a callback; 0 if it does not count steps.

    It is the attribute ``every_n_steps``, and that of Lightning's ModelCheckpoint.
    """
    return getattr(callback, "every_n_steps", getattr(callback, "_every_n_train_steps", 0))


def start_method(trainer: Trainer) -> str | None:
    """How the strategy starts processes in this program: "spawn" or "fork"; None if it does not."""
    launcher = trainer.strategy.launcher
    return launcher._start_method if isinstance(launcher, _MultiProcessingLauncher) else None


def configured_optimizers(configured: Any) -> tuple[list[Optimizer], list[Any]]:
    """Optimizers, and descriptions of schedulers, from what ``configure_optimizers`` returns."""
    optimizers, schedulers, monitor = _configure_optimizers(configured)
    return optimizers, _configure_schedulers_automatic_opt(schedulers, monitor)
