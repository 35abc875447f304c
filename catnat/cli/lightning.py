"""Training with Lightning: a LightningCLI with short names, recipes, and a folder for each run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden

from catnat import CategoricalHead
from catnat.callbacks import FisherMonitor
from catnat.callbacks.checkpoints import (
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
    load_checkpoint,
)
from catnat.callbacks.images import figures_for
from catnat.callbacks.tensorboard import RunLogger, RunRecord, last_validation
from catnat.callbacks.terminal import ProgressLines
from catnat.cli import report, resume
from catnat.cli.errors import RunFailed, UsageError, is_mistake, one_line
from catnat.cli.folders import RunFolder
from catnat.cli.names import DATA, RECIPES, Names, Recipe, import_module, load, read_names
from catnat.cli.options import FullNames, Parser, arguments, canonical_head


class CatnatCLI(LightningCLI):
    """A LightningCLI for models with a categorical head.

    ``model``, ``datamodule``, ``trainer`` and ``config`` are what a command line describes.

    Args:
        args: the words of a command line, such as ``["--model", "vae", "--head", "natural"]``.
        run: do what the command line says. Otherwise only the objects are made, and no folder.
    """

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        report.silence()
        self.names = names = read_names(sys.argv[1:] if args is None else args)
        for each in names.imports:
            import_module(each)
        self.recipe = self._find_classes(names)
        self.checkpoint = {} if names.ckpt_path is None else load_checkpoint(names.ckpt_path)
        self.metrics: dict[str, Any] = {}
        super().__init__(
            save_config_callback=None,
            seed_everything_default=0,
            trainer_defaults={
                "devices": 1,
                "default_root_dir": "runs",
                "enable_model_summary": False,
            },
            parser_class=Parser,
            args=self._words(names),
            run=False,
            load_from_checkpoint_support=False,
        )
        if run:
            self._run()

    # -- from words to objects -----------------------------------------------------------------

    def _find_classes(self, names: Names) -> Recipe:
        """Find the classes of model and data; a subclass of one of our models has its recipe."""
        self.model_type = load(names.path, "--model")
        if not isinstance(self.model_type, type) or not issubclass(
            self.model_type, LightningModule
        ):
            raise UsageError(f"--model {names.model} is not a LightningModule")
        ours = {load(recipe.model): recipe for recipe in RECIPES.values()}
        recipe = next((ours[each] for each in self.model_type.__mro__ if each in ours), Recipe())
        path = names.data or (DATA[recipe.data[0]] if recipe.data else None)
        self.data_type = None if path is None else load(path, "--data")
        wrong = not isinstance(self.data_type, type) or not issubclass(
            self.data_type, LightningDataModule
        )
        if self.data_type is not None and wrong:
            raise UsageError(f"--data {path} is not a LightningDataModule")
        self.links = {}  # from an option of the model to that of the data, and a function
        if self.data_type is not None:
            of_data, of_model = arguments(self.data_type), arguments(self.model_type)
            own = [(name, name, None) for name in getattr(self.model_type, "options_of_data", ())]
            for source, target, function in (*recipe.links, *own):
                if target in of_model and source in of_data:
                    self.links[target] = (source, load(function) if function else None)
                elif target in of_model and target in of_data:
                    self.links[target] = (target, None)
        return recipe

    def _words(self, names: Names) -> list[str]:
        """The command line with full names, after the recipe's defaults and the resumed run's."""
        model = f"--model={names.path}"
        data = [f"--data={_path_of(self.data_type)}"] if self.data_type else []
        usual = [
            f"--{name}={value}"
            for name, value in self.recipe.defaults.items()
            if self.data_type and name.partition(".")[2] in arguments(self.data_type)
        ]
        resumed = [f"--config={names.record}"] if names.record else self._kept_options()
        groups = {"trainer": Trainer, "model": self.model_type, "data": self.data_type,
                  "fisher": FisherMonitor, "checkpoint": BestCheckpoint}  # fmt: skip
        follow = {f"model.{target}": f"data.{each[0]}" for target, each in self.links.items()}
        self.full_names = FullNames(groups, follow)
        words = list(self.full_names(names.words))
        lengths = ("--trainer.max_epochs", "--trainer.max_time")
        if resumed and any(word.startswith(lengths) for word in words):
            resumed.append("--trainer.max_steps=-1")  # who gives another length leaves this open
        files = [word for word in words if word.startswith("--config=")]
        others = [word for word in words if not word.startswith("--config=")]
        head = []
        if names.head is not None:
            if "head" not in arguments(self.model_type):
                raise UsageError(f"--head {names.head}: {names.model} has no argument head")
            head = [f"--model.head={canonical_head(names.head)}"]
        root = [f"--trainer.default_root_dir={names.root}"]
        imports = [f"--import={json.dumps(names.imports)}"]
        return [
            model,
            *data,
            *usual,
            *resumed,
            *files,
            model,
            *data,
            *root,
            *imports,
            *others,
            *head,
        ]

    def _kept_options(self) -> list[str]:
        """The options of model and data in a checkpoint that lies in no folder of a run."""
        kept = {"model": (self.model_type, "hyper_parameters"),
                "data": (self.data_type, "datamodule_hyper_parameters")}  # fmt: skip
        return [
            f"--{group}.{name}={value if isinstance(value, str) else json.dumps(value)}"
            for group, (cls, where) in kept.items()
            for name, value in self.checkpoint.get(where, {}).items()
            if cls and name in arguments(cls) and name not in self.links and value is not None
        ]

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add our own options, and those that follow from others."""
        parser.add_argument("--import", type=list[str], default=[], help="modules to import first")
        parser.add_argument("--ckpt_path", type=str | None, default=None,
                            help="resume or test a checkpoint: a file, last or best")  # fmt: skip
        parser.add_argument("--save_every", type=int | None, default=None,
                            help="steps between checkpoints")  # fmt: skip
        parser.add_lightning_class_args(FisherMonitor, "fisher")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        for target, (source, function) in self.links.items():
            names = (f"data.init_args.{source}", f"model.init_args.{target}")
            parser.link_arguments(*names, compute_fn=function)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the words of :meth:`_words`."""
        self.config = self.full_names.parse(parser, args)

    def before_instantiate_classes(self) -> None:
        """Set the number of steps where nobody has; compare with the run that is resumed."""
        trainer = self.config.trainer
        self.remark = ""
        if trainer.max_steps == -1 and trainer.max_epochs is None and trainer.max_time is None:
            on_cpu = trainer.accelerator == "cpu" or not torch.accelerator.is_available()
            trainer.max_steps = self.recipe.steps_on_cpu if on_cpu else self.recipe.steps
            if trainer.max_steps < self.recipe.steps and not trainer.fast_dev_run:
                few = f"{trainer.max_steps} steps on this CPU"
                self.remark = f", {few}; the recipe: --max_steps {self.recipe.steps}"
        if str(trainer.strategy).endswith("fork"):
            torch.set_num_threads(1)  # forked processes hang if OpenMP has begun threads before
        self.head = (self.config.model.get("init_args") or {}).get("head")
        home = Path(self.names.root, self.names.model, self.head or "no_head")
        self.folder = RunFolder(home, self.names.ckpt_path, self.names.command == "fit")
        if self.checkpoint:
            self.remark = resume.remark(self.names, self.checkpoint, self.parser, self.config)
            if self.names.command == "fit" and "optimizer_states" not in self.checkpoint:
                raise UsageError(f"{self.names.ckpt_path} has weights alone: it can be tested only")

    def after_instantiate_classes(self) -> None:
        """Refuse a checkpoint whose tensors have other shapes than the model's."""
        if not self.checkpoint or is_overridden("configure_model", self.model):
            return  # the layers are not there yet
        made, here = (
            {name: getattr(value, "shape", None) for name, value in state.items()}
            for state in (self.checkpoint.get("state_dict", {}), self.model.state_dict())
        )
        if made != here:
            raise UsageError(f"checkpoint {self.names.ckpt_path} is one of another model")

    # -- the Trainer ---------------------------------------------------------------------------

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with our logger, callbacks and checkpoints where they are not refused."""
        options = {**self._get(self.config_init, "trainer"), **kwargs}
        set_validation_interval(options)
        own = _as_list(options["callbacks"])
        self.fisher = next(
            (x for x in own if isinstance(x, FisherMonitor)), self.config_init.fisher
        )
        if options["barebones"]:
            return Trainer(**options | {"callbacks": own or None})
        callbacks = [figures_for(self.model), *own, RunRecord()]
        has_head = any(isinstance(each, CategoricalHead) for each in self.model.modules())
        if has_head and self.fisher not in own:
            callbacks.insert(0, self.fisher)
        bar = options["enable_progress_bar"] is not False
        own_bar = any(isinstance(each, ProgressBar) for each in own)
        if bar and not own_bar and not sys.stdout.isatty():
            callbacks.append(ProgressLines())
        if options["enable_checkpointing"] is not False and not options["fast_dev_run"]:
            place = self.folder.path / "checkpoints"
            best = self.config_init.checkpoint
            best.dirpath = str(place)
            every = self.config.save_every
            every = default_interval(options["max_steps"]) if every is None else every
            callbacks += [best, LastCheckpoint(place, every)]
        if options["logger"] is None:
            options["logger"] = self._logger() if self.names.command == "fit" else False
        plugins = _as_list(options["plugins"])
        if not any(isinstance(each, CheckpointIO) for each in plugins):
            plugins = [AtomicCheckpointIO(), *plugins]
        options["enable_progress_bar"] = bar and (own_bar or sys.stdout.isatty())
        return Trainer(**options | {"callbacks": callbacks, "plugins": plugins})

    def _logger(self) -> RunLogger:
        folder = self.folder.path  # its name in full, so that "name" adds none
        logger = RunLogger(folder.parent, "", folder.name, default_hp_metric=False)
        if self.folder.resumed:
            logger.resumed_at = self.checkpoint["global_step"]
        return logger

    # -- commands ------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether this process prints and reports, of several that may train together."""
        return getattr(rank_zero_only, "rank", 0) == 0

    def _run(self) -> None:
        """Do what the command line says."""
        command, trainer = self.names.command, self.trainer
        keeps = (
            command == "fit"
            and not self.config.trainer.fast_dev_run
            and not self.config.trainer.barebones
        )
        if command != "fit" and self.names.ckpt_path is None:
            raise UsageError(f"{command} needs a checkpoint: --ckpt_path FILE, last or best")
        began = self.checkpoint.get("global_step", 0)
        self.checkpoint = {}  # free the memory
        try:
            if keeps and self.is_first:
                self.config.ckpt_path = None  # how the run began, not where it was resumed
                self.folder.open(resume.dump(self.parser, self.config))
            self._say_title(keeps)
            self.metrics = getattr(self, command)()
            if self.is_first and self.metrics:
                report.show_metrics(self.metrics, self.folder.path, keep=keeps)
        except SystemExit:
            if trainer.interrupted:  # Lightning ends the process with code 1
                raise KeyboardInterrupt from None
            raise
        except (ValueError, RuntimeError) as error:
            if not trainer.global_step or not is_mistake(error):
                raise
            last = self.folder.path / "checkpoints" / "last.ckpt"
            saved = f"; the latest checkpoint is {last}" if last.is_file() else ""
            after = f"training ended after step {trainer.global_step}"
            raise RunFailed(f"{after}: {one_line(error)}{saved}") from error
        finally:
            self.folder.close(trainer.global_step > began)

    def _say_title(self, keeps: bool) -> None:
        head = f" with {self.head}" if self.head else ""
        where = f": {self.folder.path}" if keeps or self.names.ckpt_path else ""
        if self.is_first:
            remark = self.remark if self.names.command == "fit" else ""
            print(f"{self.names.command} {self.names.model}{head}{where}{remark}", flush=True)

    def fit(self) -> dict[str, Any]:
        """Train, then validate (to select by) and test what was learned last."""
        trainer = self.trainer
        trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=self.names.ckpt_path)
        if trainer.num_training_batches == 0 and trainer.limit_train_batches:
            raise UsageError("the data have no training batch: nothing was learned")
        if self.config.trainer.fast_dev_run:
            return {}
        metrics: dict[str, Any] = last_validation(trainer)
        if not metrics and self._can("validation_step", "val_dataloader"):
            metrics = self._first(trainer.validate) if trainer.limit_val_batches else {}
        if self._can("test_step", "test_dataloader"):
            metrics |= self._first(trainer.test)
        metrics |= report.fisher_values(getattr(self.fisher, "latest", {}))
        if source := getattr(self.datamodule, "hparams", {}).get("source"):
            metrics["data_source"] = source
        if self.is_first and trainer.loggers:
            report.write_hparams_of(trainer, metrics, self.config.seed_everything)
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
        """Whether a model of the user's own and its data define these methods."""
        owner = self.model if self.datamodule is None else self.datamodule
        return is_overridden(step, self.model) and is_overridden(loader, owner)


