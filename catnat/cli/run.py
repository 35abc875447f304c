"""The command line of a run, whatever trains it: options, folder, resuming, what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_only

from catnat.callbacks.files import load_checkpoint
from catnat.callbacks.signals import Stopped
from catnat.cli.end_of_run import show_metrics, silence
from catnat.cli.errors import UsageError, one_line
from catnat.cli.folder import RunFolder
from catnat.cli.options import DATA, MODELS, CommandLine, command_words, flat, import_module, load
from catnat.head import REGISTRY
from catnat.heads import head_names, head_option_names, make_head

# A default of Lightning's Timer, which YAML could not write into config.yaml.
yaml.SafeDumper.add_representer(Interval, lambda dumper, kind: dumper.represent_str(kind.value))

Until = Literal["options", "objects", "end"]

_LENGTHS = ("max_steps", "total_steps", "max_epochs", "max_time")
_NO_LENGTH = {"trainer.max_steps": "-1", "trainer.max_epochs": "null", "trainer.max_time": "null"}
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
    groups: dict[str, Any]  # classes and functions that have the options of a group
    hidden: ClassVar[dict[str, set[str]]] = {}  # arguments that are not options, by group
    full_names: dict[str, str]  # of options, by their short ones
    lengths: dict[str, dict[str, Any]]  # defaults of a run without a length, by device
    in_batches = False  # whether everything is built, and batches are computed

    def __init__(self, line: CommandLine, until: Until = "end") -> None:
        self.line = line
        self.until = until
        self.full_names = {}
        self.metrics: dict[str, Any] = {}
        self.changeable: set[str] = set()  # options that a resumed run can change nevertheless
        try:
            silence()
            for module in line.imports:
                import_module(module)
            self.checkpoint = load_checkpoint(line.ckpt_path) if line.ckpt_path else {}
            self.began = self.checkpoint.get("global_step", 0)
            self.find_classes()
            self.typed_options = full_options(line.options, self.full_names)
            self.chosen_options = line.in_files | dict(self.typed_options)
            super().__init__(
                save_config_callback=None,
                seed_everything_default=0,
                parser_kwargs={"allow_abbrev": False, "exit_on_error": False},
                args=self._words(),
                run=False,
                load_from_checkpoint_support=False,
                **self.cli_options,
            )
            if until == "end":
                self._run()
        except Exception as error:
            if self.in_batches or isinstance(error, BrokenPipeError):
                raise
            raise UsageError(error, self._option_names(), self.full_names) from error
        finally:
            if until == "end":
                self.close()

    # -- what a subclass says ------------------------------------------------------------------

    def find_classes(self) -> None:
        """Find the classes that the names of the command line mean."""
        raise NotImplementedError

    def defaults(self) -> dict[str, Any]:
        """Defaults of this model and these data, by full name."""
        return {}

    def complete_options(self) -> None:
        """Set options that follow from others, in ``config``."""

    @property
    def step(self) -> int:
        """The number of steps done; 0 before there is a model."""
        raise NotImplementedError

    # -- from words to options -----------------------------------------------------------------

    def _words(self) -> list[str]:
        """Defaults, files and options, in this order, with full names."""
        line = self.line
        classes = [("model", line.model_path)]
        if line.data:
            classes.append(("data", line.data))
        typed_names = [name for name, _ in self.typed_options]
        files: list[tuple[str, Any]] = [("config", path) for path in line.configs]
        if line.record:
            # A list on the command line replaces that of the resumed run, a length its length.
            lists = {name.partition("+")[0]: "null" for name in typed_names if "+" in name}
            if set(_NO_LENGTH).intersection(typed_names):
                lists |= _NO_LENGTH
            files = [("config", line.record), *lists.items(), *files]
        names: list[tuple[str, Any]] = [
            ("trainer.default_root_dir", line.root),
            ("import", json.dumps(line.imports)),
        ]
        if line.head:
            names.append(("model.head", canonical_head(line.head)))
        pairs = [*classes, *self.defaults().items(), *files, *classes, *self.typed_options, *names]
        return [f"--{name}" if value is None else f"--{name}={value}" for name, value in pairs]

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the options that every run has."""
        modules = "modules to import first"
        parser.add_argument("--import", type=list[str] | str, default=[], help=modules)
        checkpoint = "resume or test a checkpoint: a file, last or best"
        parser.add_argument("--ckpt_path", type=str | None, default=None, help=checkpoint)
        steps = "steps between checkpoints"
        parser.add_argument("--save_every", type=int | None, default=None, help=steps)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the words, or show the page of help that they ask for."""
        for name, value in self.typed_options:
            group, _, last = name.rpartition(".")
            if last == "help" and group in ("", *self.groups):
                self.show_help(group, value)
                raise SystemExit(0)
        self.config = parser.parse_args(args)

    def _option_names(self) -> list[str]:
        names = [*self.full_names, *self.full_names.values()]
        if hasattr(self, "parser"):
            names += [name.lstrip("-") for name in self.parser._option_string_actions]
        return names

    def show_help(self, group: str, path: str | None = None) -> None:
        """Print the options of a group, or of all.

        Args:
            group: its name; empty: all groups.
            path: of another class.
        """
        page = ArgumentParser(usage=f"{command_words()} --model MODEL ...", add_help=False)
        for name in [group] if group else self.groups:
            kind = self.groups[name]
            if path:
                kind = load({**MODELS, **DATA}.get(path, path), f"--{group}.help")
            add_arguments(page, kind, name, self.hidden.get(name))
        lines = page.format_help().splitlines()
        print("\n".join(line for line in lines if not line.endswith("a configuration file.")))

    def before_instantiate_classes(self) -> None:
        """Set the length and the folder; check the run that is resumed."""
        line = self.line
        self.remark = self._set_length()
        self.complete_options()
        self.head = (self.config.model.get("init_args") or {}).get("head")
        if self.head:
            check_head_options(self.head, self.config.model.init_args.get("head_options"))
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

    def _set_length(self) -> str:
        """Set the default length, shorter on a CPU; a remark about that."""
        trainer = self.config.trainer
        lengths = [name for name in _LENGTHS if trainer.get(name) not in (None, -1)]
        typed_lengths = {f"trainer.{name}" for name in _LENGTHS} & dict(self.typed_options).keys()
        if lengths or typed_lengths or self.line.record:
            return ""
        device = trainer.get("accelerator") or trainer.get("device")
        on_cpu = device == "cpu" or not torch.accelerator.is_available()
        shorter = {}
        recipe = {}
        for name, value in self.lengths["cpu" if on_cpu else "accelerator"].items():
            group, _, option = name.partition(".")
            options = self.config[group].get("init_args", self.config[group])
            if option in _LENGTHS or (option in options and name not in self.chosen_options):
                shorter[option] = value
                recipe[option] = self.lengths["accelerator"].get(name, options[option])
                options[option] = value
        if shorter == recipe or trainer.get("fast_dev_run"):
            return ""
        words = [
            " ".join(f"--{name} {x}" for name, x in options.items())
            for options in (shorter, recipe)
        ]
        return f", {words[0]} on this CPU; the recipe: {words[1]}"

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
            if f"{name}.".startswith(_FIXED) and name not in self.changeable:
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

    def close(self) -> None:
        """Give back what the run holds."""
        if hasattr(self, "folder"):
            self.folder.close(stepped=self.step > self.began)


def canonical_head(name: str) -> str:
    """The registered name of a head, which may be given by an alias such as catnat-natural."""
    return name if name in head_names() else make_head(name, 4).name


def check_head_options(name: str, options: dict[str, Any] | None) -> None:
    """Raise an error if an option of a head has a wrong type; the head checks names and ranges."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--mix", type=float)
    parser.add_class_arguments(REGISTRY[name], fail_untyped=False, skip={"num_categories", "order"})
    known_options = parser.get_defaults().keys() & (options or {}).keys()
    parser.parse_object({option: (options or {})[option] for option in known_options})


