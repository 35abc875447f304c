"""The command line of a run, whatever trains it: options, folder, resuming, what is printed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_only

from catnat.callbacks.files import load_checkpoint
from catnat.callbacks.signals import Stopped
from catnat.checks import require_at_least, require_choice
from catnat.cli.end_of_run import show_metrics, silence
from catnat.cli.errors import UsageError, one_line
from catnat.cli.folder import RunFolder
from catnat.cli.options import (
    MODELS,
    CommandLine,
    Recipe,
    command_words,
    flat,
    import_module,
    load,
)
from catnat.head import REGISTRY
from catnat.heads import head_names

# A default of Lightning's Timer, which YAML could not write into config.yaml.
yaml.SafeDumper.add_representer(Interval, lambda dumper, kind: dumper.represent_str(kind.value))

# Options that give a run its length, and their values where another one gives it.
_LENGTHS = {"trainer.max_steps": "-1", "trainer.max_epochs": "null", "trainer.max_time": "null"}
# Options that a resumed run cannot change.
_FIXED = (
    "model.class_path.",
    "model.head.",
    "model.head_options.",
    "model.optimizer.",
    "model.lr_decay.",
    "model.lr_decay_steps.",
    "optimizer.",
    "lr_scheduler.",
    "data.env.",
    "data.num_actions.",
    "data.normalize.",
)


class RunCLI(LightningCLI):
    """A LightningCLI with short names of options, and a folder for each run.

    ``model`` and ``config`` are what a command line describes, ``metrics`` what a run ended with.
    A subclass has a method for each command, such as ``fit``.

    Args:
        line: the command line.
        until: "options": only parse them. "objects": build model, data and trainer, without a
            folder. "end": do what the command line says.

    Raises:
        UsageError: an error before the first batch.
    """

    in_checkpoints: ClassVar[set[str]]  # names that every checkpoint has
    cli_options: ClassVar[dict[str, Any]] = {}  # further options of LightningCLI
    hidden: ClassVar[dict[str, set[str]]] = {}  # arguments that are not options, by group
    in_batches = False  # whether everything is built, and batches are computed

    def __init__(self, line: CommandLine, until: str = "end") -> None:
        self.line = line
        self.until = until
        self.metrics: dict[str, Any] = {}
        self.remark = ""
        self.full_names: dict[str, str] = {}  # of options, by their short ones
        self.option_names: set[str] = set()  # full ones
        try:
            silence()
            for module in line.imports:
                import_module(module)
            self.checkpoint = load_checkpoint(line.ckpt_path) if line.ckpt_path else {}
            self.began = self.checkpoint.get("global_step", 0)
            path = MODELS[line.model].path if line.model in MODELS else line.model
            self.model_type = load(path, "--model")
            self.recipe = self._find_recipe(path)
            self.groups = self.find_groups()
            self._add_names()
            self.typed_options = [(self._full_name(*option), option[1]) for option in line.options]
            self.chosen_options = line.in_files | dict(self.typed_options)
            super().__init__(
                save_config_callback=None,
                seed_everything_default=0,
                parser_kwargs={"allow_abbrev": False, "exit_on_error": False},
                args=self._words(path),
                run=False,
                load_from_checkpoint_support=False,
                **self.cli_options,
            )
            if until == "end":
                self._run()
        except Exception as error:
            if self.in_batches or isinstance(error, BrokenPipeError):
                raise
            names = [*self.full_names, *self.option_names]
            raise UsageError(error, names, self.full_names) from error
        finally:
            if until == "end":
                self.close()

    # -- what a subclass says ------------------------------------------------------------------

    def find_groups(self) -> dict[str, Any]:
        """The classes and functions that have the options of a group."""
        raise NotImplementedError

    def defaults(self) -> dict[str, Any]:
        """Defaults of this model and these data, by full name."""
        return self.recipe.defaults

    def complete_options(self) -> None:
        """Set options that follow from others, in ``config``."""

    @property
    def step(self) -> int:
        """The number of steps done; 0 before there is a model."""
        raise NotImplementedError

    # -- from words to options -----------------------------------------------------------------

    def _find_recipe(self, path: str) -> Recipe:
        """The recipe of the model, or of the nearest of our models that it is a subclass of."""
        recipes = {recipe.path.rpartition(".")[2]: recipe for recipe in MODELS.values()}
        for base in getattr(self.model_type, "__mro__", ()):
            if base.__name__ in recipes and base.__module__.startswith("catnat."):
                return recipes[base.__name__]
        return Recipe(path)

    def _add_names(self) -> None:
        """Find the names of all options, for the page of help, too."""
        self.page = ArgumentParser(usage=f"{command_words()} --model MODEL ...", add_help=False)
        short_names: dict[str, dict[str, str]] = {"model": {}, "data": {}, "trainer": {}}
        for group, kind in self.groups.items():
            add: Any = self.page.add_class_arguments
            if not isinstance(kind, type):
                add = self.page.add_function_arguments
            names = add(kind, group, fail_untyped=False, skip=self.hidden.get(group))
            short_names[group] = {name.partition(".")[2]: name for name in names}
            self.option_names.update(names)
        of_model = short_names["model"]
        of_data = short_names["data"]
        # An option of the model follows from one of the data: which one, and by which function.
        derived = {name: (name, None) for name in of_data}
        derived |= getattr(self.groups.get("data"), "derived_options", {})
        followers = of_model.keys() & getattr(self.model_type, "options_of_data", ())
        self.links = {name: derived[name] for name in followers & derived.keys()}
        self.full_names = {"max_steps": "trainer.total_steps"} | short_names["trainer"]
        self.full_names |= of_model | of_data | {"seed": "seed_everything"}
        for name in (of_model.keys() & of_data.keys()) - self.links.keys():
            del self.full_names[name]  # of two options: write one in full

    def _full_name(self, name: str, value: str | None) -> str:
        first, dot, option = name.partition(".")
        first, plus, _ = first.partition("+")
        # --optimizer sgd is an option of our models, --optimizer SGD a class, --optimizer.lr its.
        if first == "optimizer" and (dot or not str(value).islower()):
            return name
        return self.full_names.get(first, first) + plus + dot + option

    def _words(self, model_path: str) -> list[str]:
        """Defaults, files and options, in this order, with full names."""
        line = self.line
        classes = [("model", model_path)]
        if line.data:
            classes.append(("data", line.data))
        files: list[tuple[str, Any]] = [("config", path) for path in line.configs]
        typed_names = {name for name, _ in self.typed_options}
        if line.record:
            # A list on the command line replaces that of the resumed run, a length its length.
            replaced = {name.partition("+")[0]: "null" for name in typed_names if "+" in name}
            if typed_names & _LENGTHS.keys():
                replaced |= _LENGTHS
            files = [("config", self._read_record(line.record)), *replaced.items(), *files]
        for name, (source, _) in self.links.items():
            if f"model.{name}" in self.chosen_options:
                raise ValueError(f"--model.{name} follows from --data.{source}: set that")
        names: list[tuple[str, Any]] = [
            ("trainer.default_root_dir", line.root),
            ("import", json.dumps(line.imports)),
        ]
        if line.head:
            names.append(("model.head", line.head))
        defaults = self.defaults() | self._length()
        defaults = {name: defaults[name] for name in defaults if name in self.option_names}
        self.page.set_defaults(defaults)
        pairs = [*classes, *defaults.items(), *files, *classes, *self.typed_options, *names]
        return [f"--{name}" if value is None else f"--{name}={value}" for name, value in pairs]

    def _read_record(self, path: Path) -> str:
        """The options of the resumed run, without those that an older version had."""
        record = yaml.safe_load(path.read_text())
        gone_names = []
        for group in self.groups.keys() & record.keys():
            section = record[group] or {}
            options = section.get("init_args", section)
            for name in [*options]:
                full_name = f"{group}.{name}"
                if not any(option.startswith(full_name) for option in self.option_names):
                    gone_names.append(full_name)
                    del options[name]
        if gone_names and self.is_first:
            print(f"left out, there are no such options any more: {', '.join(sorted(gone_names))}")
        return json.dumps(record)

    def _length(self) -> dict[str, Any]:
        """The default length, shorter on a CPU, where nobody gives one."""
        name = "total_steps" if "trainer.total_steps" in self.option_names else "max_steps"
        lengths = {f"trainer.{name}", *_LENGTHS}
        if self.line.record or any(self.chosen_options.get(x) is not None for x in lengths):
            return {}
        recipe = self.recipe
        options = self.chosen_options
        device = options.get("trainer.accelerator") or options.get("trainer.device")
        if device != "cpu" and torch.accelerator.is_available():
            return {f"trainer.{name}": recipe.steps}
        if recipe.steps_on_cpu != recipe.steps:
            recipe_steps = f"the recipe: --{name} {recipe.steps}"
            self.remark = f", --{name} {recipe.steps_on_cpu} on this CPU; {recipe_steps}"
        return {f"trainer.{name}": recipe.steps_on_cpu, "model.nll_samples": 64}

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the options that every run has; the first page of help explains them."""
        parser.add_argument("--import", type=list[str] | str, default=[])
        parser.add_argument("--ckpt_path", type=str | None, default=None)
        parser.add_argument("--save_every", type=int | None, default=None)
        self.option_names.update(name.lstrip("-") for name in parser._option_string_actions)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the words, or show the page of help."""
        if ("help", None) in self.typed_options:
            print(re.sub(r".*Path to a configuration file\.\n", "", self.page.format_help()))
            raise SystemExit(0)
        if self.line.head:  # modules that may define it are imported now
            require_choice(head_names(), head=self.line.head)
        self.config = parser.parse_args(args)

    def before_instantiate_classes(self) -> None:
        """Check the options, and the run that is resumed; make the folder of a new run."""
        line = self.line
        self.complete_options()
        model_options = self.config.model.get("init_args") or {}
        self.head = model_options.get("head")
        if self.head:
            check_head_options(self.head, model_options.get("head_options") or {})
        home = Path(line.root, line.model, self.head or "no_head")
        self.folder = RunFolder(home, line.ckpt_path, line.command == "fit")
        self.config.ckpt_path = None  # how the run began, not where it was resumed
        self.options = self.parser.dump(self.config, skip_unset=False)
        self.title = f"{line.command} {line.model}{f' with {self.head}' if self.head else ''}"
        if self.checkpoint:
            self.remark = f", resumed after step {self.began}{self._changes()}"
        if self.until == "end" and self.keeps and self.is_first:
            self.folder.open()

    def instantiate_classes(self) -> None:
        """Build the objects, where they are asked for."""
        if self.until != "options":
            self.build()

    def build(self) -> None:
        """Build model, data and trainer."""
        super().instantiate_classes()

    def _changes(self) -> str:
        """A remark about options that differ from those that the resumed run began with.

        Raises:
            ValueError: the checkpoint belongs to another model or another head.
        """
        line = self.line
        if not self.in_checkpoints <= self.checkpoint.keys():
            raise ValueError(f"checkpoint {line.ckpt_path} belongs to another model")
        options = flat(yaml.safe_load(self.options))
        if line.record:
            before = flat(yaml.safe_load(line.record.read_text()))
            names = before.keys() | options.keys()
        else:
            hparams = self.checkpoint.get("hyper_parameters", {})
            before = flat({"model": hparams, "data": hparams})
            names = before.keys() & options.keys()
        changes = []
        for name in sorted(names):
            if before.get(name) == options.get(name):
                continue
            change = f"{before.get(name)} -> {options.get(name)}"
            # A model that has taken over the rate of the optimizer can resume with another.
            rate = options.get("model.learning_rate")
            is_rate = name == "optimizer.lr" and options.get(name) == rate
            if f"{name}.".startswith(_FIXED) and not is_rate:
                raise ValueError(f"checkpoint {line.ckpt_path} is of another {name}: {change}")
            changes.append(f"{name.partition('.')[2] or name} {change}")
        return f", with other options: {', '.join(changes)}" if line.record and changes else ""

    # -- the run -------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether the run leaves a folder."""
        trainer = self.config.trainer
        leaves_nothing = trainer.get("fast_dev_run") or trainer.get("barebones")
        return self.line.command == "fit" and not leaves_nothing

    @property
    def is_first(self) -> bool:
        """Whether this process prints and reports, of several that may train together."""
        return getattr(rank_zero_only, "rank", 0) == 0

    def _run(self) -> None:
        """Do what the command line says."""
        command = self.line.command
        if not hasattr(self, command):
            raise ValueError(f"{self.line.model} has no command {command}")
        if command != "fit" and self.line.ckpt_path is None:
            raise ValueError(f"{command} needs a checkpoint: --ckpt_path FILE, last or best")
        self.checkpoint = {}  # free the memory
        folder = self.folder.path if self.keeps or self.folder.resumed else None
        if self.is_first:
            remark = self.remark if command == "fit" else ""
            print(f"{self.title}{f': {folder}' if folder else ''}{remark}", flush=True)
        try:
            self.metrics = getattr(self, command)()
        except Stopped as stop:
            if self.is_first:
                print(f"{stop}; resume with: {command_words()} --ckpt_path {stop.path}", flush=True)
            raise SystemExit(128 + stop.signum) from None
        except Exception as error:
            self.in_batches |= self.step > self.began
            if self.step > self.began and self.is_first:
                last = self.folder.path / "checkpoints" / "last.ckpt"
                saved = f"; the latest checkpoint is {last}" if last.is_file() else ""
                ended = f"training ended after step {self.step}: {one_line(error)}{saved}"
                print(f"catnat: {ended}", file=sys.stderr)
            if self.in_batches and isinstance(error, (OSError, FloatingPointError)):
                raise SystemExit(1) from error  # of the machine, or of numbers: not a bug
            raise
        if self.is_first and self.metrics:
            show_metrics(self.metrics, folder, keep=self.keeps)

    def hparams(self) -> dict[str, Any]:
        """The options of model and data, for checkpoints and TensorBoard."""
        options = yaml.safe_load(self.options)
        data_options = flat(options.get("data") or {})
        seeds = {"data_seed": data_options.pop("seed", None), "seed": self.config.seed_everything}
        return flat(options["model"]) | data_options | seeds

    def save_interval(self, default: int) -> int:
        """Steps between checkpoints."""
        steps = default if self.config.save_every is None else self.config.save_every
        require_at_least(1, save_every=steps)
        return int(steps)

    def close(self) -> None:
        """Give back what the run holds."""
        if hasattr(self, "folder"):
            self.folder.close()


def check_head_options(head: str, options: dict[str, Any]) -> None:
    """Raise an error if an option of a head has a wrong type; the head checks names and ranges."""
    require_choice(head_names(), head=head)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--mix", type=float)
    parser.add_class_arguments(REGISTRY[head], fail_untyped=False, skip={"num_categories", "order"})
    names = parser.get_defaults().keys() & options.keys()
    parser.parse_object({name: options[name] for name in names})
