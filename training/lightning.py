"""Training with Lightning: a model, its data and a Trainer, composed from a command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from catnat.callbacks import FisherMonitor, last_validation
from catnat.callbacks.time_spent import TimeSpent
from catnat.checks import require_precision
from catnat.datamodules.in_memory import InMemoryDataModule
from catnat.training import options as cli
from catnat.training.components import DATA, arguments, find_data, find_model, load
from catnat.training.errors import UsageError
from catnat.training.folders import open_run
from catnat.training.names import Names
from catnat.training.program import Program, Run
from catnat.training.report import write_hparams_of
from catnat.training.resume import check_same_model, check_same_source
from catnat.training.trainer_options import check_options, complete_options


class LightningProgram(Program):
    """Training of a LightningModule."""

    how_long = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")
    may_change = (
        # How long: a longer run begins like a shorter one.
        "trainer.min_steps",
        "trainer.min_epochs",
        # Where: the machine that goes on may be another one. The same data may lie elsewhere.
        "trainer.accelerator",
        "trainer.devices",
        "trainer.num_nodes",
        "trainer.strategy",
        "trainer.benchmark",
        "trainer.deterministic",
        "model.capture",
        "data.root",
        "data.download",
        # What is watched, written and tested: training is the same, whoever looks on.
        "trainer.val_check_interval",
        "trainer.check_val_every_n_epoch",
        "trainer.callbacks",
        "trainer.logger",
        "trainer.log_every_n_steps",
        "trainer.enable_checkpointing",
        "trainer.enable_model_summary",
        "trainer.profiler",
        "trainer.detect_anomaly",
        "trainer.inference_mode",
        "trainer.limit_val_batches",
        "trainer.limit_test_batches",
        "trainer.limit_predict_batches",
        "trainer.num_sanity_val_steps",
        "data.eval_batch_size",
        "model.nll_samples",
        "model.test_passes",
    )

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self.model, self.recipe = find_model(names)
        self.data: type | None = None  # known once there is a parser

    def build_parser(self, argv: list[str]) -> cli.Parser:
        """All options of a model, its data, the monitor and the Trainer, with their types."""
        self.data = data = find_data(self.names, self.recipe)
        parser = cli.base_parser(self.names.model)
        parser.add_argument("--data.name", type=str | None, default=self.recipe.data)
        parser.add_class_arguments(self.model, "model", fail_untyped=False)
        parser.add_class_arguments(data, "data", fail_untyped=False)
        parser.add_class_arguments(FisherMonitor, "fisher")
        parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False)
        self._link(parser, data)
        if self.recipe.data is not None and issubclass(data, load(DATA[self.recipe.data])):
            parser.set_defaults({f"data.{k}": v for k, v in self.recipe.defaults.items()})
        parser.set_defaults({"trainer.devices": 1, "trainer.default_root_dir": "runs"})
        parser.set_defaults({"trainer.enable_model_summary": False})
        # Validation goes by steps, because the length of an epoch differs with the data.
        parser.set_defaults({"trainer.check_val_every_n_epoch": None})
        return parser

    def _link(self, parser: cli.Parser, data: type) -> None:
        """Let options of the model follow from those of the data, where both have them.

        A model of the user's own names such options in its class attribute ``options_of_data``.
        """
        of_data, of_model = arguments(data), arguments(self.model)
        own = [(name, name, None) for name in getattr(self.model, "options_of_data", ())]
        for source, target, function in (*self.recipe.links, *own):
            if target not in of_model:
                continue
            if source in of_data:
                made = load(function) if function else None
                parser.link(f"data.{source}", f"model.{target}", made)
            elif target in of_data:  # data of the user's own, which call it by the same name
                parser.link(f"data.{target}", f"model.{target}")

    def chosen(self) -> list[str]:
        """The names as options."""
        return [*super().chosen(), f"--data.name={self.names.data}"]

    def title(self, config: Namespace) -> str:
        """The model, its head, and the data if they are not the model's usual ones."""
        other = "" if self.names.data == self.recipe.data else f" on {self.names.data}"
        return super().title(config) + other

    def complete(self, config: Namespace) -> str:
        """Set the number of steps; returns a remark if that is less than the recipe's."""
        trainer, recipe = config.trainer, self.recipe
        check_numbers(trainer)
        if trainer.max_steps == -1 and trainer.max_epochs is None and trainer.max_time is None:
            on_cpu = trainer.accelerator == "cpu" or not torch.accelerator.is_available()
            trainer.max_steps = recipe.steps_on_cpu if on_cpu else recipe.steps
            if trainer.max_steps < recipe.steps:
                few = f", {recipe.steps_on_cpu} steps on this CPU"
                return f"{few}; the recipe: --max_steps {recipe.steps}"
        return ""

    def compose(self, parser: cli.Parser, config: Namespace, saved: str) -> LightningRun:
        """Model, data and Trainer of a configuration, and the folder of the run."""
        fit, ckpt_path = self.names.command == "fit", self.ckpt_path
        check_required(config, model=self.model, data=self.data)
        if str(config.trainer.strategy).endswith("fork"):
            torch.set_num_threads(1)  # forked processes hang if OpenMP has begun threads before
        if not 0 <= config.seed < 2**32:
            raise UsageError(f"--seed {config.seed} does not lie in 0..{2**32 - 1}")
        seed_everything(config.seed, workers=True, verbose=False)
        objects = cli.instantiate(parser, config)
        options = objects.trainer.as_dict()
        set_validation_interval(options)
        check_options(options)  # before anything is written
        require_precision(options["precision"])
        if ckpt_path is not None:
            check_same_model(ckpt_path, self.checkpoint, objects.model)
            if fit and "optimizer_states" not in self.checkpoint:
                raise ValueError(f"{ckpt_path} has weights alone: it can be tested, not continued")
        if isinstance(objects.data, InMemoryDataModule):
            # Already here, because wrong files and too large batches are the user's to mend.
            objects.data.prepare_data()
            objects.data.setup("fit")
            objects.data.train_dataloader()
        if ckpt_path is not None and fit:
            source = objects.data.hparams.get("source")
            check_same_source(ckpt_path, self.checkpoint, source)
        folder = open_run(self.names.home, ckpt_path, saved if fit else None)
        if not fit:
            options["logger"] = options["logger"] or False  # only what was asked for is written
        save_every = config.save_every or default_interval(options["max_steps"])
        ours = (objects.model, objects.fisher, folder, save_every)
        trainer = Trainer(**complete_options(options, *ours))
        return LightningRun(objects.model, objects.data, trainer, folder, ckpt_path, config.seed)


