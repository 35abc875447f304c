"""Training with Lightning: what a LightningCLI does, with recipes, and a test at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback, ProgressBar
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.model_helpers import is_overridden

from catnat import CategoricalHead
from catnat.callbacks import FisherMonitor
from catnat.callbacks.checkpoints import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint
from catnat.callbacks.images import Figures
from catnat.callbacks.tensorboard import RunLogger, RunRecord
from catnat.checks import require_at_least
from catnat.cli.end_of_run import write_hparams_of
from catnat.cli.folder import begin
from catnat.cli.options import DATA, RECIPES, Recipe, load
from catnat.cli.run import RunCLI, arguments, short_names


class CatnatCLI(RunCLI):
    """The command line of models with a categorical head, and of other Lightning modules.

    ``model``, ``datamodule``, ``trainer`` and ``config`` are what a command line describes.
    """

    in_checkpoints = "pytorch-lightning_version"
    of_lightning_cli: ClassVar[dict[str, Any]] = {
        "trainer_defaults": {
            "devices": 1, "default_root_dir": "runs", "enable_model_summary": False,
        }
    }  # fmt: skip

    # -- from words to objects -----------------------------------------------------------------

    def find_classes(self) -> None:
        """Find the classes of model and data; a subclass of one of our models has its recipe."""
        model = load(self.names.path, "--model")
        ours = {load(recipe.model): recipe for recipe in RECIPES.values() if recipe.data}
        bases = getattr(model, "__mro__", ())
        self.recipe = next((ours[each] for each in bases if each in ours), Recipe())
        usual = DATA[self.recipe.data[0]] if self.recipe.data else None
        self.data_path = self.names.data or usual
        data = load(self.data_path, "--data") if self.data_path else None
        of_data, of_model = arguments(data) if data else set(), arguments(model)
        # An option of the model follows from one of the data: which one, and by which function.
        derived = {name: (name, None) for name in of_data} | getattr(data, "derived_options", {})
        follows = of_model & set(getattr(model, "options_of_data", ()))
        self.links = {name: derived[name] for name in follows & derived.keys()}
        links = {target: source for target, (source, _) in self.links.items()}
        self.short = short_names(of_model, of_data, arguments(Trainer), links)
        defaults = self.recipe.defaults.items()
        self.defaults = {name: x for name, x in defaults if name.partition(".")[2] in of_data}

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add our own options, and those that follow from others."""
        super().add_arguments_to_parser(parser)
        parser.add_lightning_class_args(FisherMonitor, "fisher")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        for target, (source, function) in self.links.items():
            names = (f"data.init_args.{source}", f"model.init_args.{target}")
            parser.link_arguments(*names, compute_fn=function)

    # -- the Trainer ---------------------------------------------------------------------------

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with our logger, callbacks and checkpoints where they are not refused."""
        options = {**self.config_init.trainer, **kwargs}
        require_at_least(1, accumulate_grad_batches=options["accumulate_grad_batches"])
        set_validation_interval(options)
        own = _as_list(options["callbacks"])
        self.fisher = next(
            (x for x in own if isinstance(x, FisherMonitor)), self.config_init.fisher
        )
        bar = options["enable_progress_bar"] is not False
        own_bar = any(isinstance(each, ProgressBar) for each in own)
        terminal = own_bar or sys.stdout.isatty()
        self.record = RunRecord(lines=bar and not terminal)
        if options["barebones"]:
            return Trainer(**options | {"callbacks": own or None})
        callbacks = [self.record, Figures(), *own]
        has_head = any(isinstance(each, CategoricalHead) for each in self.model.modules())
        if has_head and self.fisher not in own:
            callbacks.insert(0, self.fisher)
        if self.keeps:  # before others, which may log
            begins = partial(begin, self.folder.path, self.options)
            callbacks.insert(0, LambdaCallback(on_train_start=begins))
        if options["enable_checkpointing"] is not False and not options["fast_dev_run"]:
            place = self.folder.path / "checkpoints"
            best = self.config_init.checkpoint
            best.dirpath = best.dirpath or str(place)
            every = self.config.save_every
            every = default_interval(options["max_steps"]) if every is None else every
            require_at_least(1, save_every=every)
            callbacks += [best, LastCheckpoint(place, every)]
        if options["logger"] in (None, True):
            options["logger"] = (
                self._logger() if self.names.command == "fit" else bool(options["logger"])
            )
        plugins = _as_list(options["plugins"])
        if not any(isinstance(each, CheckpointIO) for each in plugins):
            plugins = [AtomicCheckpointIO(), *plugins]
        options["enable_progress_bar"] = bar and terminal
        if self.keeps:  # where Lightning saves the run before SLURM requeues it
            options["default_root_dir"] = str(self.folder.path)
        trainer = Trainer(**options | {"callbacks": callbacks, "plugins": plugins})
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            start_method = trainer.strategy.launcher._start_method
            raise ValueError(
                f"--strategy of processes that begin by {start_method} is not supported: choose ddp"
            )
        return trainer

    def _logger(self) -> RunLogger:
        folder = self.folder.path  # its name in full, so that "name" adds none
        logger = RunLogger(folder.parent, "", folder.name, default_hp_metric=False)
        logger.begun = False
        if self.folder.resumed:
            logger.resumed_at = self.checkpoint["global_step"]
        return logger

    # -- commands ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps done; 0 before there is a Trainer."""
        return self.trainer.global_step if hasattr(self, "trainer") else 0

    def fit(self) -> dict[str, Any]:
        """Train, then validate (to select by) and test what was learned last."""
        trainer = self.trainer
        try:
            trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=self.names.ckpt_path)
        except SystemExit:
            if trainer.interrupted:  # Lightning ends the process with code 1
                raise KeyboardInterrupt from None
            raise
        if trainer.global_step == self.began:
            # The run had ended before: what follows belongs to its last step.
            trainer.fit_loop.epoch_loop._batches_that_stepped = self.began
            if self.keeps:
                begin(self.folder.path, self.options, trainer)
        if trainer.num_training_batches == 0 and trainer.limit_train_batches:
            raise ValueError("the data have no training batch: nothing was learned")
        if self.config.trainer.fast_dev_run:
            return {}
        metrics: dict[str, Any] = dict(self.record.validated)
        if not metrics and self._can("validation_step", "val_dataloader"):
            metrics = self._first(trainer.validate) if trainer.limit_val_batches else {}
        if self._can("test_step", "test_dataloader"):
            metrics |= self._first(trainer.test)
        metrics |= getattr(self.fisher, "latest", {})
        if source := getattr(self.datamodule, "hparams", {}).get("source"):
            metrics["data_source"] = source
        if self.is_first and trainer.loggers:
            write_hparams_of(trainer, metrics, self.config.seed_everything)
        return metrics

    def validate(self) -> dict[str, Any]:
        """Validate the checkpoint."""
        return self._first(self.trainer.validate, self.names.ckpt_path)

    def test(self) -> dict[str, Any]:
        """Test the checkpoint."""
        return self._first(self.trainer.test, self.names.ckpt_path)

    def predict(self) -> dict[str, Any]:
        """Let the checkpoint predict; a callback such as BasePredictionWriter takes the result."""
        self.trainer.predict(
            self.model, datamodule=self.datamodule, ckpt_path=self.names.ckpt_path,
            return_predictions=False,
        )  # fmt: skip
        return {}

    def _first(self, evaluate: Any, ckpt_path: Path | None = None) -> dict[str, Any]:
        """Metrics of the first loader's evaluation."""
        found = evaluate(self.model, datamodule=self.datamodule, ckpt_path=ckpt_path, verbose=False)
        return dict(found[0]) if found else {}

    def _can(self, step: str, loader: str) -> bool:
        """Whether model and data define these methods; those of a user may not."""
        owner = self.model if self.datamodule is None else self.datamodule
        return is_overridden(step, self.model) and is_overridden(loader, owner)


def set_validation_interval(options: dict[str, Any]) -> None:
    """Validate by steps in a run that is as long as a number of steps; at the latest, at the end.

    A run of epochs validates after each, as Lightning does.
    """
    if options["check_val_every_n_epoch"] == 1:
        if (steps := options["max_steps"]) > 0 and options["val_check_interval"] is None:
            batches = options["accumulate_grad_batches"]  # of a step
            options["val_check_interval"] = batches * min(default_interval(steps), steps)
        if isinstance(options["val_check_interval"], int):
            require_at_least(1, val_check_interval=options["val_check_interval"])
            options["check_val_every_n_epoch"] = None  # steps, whatever the length of an epoch


def default_interval(max_steps: int) -> int:
    """Steps between validations, and between checkpoints: 500, but not over 30 in a run.

    >>> default_interval(2_000), default_interval(60_000)
    (500, 2000)
    """
    return max(500, max_steps // 30)


def _as_list(value: Any) -> list[Any]:
    """A list of no items for None, of the items of a collection, or of a single value."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) else [value]
