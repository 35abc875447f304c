"""Training with Lightning: what a LightningCLI does, with recipes, and a test at the end."""

import inspect
import sys
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden

from catnat.callbacks import FisherMonitor
from catnat.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from catnat.callbacks.files import AtomicCheckpointIO
from catnat.callbacks.images import Figures
from catnat.callbacks.tensorboard import RunRecord
from catnat.checks import numbers, require_at_least, require_positive
from catnat.cli.options import Options
from catnat.cli.run import Metrics, RunCLI
from catnat.head import CategoricalHead
from catnat.lit_modules.step_module import StepModule

_RATES = {"learning_rate", "psi_learning_rate"}
_OPTIMIZER_OPTIONS = {"optimizer", "lr_decay", "lr_decay_steps", "lr_schedule"} | _RATES
_LEAST = {  # options of the Trainer, which checks the others
    "num_sanity_val_steps": -1,
    "gradient_clip_val": 0,
    "log_every_n_steps": 0,
    "min_steps": 0,
    "min_epochs": 0,
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
}
_COUNT_OR_SHARE = int | float | None


class CatnatCLI(RunCLI):
    """The command line of models with a categorical head, and of other Lightning modules.

    ``model``, ``datamodule``, ``trainer`` and ``config`` are what a command line describes.
    """

    checkpoint_key = "pytorch-lightning_version"
    resumes_random_states = True

    # -- from words to objects -----------------------------------------------------------------

    def add_core_arguments_to_parser(self, parser: Any) -> None:
        """Add model and data, by the names of their classes or with their options, and the rest."""
        # 1 is one batch, 1.0 is all of them. The cache of typing may have turned the union round,
        # and then the parser would read 1 as 1.0.
        annotations = inspect.unwrap(Trainer.__init__).__annotations__
        shares = [name for name, kind in annotations.items() if kind == _COUNT_OR_SHARE]
        annotations |= dict.fromkeys(shares, _COUNT_OR_SHARE)
        by_name = parser is self.parser
        model_type = LightningModule if by_name else self.model_type
        data_type = LightningDataModule if by_name else self.data_type
        parser.add_lightning_class_args(model_type, "model", by_name)
        if data_type:
            parser.add_lightning_class_args(data_type, "data", by_name, required=False)
        parser.add_lightning_class_args(FisherMonitor, "fisher")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({"trainer.devices": 1, "trainer.enable_model_summary": False})

    def complete_options(self) -> None:
        """Give the model the learning rate of an optimizer that the command line names.

        Raises:
            ValueError: an option would have no effect.
        """
        config = self.config
        trainer = config.trainer
        if trainer.enable_checkpointing is False or trainer.fast_dev_run or trainer.barebones:
            for name in self.new_options:
                if name == "save_every" or name.startswith("checkpoint."):
                    raise ValueError(f"--{name} has no effect: the run saves no checkpoints")
        if config.lr_scheduler and not config.optimizer:
            raise ValueError("--lr_scheduler needs an --optimizer CLASS, such as Adam")
        if not config.optimizer or not issubclass(self.model_type, StepModule):
            return
        options = config.model.init_args
        for name in _OPTIMIZER_OPTIONS:
            is_chosen = f"model.{name}" in self.new_options
            if is_chosen and options[name] != self.page.get_default(f"model.{name}"):
                raise ValueError(
                    f"--{name} {options[name]} is for the optimizer of the model itself, not for "
                    f"--optimizer {config.optimizer.class_path}, which has --optimizer.lr"
                )
        rate = config.optimizer.init_args.get("lr")
        if rate is not None:  # the record says the rate that is used
            for name in _RATES.intersection(options.keys()):
                options[name] = rate

    # -- the Trainer ---------------------------------------------------------------------------

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with our logger, callbacks and checkpoints where they are not refused."""
        options = {**self.config_init.trainer, **kwargs}
        for name, least in _LEAST.items():
            require_at_least(least, **numbers(options, name))
        set_validation_interval(options)
        callbacks = _as_list(options["callbacks"])
        shows_progress = options["enable_progress_bar"] is not False
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        on_terminal = has_bar or sys.stdout.isatty()
        options["enable_progress_bar"] = shows_progress and on_terminal
        self.record = RunRecord(lines=shows_progress and not on_terminal)
        self.logger = self.make_logger(self.began)
        self.logger.begun = False
        if not options["barebones"]:
            callbacks = [self.record, Figures(), *callbacks]
            if any(isinstance(module, CategoricalHead) for module in self.model.modules()):
                callbacks.insert(0, self.config_init.fisher)
            if options["enable_checkpointing"] is not False and not options["fast_dev_run"]:
                folder = self.folder.path / "checkpoints"
                best = self.config_init.checkpoint
                best.dirpath = best.dirpath or str(folder)
                every = self.config.save_every or default_interval(options["max_steps"])
                callbacks += [best, LastCheckpoint(folder, every)]
            options["plugins"] = [AtomicCheckpointIO(), *_as_list(options["plugins"])]
            if options["logger"] in (None, True) and self.line.command == "fit":
                options["logger"] = self.logger
            options["logger"] = options["logger"] or False
        if self.keeps:  # where Lightning saves the run before SLURM requeues it
            options["default_root_dir"] = str(self.folder.path)
        self.patience = {x: x.patience for x in callbacks if isinstance(x, EarlyStopping)}
        phases = LambdaCallback(
            on_train_start=self._begin_training,
            on_train_batch_start=self._enter_batches,
            on_train_batch_end=self._write_options,
            on_sanity_check_end=self._leave_batches,
            on_validation_start=self._enter_batches,
            on_test_start=self._enter_batches,
            on_predict_start=self._enter_batches,
        )
        trainer = Trainer(**options | {"callbacks": [phases, *callbacks]})
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            start_method = trainer.strategy.launcher._start_method
            raise ValueError(
                f"--strategy of processes that begin by {start_method} is not supported: choose ddp"
            )
        return trainer

    def _begin_training(self, *_: Any) -> None:
        self.logger.begun = True
        for callback, patience in self.patience.items():
            callback.patience = patience  # a checkpoint brings its own

    @rank_zero_only
    def _write_options(self, *_: Any) -> None:
        if self.keeps:
            self.folder.begin(self.config_text)

    def _enter_batches(self, *_: Any) -> None:
        self.in_batches = True

    def _leave_batches(self, *_: Any) -> None:
        self.in_batches = False  # the loader of training is built after the sanity check

    # -- commands ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.trainer.global_step

    def fit(self) -> Metrics:
        """Train, then validate (to select by) and test what was learned last."""
        trainer = self.trainer
        try:
            trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=self.line.ckpt_path)
        except SystemExit:
            if trainer.interrupted:  # Lightning ends the process with code 1
                raise KeyboardInterrupt from None
            raise
        if trainer.global_step == self.began:
            # The run had ended before: what follows belongs to its last step.
            trainer.fit_loop.epoch_loop._batches_that_stepped = self.began
            self._begin_training()
        if trainer.num_training_batches == 0 and trainer.limit_train_batches:
            raise ValueError("the data have no training batch: nothing was learned")
        if self.config.trainer.fast_dev_run:
            return {}
        metrics = dict(self.record.validated)
        if not metrics and self._can("validation_step", "val_dataloader"):
            metrics = self.evaluate("validate")
        if self._can("test_step", "test_dataloader"):
            metrics |= self.evaluate("test")
        metrics |= self.config_init.fisher.latest
        source = getattr(self.datamodule, "hparams", {}).get("source")
        if source:
            metrics["data_source"] = source
        self._write_options()
        hparams = {"data_source": source}
        for name, value in self.hparams().items():
            if value is None:  # the model may have a default for each head
                hparams[name] = self.model.hparams.get(name)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning writes metrics
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                self.write_hparams(logger, metrics, step, **hparams)
        return metrics

    def evaluate(self, command: str) -> Metrics:
        """Validate, test or predict with a checkpoint, or with what was trained.

        The metrics are those of the first loader; predictions are for a callback such as
        BasePredictionWriter.
        """
        quiet = {"return_predictions": False} if command == "predict" else {"verbose": False}
        metrics = getattr(self.trainer, command)(
            self.model,
            datamodule=self.datamodule,
            ckpt_path=self.line.ckpt_path if self.line.command != "fit" else None,
            **quiet,
        )
        return metrics[0] if metrics else {}

    def _can(self, step: str, loader: str) -> bool:
        """Whether model and data define these methods; those of a user may not."""
        owner = self.datamodule or self.model
        return is_overridden(step, self.model) and is_overridden(loader, owner)


def set_validation_interval(options: Options) -> None:
    """In a run limited by steps, validate every n steps, and at the end.

    A run of epochs validates after each, as Lightning does.
    """
    require_positive(**numbers(options, "val_check_interval"))
    if options["check_val_every_n_epoch"] != 1:
        return
    steps = options["max_steps"]
    if options["val_check_interval"] is None and steps > 0:
        batches = options["accumulate_grad_batches"]  # of a step
        options["val_check_interval"] = batches * min(default_interval(steps), steps)
    if isinstance(options["val_check_interval"], int):
        options["check_val_every_n_epoch"] = None  # steps, whatever the length of an epoch


def default_interval(max_steps: int) -> int:
    """Steps between validations, and between checkpoints: 500, but not over 30 in a run.

    >>> default_interval(2_000), default_interval(60_000)
    (500, 2000)
    """
    return max(500, max_steps // 30)


def _as_list(value: Any) -> list[Any]:
    """A list of no items for None, or of a single value; a list as it is."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
