"""Options of the Trainer: our logger, callbacks and checkpoints beside those of the user."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from catnat import CategoricalHead
from catnat.callbacks.checkpoints import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint
from catnat.callbacks.fisher_monitor import FisherMonitor
from catnat.callbacks.images import figures_for
from catnat.callbacks.run_record import RunLogger, RunRecord
from catnat.callbacks.terminal import ProgressLines, StepBar
from catnat.callbacks.time_spent import TimeSpent


def complete_options(
    options: dict[str, Any],
    model: LightningModule,
    fisher: FisherMonitor,
    folder: Path,
    save_every: int,
) -> dict[str, Any]:
    """Options of a Trainer, with our logger, callbacks and checkpoints added where not refused.

    Args:
        options: what the user asked for.
        model: what is trained; it decides which pictures are drawn.
        fisher: the monitor.
        folder: of the run.
        save_every: steps between checkpoints.
    """
    own = _as_list(options["callbacks"])
    has_head = any(isinstance(each, CategoricalHead) for each in model.modules())
    monitors = [fisher] if has_head else []  # it refuses a model that has no head
    callbacks: list[Callback] = [*monitors, figures_for(model), *own, RunRecord(), TimeSpent()]
    bar = options["enable_progress_bar"] is not False
    own_bar = any(isinstance(each, ProgressBar) for each in own)
    if bar and not own_bar:
        callbacks.append(StepBar() if sys.stdout.isatty() else ProgressLines())
    if options["enable_checkpointing"] is not False and not options["fast_dev_run"]:
        place = folder / "checkpoints"
        callbacks += [BestCheckpoint(place), LastCheckpoint(place, save_every)]
    logger = options["logger"]
    if logger is None:
        # The folder's name in full, so that "name" adds none.
        logger = RunLogger(folder.parent, "", folder.name, default_hp_metric=False)
    plugins = _as_list(options["plugins"])
    if not any(isinstance(each, CheckpointIO) for each in plugins):
        plugins = [AtomicCheckpointIO(), *plugins]
    return options | {
        "callbacks": callbacks,
        "enable_progress_bar": bar and (own_bar or sys.stdout.isatty()),
        "logger": logger,
        "plugins": plugins,
    }


def check_options(options: dict[str, Any]) -> None:
    """Raise what a Trainer finds wrong with its options."""
    # A Trainer adds to the list of callbacks that it is given.
    Trainer(**options | {"logger": False, "callbacks": _as_list(options["callbacks"])})


def _as_list(value: Any) -> list[Any]:
    """A list of no items for None, of the items of a collection, or of a single value."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) else [value]