def groups(names: Names) -> dict[str, Any]:
    """The classes behind the options of a model and its data, for help."""
    cli = CatnatCLI.__new__(CatnatCLI)
    cli._find_classes(names)
    found = {"model": cli.model_type, "data": cli.data_type, "fisher": FisherMonitor}
    return {group: cls for group, cls in found.items() if cls} | {"checkpoint": BestCheckpoint}


def set_validation_interval(options: dict[str, Any]) -> None:
    """Validate by steps in a run that is as long as a number of steps; at the latest, at the end.

    A run of epochs validates after each, as Lightning does.
    """
    steps, interval = options["max_steps"], options["val_check_interval"]
    if steps > 0 and interval is None and options["check_val_every_n_epoch"] == 1:
        options["val_check_interval"] = min(default_interval(steps), steps)
        options["check_val_every_n_epoch"] = None
    elif isinstance(interval, int) and options["check_val_every_n_epoch"] == 1:
        options["check_val_every_n_epoch"] = None  # steps, whatever the length of an epoch


def default_interval(max_steps: int) -> int:
    """Steps between validations, and between checkpoints: 500, but not over 30 in a run.

    >>> default_interval(2_000), default_interval(60_000)
    (500, 2000)
    """
    return max(500, max_steps // 30)


def _path_of(cls: type) -> str:
    """The path of a class; ours are known by the folder's name."""
    path = next((path for path in DATA.values() if load(path) is cls), None)
    return path or f"{cls.__module__}.{cls.__qualname__}"


def _as_list(value: Any) -> list[Any]:
    """A list of no items for None, of the items of a collection, or of a single value."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) else [value]
