"""Runs of Lightning modules: the Trainer, resuming, a test at the end."""

import sys
from typing import Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden

from catnat.callbacks.checkpoints import LastCheckpoint
from catnat.callbacks.files import AtomicCheckpointIO, load_checkpoint
from catnat.callbacks.images import Figures
from catnat.callbacks.progress import RunProgressBar, TestTime
from catnat.callbacks.tensorboard import RunRecord
from catnat.checks import numbers, require_at_least, require_positive, require_within
from catnat.cli.folder import RunFolder
from catnat.cli.names import Options
from catnat.cli.parsing import CatnatCLI, print_config_if_asked
from catnat.cli.request import Request, flat
from catnat.cli.resume import check_checkpoint, check_options, resumed_text
from catnat.cli.run import Metrics, hparams_of, make_logger, write_hparams
from catnat.heads.base import CategoricalHead
from catnat.heads.registry import make_head
from catnat.lightning_compat import logged_step, set_logged_step, start_method

_LEAST = {  # for options that the Trainer itself does not check
    "num_sanity_val_steps": -1,
    "gradient_clip_val": 0,
    "log_every_n_steps": 0,
    "min_steps": 0,
    "min_epochs": 0,
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
}
_OF_TRAINING = (  # options without effect on an evaluation
    *("trainer.max_steps", "trainer.max_epochs", "trainer.max_time", "trainer.min_steps"),
    *("save_every", "model.learning_rate", "model.optimizer", "optimizer", "lr_scheduler"),
    *("trainer.accumulate_grad_batches", "trainer.gradient_clip_val", "model.gradient_clip"),
)


