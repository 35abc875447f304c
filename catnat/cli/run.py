"""The command line of a run, whatever trains it: options, folder, resuming, what is printed."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_only

from catnat.callbacks.checkpoints import Stopped, load_checkpoint
from catnat.cli.end_of_run import show_metrics, silence
from catnat.cli.errors import is_mistake, one_line
from catnat.cli.folder import RunFolder
from catnat.cli.options import (
    Recipe,
    command_words,
    import_module,
    read_names,
    read_yaml,
    record_of,
)
from catnat.heads import head_names, head_option_names, make_head

# A default of Lightning's Timer, which YAML could not write into config.yaml.
yaml.SafeDumper.add_representer(Interval, lambda dumper, each: dumper.represent_str(each.value))

_NLL_SAMPLES_ON_CPU = 64  # of a run whose length nobody says
_LENGTHS = ("max_steps", "total_steps", "max_epochs", "max_time")
# Options that a resumed run cannot change.
_SAME = ("model.class_path.", "model.head.", "model.head_options.", "model.optimizer.",
         "optimizer.", "data.env.", "data.num_actions.", "data.normalize.")  # fmt: skip


class RunCLI(LightningCLI):
    """A LightningCLI with short names of options, and a folder for each run.

    ``model`` and ``config`` are what a command line describes, ``metrics`` what a run ended with.
    A subclass has a method for each command, such as ``fit``.

    Args:
        args: the words of a command line, such as ``["--model", "vae", "--head", "natural"]``.
        run: do what the command line says. Otherwise only the objects are made, and no folder.
    """

    recipe: Recipe  # how the model is trained by default
    in_checkpoints: str  # a name that every checkpoint has
    of_lightning_cli: ClassVar[dict[str, Any]] = {}  # further options of LightningCLI
    data_path: str | None = None  # of the data's class, where that is an option
    short: dict[str, str]  # full names of options by their short ones
    defaults: dict[str, Any]  # of the options of the data, where the recipe has other ones

    def __init__(self, args: list[str] | None = None, run: bool = True) -> None:
        silence()
        self.names = names = read_names(sys.argv[1:] if args is None else args)
        for each in names.imports:
            import_module(each)
        self.checkpoint = {} if names.ckpt_path is None else load_checkpoint(names.ckpt_path)
        self.began = self.checkpoint.get("global_step", 0)
        self.metrics: dict[str, Any] = {}
        self.remark, self.runs = "", run
        self.find_classes()
        try:
            super().__init__(
                save_config_callback=None,
                seed_everything_default=0,
                parser_kwargs={"allow_abbrev": False, "exit_on_error": False},
                args=self._words(),
                run=False,
                load_from_checkpoint_support=False,
                **self.of_lightning_cli,
            )
            if run:
                self._run()
        finally:
            if run:
                self.close()

    # -- what a subclass says ------------------------------------------------------------------

    def find_classes(self) -> None:
        """Find the classes that the names of the command line mean."""
        raise NotImplementedError

    def usual(self, given: list[str]) -> list[str]:
        """Defaults of this model and these data, as words of a command line."""
        return [f"--{name}={value}" for name, value in self.defaults.items()]

    @property
    def step(self) -> int:
        """The number of steps done; 0 before there is a model."""
        raise NotImplementedError

    # -- from words to options -----------------------------------------------------------------

    def _words(self) -> list[str]:
        """The command line with full names, after the files of options."""
        names = self.names
        words = list(full_names(names.words, self.short))
        page = f"--data.help={self.data_path}" if self.data_path else "--data.help"
        words = [page if word == "--data.help" else word for word in words]
        files = [f"--config={path}" for path in names.configs]
        if names.ckpt_path and record_of(names.ckpt_path):
            # A list on the command line replaces that of the resumed run.
            lists = dict.fromkeys(w.partition("+")[0] for w in words if re.match(r"--[\w.]+\+", w))
            files[1:1] = [f"{name}=null" for name in lists]
        if self.checkpoint and any(word.startswith("--trainer.max_") for word in words):
            # A length on the command line replaces the one that the run began with.
            none = ("max_steps=-1", "max_epochs=null", "max_time=null")
            words = [*(f"--trainer.{each}" for each in none), *words]
        root = f"--trainer.default_root_dir={names.root}"
        imports = f"--import={json.dumps(names.imports)}"
        head = [f"--model.head={canonical_head(names.head)}"] if names.head else []
        return [*files, *self._classes(), root, imports, *words, *head]

    def _classes(self) -> list[str]:
        data = [f"--data={self.data_path}"] if self.data_path else []
        return [f"--model={self.names.path}", *data]

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the options that every run has."""
        parser.add_argument("--import", type=list[str] | str, default=[],
                            help="modules to import first")  # fmt: skip
        parser.add_argument("--ckpt_path", type=str | None, default=None,
                            help="resume or test a checkpoint: a file, last or best")  # fmt: skip
        parser.add_argument("--save_every", type=int | None, default=None,
                            help="steps between checkpoints")  # fmt: skip

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the words of :meth:`_words`, after the defaults of model and data."""
        try:
            self.config = parser.parse_args([*self._classes(), *self.usual(args), *args])
        except ArgumentError as error:
            options = [name.lstrip("-") for name in parser._option_string_actions]
            known = [*options, *self.short, *self.short.values()]
            raise ValueError(one_line(error, known, self.short)) from error

    def before_instantiate_classes(self) -> None:
        """Set the number of steps and the folder; check the run that is resumed."""
        names = self.names
        self._set_length()
        self.head = (self.config.model.get("init_args") or {}).get("head")
        home = Path(names.root, names.model, self.head or "no_head")
        self.folder = RunFolder(home, names.ckpt_path, names.command == "fit")
        self.config.ckpt_path = None  # how the run began, not where it was resumed
        self.options = self.parser.dump(self.config, skip_unset=False)
        self.title = f"{names.command} {names.model}{f' with {self.head}' if self.head else ''}"
        if self.checkpoint:
            self.remark = f", resumed after step {self.began}{self._compare()}"
        if self.runs and self.keeps and self.is_first:
            self.folder.open()

    def _set_length(self) -> None:
        """Train as long as the recipe says where nobody says how long, on a CPU not as long."""
        trainer, recipe = self.config.trainer, self.recipe
        if any(trainer.get(name) not in (None, -1) for name in _LENGTHS):
            return
        device = trainer.get("accelerator") or trainer.get("device")
        on_cpu = device == "cpu" or not torch.accelerator.is_available()
        steps = recipe.steps_on_cpu if on_cpu else recipe.steps
        self.config[self.short["max_steps"]] = steps
        if steps < recipe.steps and not trainer.get("fast_dev_run"):
            fewer, usual = f"{steps} steps", f"--max_steps {recipe.steps}"
            options, words = self.config.model.get("init_args") or {}, self.names.words
            texts = [Path(path).read_text() for path in self.names.configs]
            given = any("nll_samples" in text for text in (*words, *texts))
            if options.get("nll_samples") and not given:  # the test would take a third of the time
                usual += f" --nll_samples {options['nll_samples']}"
                options["nll_samples"] = _NLL_SAMPLES_ON_CPU
                fewer += f" and {_NLL_SAMPLES_ON_CPU} samples for test/nll"
            self.remark = f", {fewer} on this CPU; the recipe: {usual}"

    def _compare(self) -> str:
        """A remark about options that differ from those that the resumed run began with.

        Raises:
            ValueError: the checkpoint is one of another model or another head.
        """
        path = self.names.ckpt_path
        if path is None or self.in_checkpoints not in self.checkpoint:
            raise ValueError(f"checkpoint {path} is one of another model")
        record, kept = record_of(path), self.checkpoint.get("hyper_parameters", {})
        alone = {"model": {"class_path": self.names.path, "init_args": kept}, "data": kept}
        now, began = _flat(yaml.safe_load(self.options)), _flat(alone)
        names = set(began)
        if record:
            began = _flat(read_yaml(str(record)))
            names = began.keys() | now.keys()
        differ = {name.replace("init_args.", ""): f"{began.get(name)} -> {now.get(name)}"
                  for name in sorted(names) if began.get(name) != now.get(name)}  # fmt: skip
        for name, change in differ.items():
            if f"{name}.".startswith(_SAME):
                raise ValueError(f"checkpoint {path} is of another {name}: {change}")
        listed = [f"{name.partition('.')[2] or name} {change}" for name, change in differ.items()]
        return f", with other options: {', '.join(listed)}" if record and listed else ""

    # -- the run -------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether the run leaves a folder."""
        leaves_nothing = map(self.config.trainer.get, ("fast_dev_run", "barebones"))
        return bool(self.names.command == "fit" and not any(leaves_nothing))

    @property
    def is_first(self) -> bool:
        """Whether this process prints and reports, of several that may train together."""
        return getattr(rank_zero_only, "rank", 0) == 0

    def _run(self) -> None:
        """Do what the command line says."""
        names = self.names
        if not hasattr(self, names.command):
            raise ValueError(f"{names.model} has no command {names.command}")
        if names.command != "fit" and names.ckpt_path is None:
            raise ValueError(f"{names.command} needs a checkpoint: --ckpt_path FILE, last or best")
        self.checkpoint = {}  # free the memory
        where = f": {self.folder.path}" if self.keeps or self.folder.resumed else ""
        if self.is_first:
            remark = self.remark if names.command == "fit" else ""
            print(f"{self.title}{where}{remark}", flush=True)
        try:
            self.metrics = getattr(self, names.command)()
        except Stopped as stop:
            if self.is_first:
                print(f"{stop}; resume with: {command_words()} --ckpt_path {stop.path}", flush=True)
            raise SystemExit(128 + stop.signum) from None
        except (ValueError, RuntimeError) as error:
            if self.step <= self.began or not is_mistake(error):
                raise
            last = self.folder.path / "checkpoints" / "last.ckpt"
            saved = f"; the latest checkpoint is {last}" if last.is_file() else ""
            after = f"training ended after step {self.step}"
            print(f"catnat: {after}: {one_line(error)}{saved}", file=sys.stderr)
            raise SystemExit(1) from error
        if self.is_first and self.metrics:
            show_metrics(self.metrics, self.folder.path if where else None, keep=self.keeps)

    def close(self) -> None:
        """Give back what the run holds."""
        if hasattr(self, "folder"):
            self.folder.close(stepped=self.step > self.began)