# -- options ---------------------------------------------------------------------------------------


def add_arguments(
    parser: ArgumentParser, of: Any, group: str | None = None, skip: set[str] | None = None
) -> list[str]:
    """Add the arguments of a class or a function to a parser, without some; their names."""
    add: Any = parser.add_class_arguments if isinstance(of, type) else parser.add_function_arguments
    return list(add(of, group, fail_untyped=False, skip=skip))


def arguments(of: Any, skip: set[str] | None = None) -> dict[str, Any]:
    """Names and defaults of the options of a class or a function, without some."""
    parser = ArgumentParser()
    return {name: parser.get_default(name) for name in add_arguments(parser, of, skip=skip)}


def short_names(
    of_model: Iterable[str],
    of_data: Iterable[str],
    of_trainer: Iterable[str],
    links: Mapping[str, str] = {},
) -> dict[str, str]:
    """Full names of options by their short ones: max_steps is trainer.max_steps.

    An option of the model or of its data comes before one of the Trainer. A name that both have
    must be written in full.

    Args:
        of_model: options of the model.
        of_data: options of the data.
        of_trainer: options of the Trainer.
        links: options of the model that follow from one of the data, by name.
    """
    of_model = set(of_model) - links.keys()
    of_data = set(of_data)
    full_names = {name: f"trainer.{name}" for name in of_trainer}
    if "head_options" in of_model:
        full_names |= {name: f"model.head_options.{name}" for name in head_option_names()}
    full_names |= {name: f"model.{name}" for name in of_model - of_data}
    full_names |= {name: f"data.{name}" for name in of_data - of_model}
    full_names |= {name: f"model.{name} or --data.{name}" for name in of_model & of_data}
    for target, source in links.items():
        full_names |= dict.fromkeys((target, f"model.{target}"), f"data.{source}")
    return full_names | {"seed": "seed_everything"}


def full_options(
    typed_options: list[tuple[str, str | None]], full_names: dict[str, str]
) -> list[tuple[str, str | None]]:
    """Options with their full names.

    Raises:
        ValueError: a name is one of model and data, or follows from another option.
    """
    options: dict[str, str | None] = {}
    pairs = []
    for typed_name, value in typed_options:
        name, plus, _ = typed_name.partition("+")
        is_long = name in full_names or name.startswith("optimizer.")
        first = name if is_long else name.partition(".")[0]
        # --optimizer sgd is an option of our models, --optimizer SGD a class, --optimizer.lr its.
        if first in full_names and (first != "optimizer" or str(value).islower()):
            full_name = full_names[first]
            if " or " in full_name:
                raise ValueError(f"--{name} is an option of model and data: write --{full_name}")
            if full_name.startswith("data.") and full_name[5:] != first.removeprefix("model."):
                raise ValueError(f"--{name} follows from --{full_name}: set that")
            if name.startswith("model.") and options.get(full_name, value) != value:
                raise ValueError(
                    f"--{name} {value} follows from --{full_name} {options[full_name]}"
                )
            name = full_name + name.removeprefix(first)
        options[name] = value
        pairs.append((name + plus, value))
    return pairs
