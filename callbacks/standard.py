"""The set of callbacks that every run of train.py has."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from .checkpoints import AtomicCheckpointIO, LastCheckpoint
from .figures import figures_for
from .fisher import FisherMonitor
from .progress import ProgressLines, StepBar
from .record import RunLogger, RunRecord


def standard_options(
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
    callbacks: list[Callback] = [fisher, figures_for(model), *_as_list(options["callbacks"])]
    callbacks.append(RunRecord())
    bar = options["enable_progress_bar"] is not False
    if bar:
        callbacks.append(StepBar() if sys.stdout.isatty() else ProgressLines())
    if options["enable_checkpointing"] is not False and not options["fast_dev_run"]:
        callbacks += _checkpoints(folder / "checkpoints", save_every)
    logger = options["logger"]
    if logger is None:
        # The folder's name in full, so that "name" adds none.
        logger = RunLogger(folder.parent, "", folder.name, default_hp_metric=False)
    return options | {
        "callbacks": callbacks,
        "enable_progress_bar": bar and sys.stdout.isatty(),
        "logger": logger,
        "plugins": [AtomicCheckpointIO(), *_as_list(options["plugins"])],
    }


def _checkpoints(folder: Path, save_every: int) -> list[Callback]:
    best = ModelCheckpoint(
        folder,
        "best",
        monitor="val/loss",
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    return [best, LastCheckpoint(folder, save_every)]


def _as_list(value: Any) -> list[Any]:
    """None is nothing, a collection itself, anything else one thing."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) else [value]