def canonical_head(name: str) -> str:
    """The registered name of a head, which may be given by an alias such as catnat-natural."""
    return name if name in head_names() else make_head(name, 4).name


# -- options ---------------------------------------------------------------------------------------


def arguments(of: Callable[..., Any], skip: Iterable[str] = ()) -> set[str]:
    """Names of the options of a class or a function, without some."""
    parser = ArgumentParser()
    add: Any = parser.add_class_arguments if isinstance(of, type) else parser.add_function_arguments
    return set(add(of, fail_untyped=False, skip=set(skip)))


def short_names(
    of_model: set[str], of_data: set[str], of_trainer: set[str], links: Mapping[str, str] = {}
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
    of_model = of_model - links.keys()
    short = {name: f"trainer.{name}" for name in of_trainer}
    if "head_options" in of_model:
        short |= {name: f"model.head_options.{name}" for name in head_option_names()}
    short |= {name: f"model.{name}" for name in of_model - of_data}
    short |= {name: f"data.{name}" for name in of_data - of_model}
    short |= {name: f"model.{name} or --data.{name}" for name in of_model & of_data}
    for target, source in links.items():
        short |= dict.fromkeys((target, f"model.{target}"), f"data.{source}")
    return short | {"seed": "seed_everything"}


def full_names(words: list[str], short: Mapping[str, str]) -> Iterator[str]:
    """The words of a command line, with full names of options."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        match = re.fullmatch(r"--([\w.-]+)(\+?)(?:(=)(.*))?", word, re.DOTALL)
        if match is None:
            yield word
            continue
        typed, plus, equals, value = match.groups(default="")
        name = typed.replace("-", "_").replace(".init_args.", ".")
        known = name if name in short or name.startswith("optimizer.") else name.partition(".")[0]
        # --optimizer sgd is an option of our models, --optimizer SGD a class, --optimizer.lr its.
        if known in short and (known != "optimizer" or (value or following).islower()):
            full = short[known]
            if " or " in full:
                raise ValueError(f"--{typed} is an option of model and data: write --{full}")
            if full.startswith("data.") and full[5:] != known.removeprefix("model."):
                raise ValueError(f"--{typed} follows from --{full}: set that")
            name = full + name.removeprefix(known)
        yield f"--{name}{plus}{equals}{value}"


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by their full names, such as model.init_args.head."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        inner = isinstance(value, dict)
        found |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found