@dataclass
class LightningRun(Run):
    """A model, its data and a Trainer."""

    errors_of = ("lightning.", "catnat.datamodules.", "catnat.lit_modules.")

    model: LightningModule
    data: LightningDataModule
    trainer: Trainer
    folder: Path
    ckpt_path: Path | None
    seed: int

    @property
    def is_first_process(self) -> bool:
        """Whether this is rank 0."""
        return self.trainer.is_global_zero

    def fit(self) -> dict[str, float]:
        """Train, then validate (to select by) and test what was learned last."""
        self.trainer.fit(self.model, datamodule=self.data, ckpt_path=self.ckpt_path)
        if self.trainer.num_training_batches == 0 and self.trainer.limit_train_batches:
            raise UsageError("the data have no training batch: nothing was learned")
        validated = last_validation(self.trainer)
        can = self._can("validation_step", "val_dataloader")
        if not validated and can and self.trainer.limit_val_batches:
            # Training did not end with a validation.
            found = self.trainer.validate(self.model, datamodule=self.data, verbose=False)
            validated = dict(found[0]) if found else {}
        return self._record(validated | self._tested(None))

    def test(self) -> dict[str, float]:
        """Test the checkpoint."""
        return self._record(self._tested(self.ckpt_path))

    def time_spent(self, began: float, imported: float) -> str:
        """Seconds of imports, the start, the steps, validations, checkpoints and the test."""
        callbacks: list[Callback] = getattr(self.trainer, "callbacks", [])
        clocks = (each for each in callbacks if isinstance(each, TimeSpent))
        return next((clock.watch.line(began, imported) for clock in clocks), "")

    def _tested(self, ckpt_path: Path | None) -> dict[str, float]:
        """Metrics of a checkpoint, or of the model as it is; none with --limit_test_batches 0."""
        if not self._can("test_step", "test_dataloader"):
            return {}
        found = self.trainer.test(
            self.model, datamodule=self.data, ckpt_path=ckpt_path, verbose=False
        )
        return dict(found[0]) if found else {}

    def _can(self, step: str, loader: str) -> bool:
        """Whether a model of the user's own and its data define these methods."""
        return is_overridden(step, self.model) and is_overridden(loader, self.data)

    def _record(self, metrics: dict[str, float]) -> dict[str, float]:
        if self.is_first_process:
            write_hparams_of(self.trainer, metrics, self.seed)
        return metrics


def set_validation_interval(options: dict[str, Any]) -> None:
    """Say when to validate where the command line does not; at the latest, at the end."""
    interval, most = options["val_check_interval"], options["max_steps"]
    if isinstance(interval, float) and not options["check_val_every_n_epoch"]:
        options["check_val_every_n_epoch"] = 1  # a fraction is one of an epoch
    if interval is None and options["check_val_every_n_epoch"] is None:
        every = default_interval(most)
        options["val_check_interval"] = every if most < 1 else min(every, most)


def default_interval(max_steps: int) -> int:
    """Steps between validations, and between checkpoints: 500, but not over 30 in a run.

    >>> default_interval(2_000), default_interval(60_000)
    (500, 2000)
    """
    return max(500, max_steps // 30)


def check_required(config: Namespace, **classes: type | None) -> None:
    """Raise if an argument without type and default is missing: jsonargparse makes it None."""
    for group, cls in classes.items():
        for name, each in arguments(cls).items() if cls else ():
            if each.default is each.annotation is each.empty and config[group].get(name, 0) is None:
                raise UsageError(
                    f"--{cli.short_name(f'{group}.{name}')} is needed: it has no default"
                )


def check_numbers(trainer: Namespace) -> None:
    """Raise for numbers that Lightning accepts, and fails on later or misunderstands."""
    for name in ("val_check_interval", "check_val_every_n_epoch", "accumulate_grad_batches"):
        value = trainer[name]
        if isinstance(value, int | float) and value <= 0:
            off = "; --limit_val_batches 0 turns validation off" if "val_" in name else ""
            raise UsageError(f"--{name} must be positive, got {value}{off}")
    for name in ("log_every_n_steps", "gradient_clip_val"):
        if (trainer[name] or 0) < 0:
            raise UsageError(f"--{name} must not be negative, got {trainer[name]}")
    devices = trainer.devices
    if isinstance(devices, str) and not re.fullmatch(r"auto|-?\d+|\d+(,\d+)*,?", devices):
        raise UsageError(f"--devices {devices!r} is no number, list of numbers like 0,1, or auto")