class LightningRun(CatnatCLI):
    """A run with Lightning's Trainer; see :class:`catnat.cli.run.Run`.

    Args:
        request: the command line.
        until: "options": parse them. "objects": build model, data and trainer, too. "end": also
            open the folder of the run.
    """

    in_batches = False

    def __init__(self, request: Request, until: str = "end") -> None:
        self.until = until
        try:
            super().__init__(request)
        except BaseException:
            self.close()
            raise

    def before_instantiate_classes(self) -> None:
        """Check the options, and the checkpoint of a run that is resumed."""
        request, config = self.request, self.config
        command = request.command
        print_config_if_asked(request, self.parser, config)
        model_options = config.model.get("init_args") or {}
        head = model_options.get("head")
        self.title = f"{command} {request.model}{f' with {head}' if head else ''}"
        home = request.home(head)
        self.folder = RunFolder(home, request.ckpt_path, command == "fit")
        config.ckpt_path = None  # config.yaml records how the run began
        self.config_text = self.parser.dump(config, skip_unset=False)
        self.options = flat(yaml.safe_load(self.config_text))
        self._check_effects()
        self.began = 0
        if request.ckpt_path:
            checkpoint = load_checkpoint(request.ckpt_path)
            is_fit = command == "fit"
            if is_fit and request.record:
                check_options(request.ckpt_path, request.record, self.options, self.given)
            check_checkpoint(request.ckpt_path, checkpoint, dict(model_options), is_fit)
            if is_fit:
                self.began = checkpoint["global_step"]
                self.remark = resumed_text(self.began, config.trainer.max_steps)
        elif command != "fit":
            raise ValueError(f"{command} needs a checkpoint: --ckpt_path FILE, last or best")
        if head and (head_options := model_options.get("head_options")):
            make_head(head, model_options.get("num_categories", 2), **head_options)

    def _check_effects(self) -> None:
        """Raise an error for an option of the command line that would have no effect."""
        command, trainer = self.request.command, self.config.trainer
        saves = trainer.enable_checkpointing is not False
        saves = saves and not (trainer.fast_dev_run or trainer.barebones)
        for name in sorted(self.typed):
            is_saving = name == "save_every" or name.startswith("checkpoint.")
            if command != "fit" and (name in _OF_TRAINING or is_saving):
                raise ValueError(f"--{name} has no effect on {command}, which trains nothing")
            if is_saving and not saves:
                raise ValueError(f"--{name} has no effect: the run saves no checkpoints")
            if name.startswith("checkpoint.") and trainer.limit_val_batches == 0:
                raise ValueError(f"--{name} has no effect: the run is not validated")
        if {"model.gradient_clip", "trainer.gradient_clip_val"} <= self.typed:
            raise ValueError("--gradient_clip has no effect beside --gradient_clip_val: choose one")
        if (trainer.min_steps or 0) > trainer.max_steps > 0:
            steps = f"--min_steps {trainer.min_steps}"
            raise ValueError(f"{steps} is more than --max_steps {trainer.max_steps}")
        require_within(0, 2**32 - 1, seed=self.config.seed_everything)
        if (
            self.auto_configure_optimizers
            and self.config.lr_scheduler
            and not self.config.optimizer
        ):
            raise ValueError("--lr_scheduler needs an --optimizer CLASS, such as Adam")

    def _set_seed(self) -> None:
        """Leave the seed to before_instantiate_classes, which checks it."""

    def instantiate_classes(self) -> None:
        """Build model, data and trainer."""
        if self.until == "end" and self.keeps:
            rank_zero_only(self.folder.open)()
        if self.until != "options":
            super()._set_seed()
            super().instantiate_classes()

    # -- the Trainer ---------------------------------------------------------------------------

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with the logger, callbacks and checkpoints that are not switched off."""
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
        self.logger = make_logger(self.folder, self.began)
        self.logger.begun = False
        if not options["barebones"]:
            callbacks = [self.record, Figures(), TestTime(), *callbacks]
            if options["enable_progress_bar"] and not has_bar:
                callbacks.append(RunProgressBar())
            if any(isinstance(module, CategoricalHead) for module in self.model.modules()):
                callbacks.insert(0, self.config_init.fisher)
            plugins = [_RecordingIO(self), *_as_list(options["plugins"])]
            if options["enable_checkpointing"] is not False and not options["fast_dev_run"]:
                folder = self.folder.path / "checkpoints"
                best = self.config_init.checkpoint
                best.dirpath = best.dirpath or str(folder)
                every = self.config.save_every or default_interval(options["max_steps"])
                callbacks += [best, LastCheckpoint(folder, every)]
            options["plugins"] = plugins
            if options["logger"] in (None, True) and self.request.command == "fit":
                options["logger"] = self.logger
            options["logger"] = options["logger"] or False
        if self.keeps:  # where Lightning saves the run before SLURM requeues it
            options["default_root_dir"] = str(self.folder.path)
        self.patience = {x: x.patience for x in callbacks if isinstance(x, EarlyStopping)}
        phases = LambdaCallback(
            on_train_start=self._begin_training,
            on_train_batch_start=self._enter_batches,
            on_train_batch_end=self._write_options_of_a_new_run,
            on_sanity_check_end=self._leave_batches,
            on_validation_start=self._enter_batches,
            on_test_start=self._enter_batches,
            on_predict_start=self._enter_batches,
        )
        phases.sees_blocks = True  # type: ignore[attr-defined]  # of replayed steps
        trainer = Trainer(**options | {"callbacks": [phases, *callbacks]})
        if method := start_method(trainer):
            raise ValueError(
                f"--strategy of processes that begin by {method} is not supported: choose ddp"
            )
        return trainer

    def _begin_training(self, *_: Any) -> None:
        self.logger.begun = True
        for callback, patience in self.patience.items():
            callback.patience = patience  # a checkpoint brings its own

    def _write_options_of_a_new_run(self, *_: Any) -> None:
        if not self.folder.resumed:
            self.write_options()

    @rank_zero_only
    def write_options(self) -> None:
        """Write config.yaml; that of a resumed run changes with its first checkpoint."""
        if self.keeps:
            self.folder.begin(self.config_text)

    def _enter_batches(self, *_: Any) -> None:
        self.in_batches = True

    def _leave_batches(self, *_: Any) -> None:
        self.in_batches = False  # the loader of training is built after the sanity check

    # -- the run -------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether the run leaves a folder."""
        trainer = self.config.trainer
        return self.request.command == "fit" and not (trainer.fast_dev_run or trainer.barebones)

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.trainer.global_step

    def fit(self) -> Metrics:
        """Train, then validate (to select by) and test the weights of the last step."""
        trainer = self.trainer
        try:
            trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=self.request.ckpt_path)
        except SystemExit:
            if trainer.interrupted:  # Lightning ends the process with code 1
                raise KeyboardInterrupt from None
            raise
        if trainer.global_step == self.began:
            # The run had ended before: what follows belongs to its last step.
            set_logged_step(trainer, self.began)
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
        if source := getattr(self.datamodule, "hparams", {}).get("source"):
            metrics["data_source"] = source
        self.write_options()
        self._write_hparams(metrics)
        return metrics

    def evaluate(self, command: str) -> Metrics:
        """Validate, test or predict with a checkpoint, or with the weights that were trained.

        The metrics are those of the first loader; predictions are for a callback such as
        BasePredictionWriter.
        """
        quiet = {"return_predictions": False} if command == "predict" else {"verbose": False}
        metrics = getattr(self.trainer, command)(
            self.model,
            datamodule=self.datamodule,
            ckpt_path=self.request.ckpt_path if self.request.command != "fit" else None,
            **quiet,
        )
        return metrics[0] if metrics else {}

    def _can(self, step: str, loader: str) -> bool:
        """Whether model and data define these methods; those of a user may not."""
        owner = self.datamodule or self.model
        return is_overridden(step, self.model) and is_overridden(loader, owner)

    def _write_hparams(self, metrics: Metrics) -> None:
        """Write the options beside the metrics, with the values that the model chose for None."""
        hparams = hparams_of(self.options)
        for name, value in hparams.items():
            if value is None:
                hparams[name] = self.model.hparams.get(name)
        hparams |= {"steps": self.step, "data_source": metrics.get("data_source")}
        step = logged_step(self.trainer)
        for logger in self.trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                write_hparams(logger, hparams, metrics, step)

    def close(self) -> None:
        """Close the event file, and release the folder."""
        if logger := getattr(self, "logger", None):
            logger.close()
        if folder := getattr(self, "folder", None):
            rank_zero_only(folder.close)()


class _RecordingIO(AtomicCheckpointIO):
    """Writes checkpoints, and after the first one the options of the run.

    Until then a resumed run leaves the record of the run as it was.
    """

    def __init__(self, run: LightningRun) -> None:
        super().__init__()
        self._run = run

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, then the options."""
        super().save_checkpoint(*args, **kwargs)
        self._run.write_options()


def set_validation_interval(options: Options) -> None:
    """Set when the Trainer validates: in a run limited by steps every n steps, and at the end.

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
    """Steps between validations, and between checkpoints: at least 500, at most 30 in a run.

    >>> default_interval(2_000), default_interval(60_000)
    (500, 2000)
    """
    return max(500, max_steps // 30)


def _as_list(value: Any) -> list[Any]:
    """A list of no items for None, or of a single value; a list as it is."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
