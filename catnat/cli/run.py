"""The command line of a run, whatever trains it: options, folder, resuming, what is printed."""

import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from catnat.callbacks.files import load_checkpoint, write_whole
from catnat.callbacks.signals import Stopped
from catnat.callbacks.tags import warnings_of
from catnat.callbacks.tensorboard import RunLogger
from catnat.checks import require_choice
from catnat.cli.errors import UsageError, one_line
from catnat.cli.folder import RunFolder
from catnat.cli.options import (
    DATA,
    MODELS,
    CommandLine,
    Options,
    Recipe,
    command_words,
    flat,
    import_module,
    load,
)
from catnat.head import REGISTRY
from catnat.heads import head_names

Metrics = dict[str, Any]  # by name; beside numbers, where the data come from

# A default of Lightning's Timer, which YAML could not write into config.yaml.
yaml.SafeDumper.add_representer(Interval, lambda dumper, kind: dumper.represent_str(kind.value))

# Options that give a run its length, and their values where another one gives it.
_LENGTHS = {"trainer.max_steps": "-1", "trainer.max_epochs": "null", "trainer.max_time": "null"}
_OF_ANY_CLASS = (".class_path", ".dict_kwargs")  # beside the options of its own
# Options that a resumed run cannot change.
_FIXED = re.compile(
    r"(optimizer|lr_scheduler|data\.(env|normalize)"
    r"|model\.(class_path|head|head_options|optimizer|lr_decay|lr_decay_steps)"
    r"|model\.(policy_kwargs\.(optimizer_\w+|ortho_init)|use_rms_prop|rms_prop_eps))\b"
)

print_once = rank_zero_only(print)  # in the first of several processes that train together


def check_head_options(head: str, options: Options) -> None:
    """Raise an error if an option of a head has a wrong type; the head checks names and ranges."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(REGISTRY[head], fail_untyped=False, skip={"num_categories", "order"})
    for name in parser.get_defaults().keys() & options.keys():
        parser.parse_object({name: options[name]})


class RunCLI(LightningCLI):
    """A LightningCLI with short names of options, and a folder for each run.

    ``model`` and ``config`` are what a command line describes.

    Args:
        line: the command line.
        until: "options": only parse them. "objects": build model, data and trainer, without a
            folder. "end": do what the command line says.

    Raises:
        UsageError: an error before the first batch.
    """

    checkpoint_key: str  # which every checkpoint has
    has_optimizer = True  # whether there are the options of LightningCLI for one
    steps_at_once = 1  # after which a run can end
    in_batches = False  # whether everything is built, and batches are computed
    resumes_random_states = False  # so that the seed of a resumed run would have no effect

    def __init__(self, line: CommandLine, until: str = "end") -> None:
        self.line = line
        self.until = until
        self.at_end = ExitStack()  # what the run holds
        self.remark = ""
        self.full_names: dict[str, str] = {}  # of options, by all their names
        try:
            for module in line.imports:
                import_module(module)
            self.checkpoint = load_checkpoint(line.ckpt_path) if line.ckpt_path else {}
            self.began = self.checkpoint.get("global_step", 0)
            self.model_type = load(line.model_path, "--model")
            self.recipe = self._find_recipe()
            if self.recipe.data and not line.data:
                line.data = DATA[self.recipe.data[0]]
            self.data_type = load(line.data, "--data") if line.data else None
            super().__init__(
                save_config_callback=None,
                seed_everything_default=0,
                parser_kwargs={"allow_abbrev": False, "exit_on_error": False},
                run=False,
                auto_configure_optimizers=self.has_optimizer,
                load_from_checkpoint_support=False,
            )
            if until == "end":
                self._run()
        except Exception as error:
            if self.in_batches or isinstance(error, BrokenPipeError):
                raise
            raise UsageError(error, self.full_names) from error
        finally:
            if until == "end":
                self.at_end.close()

    # -- what a subclass says ------------------------------------------------------------------

    def defaults(self) -> Options:
        """Defaults of this model and these data, by full name; a run is shorter on a CPU."""
        recipe = self.recipe
        options = self.chosen_options
        length = self.full_names["max_steps"]
        if any(options.get(name) is not None for name in (length, *_LENGTHS)):
            return recipe.defaults
        device = options.get("trainer.accelerator") or options.get("trainer.device")
        if device != "cpu" and torch.accelerator.is_available():
            return recipe.defaults | {length: recipe.steps}
        if recipe.steps_on_cpu != recipe.steps:
            option = f"--{length.removeprefix('trainer.')}"
            recipe_text = f"the recipe: {option} {recipe.steps}"
            self.remark = f", {option} {recipe.steps_on_cpu} on this CPU; {recipe_text}"
        return recipe.defaults | {length: recipe.steps_on_cpu, "model.nll_samples": 64}

    def complete_options(self) -> None:
        """Set options that follow from others, in ``config``."""

    @property
    def step(self) -> int:
        """The number of steps done."""
        raise NotImplementedError

    def fit(self) -> Metrics:
        """Train, then test; the metrics of the run."""
        raise NotImplementedError

    def evaluate(self, command: str) -> Metrics:
        """Validate, test or predict; the metrics."""
        raise NotImplementedError

    # -- from words to options -----------------------------------------------------------------

    def _find_recipe(self) -> Recipe:
        """The recipe of the model, or of the nearest of our models that it is a subclass of."""
        recipes = {recipe.path.rpartition(".")[2]: recipe for recipe in MODELS.values()}
        for base in getattr(self.model_type, "__mro__", ()):
            if base.__name__ in recipes and base.__module__.startswith("catnat."):
                return recipes[base.__name__]
        return Recipe(self.line.model_path)

    def setup_parser(self, *args: Any) -> None:
        """Make the parser, and a page of help that has the options of the chosen classes."""
        super().setup_parser(*args)
        usage = f"{command_words()} --model MODEL ..."
        self.page = self.init_parser(usage=usage, description="Options by their full names:")
        self._add_arguments(self.page)

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the options that every run has; the first page of help explains them."""
        parser.add_argument("--import", type=list[str] | str, default=[])
        parser.add_argument("--ckpt_path", type=str | None)
        parser.add_argument("--save_every", type=PositiveInt | None)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the words, or show the page of help."""
        line = self.line
        self.full_names = self._find_names()
        self.typed_options = [(self._full_name(*option), option[1]) for option in line.options]
        self.new_options = line.in_configs | dict(self.typed_options)
        self.chosen_options = line.record | self.new_options
        self._link_options()
        words = self._words()
        if "help" in self.chosen_options:
            print(re.sub(r".*Path to a configuration file\.\n", "", self.page.format_help()))
            raise SystemExit(0)
        if line.head:  # modules that may define it are imported now
            require_choice(head_names(), head=line.head)
        self.config = parser.parse_args(words)

    def _find_names(self) -> dict[str, str]:
        """The full names of options, by all their names."""
        names = {action.dest for action in self.page._actions}
        full_names = {name: name for name in names} | {"max_steps": "trainer.total_steps"}
        for group in ("trainer.", "model.", "data."):
            full_names |= {x.removeprefix(group): x for x in names if x.startswith(group)}
        for name in full_names.keys() - getattr(self.model_type, "options_of_data", ()):
            if {f"model.{name}", f"data.{name}"} <= names:
                del full_names[name]  # of two options: write one in full
        return full_names | {"seed": "seed_everything"}

    def _link_options(self) -> None:
        """Let options of the model follow from those of the data."""
        derived_options = getattr(self.data_type, "derived_options", {})
        for target in getattr(self.model_type, "options_of_data", ()):
            source, function = derived_options.get(target, (target, None))
            if f"data.{source}" not in self.full_names:
                continue
            if f"model.{target}" in self.chosen_options:
                raise ValueError(f"--model.{target} follows from --data.{source}: set that")
            ends = (f"data.init_args.{source}", f"model.init_args.{target}")
            self.parser.link_arguments(*ends, function)

    def _full_name(self, name: str, value: str) -> str:
        # --optimizer sgd is an option of our models, --optimizer SGD a class, --optimizer.lr its.
        if name.startswith("optimizer.") or (name == "optimizer" and not value.islower()):
            return name
        return re.sub(r"^\w+", lambda word: self.full_names.get(word[0], word[0]), name)

    def _words(self) -> list[str]:
        """Defaults, files and options, in this order, with full names."""
        line = self.line
        for name in line.in_configs:  # the parser would drop options of another class
            option = ".".join(name.split(".")[:2])
            is_accepted = option in self.full_names or option.endswith(_OF_ANY_CLASS)
            if option.startswith(("model.", "data.")) and not is_accepted:
                raise ValueError(f"unrecognized option {name!r} in a file: {line.model} has none")
        defaults = self.defaults()
        defaults = {name: defaults[name] for name in defaults if name in self.full_names}
        self.page.set_defaults(defaults)
        files = [("config", path) for path in line.configs]
        if line.record:
            # A new list replaces that of the resumed run, a new length its length.
            replaced = {name.partition("+")[0]: "null" for name in self.new_options if "+" in name}
            if self.new_options.keys() & _LENGTHS.keys():
                replaced |= _LENGTHS
            files[1:1] = replaced.items()
        choices = {
            "model": line.model_path,
            "data": line.data,
            "model.head": line.head,
            "trainer.default_root_dir": line.root,
            "import": json.dumps(line.imports),
        }
        chosen = [(name, value) for name, value in choices.items() if value]
        pairs = [*chosen, *defaults.items(), *files, *chosen, *self.typed_options]
        return [f"--{name}={value}" for name, value in pairs]

    def before_instantiate_classes(self) -> None:
        """Check the options, and the run that is resumed; make the folder of a new run."""
        line = self.line
        self.complete_options()
        length = self.full_names["max_steps"]
        steps = self.config[length]
        if line.command == "fit" and 0 <= steps <= self.began - self.steps_at_once:
            option = length.removeprefix("trainer.")
            raise ValueError(f"the checkpoint has {self.began} steps, --{option} is {steps}")
        model_options = self.config.model.get("init_args") or {}
        head = model_options.get("head")
        if head in REGISTRY:
            check_head_options(head, model_options.get("head_options") or {})
        home = Path(line.root, line.model, head or "no_head")
        self.folder = RunFolder(home, line.ckpt_path, line.command == "fit")
        self.config.ckpt_path = None  # how the run began, not where it was resumed
        self.config_text = self.parser.dump(self.config, skip_unset=False)
        self.options = flat(yaml.safe_load(self.config_text))
        self.title = f"{line.command} {line.model}{f' with {head}' if head else ''}"
        if self.checkpoint:
            self.remark = f", resumed after step {self.began}{self._changes()}"
        if self.until == "end" and self.keeps:
            rank_zero_only(self.folder.open)()
            self.at_end.callback(rank_zero_only(self.folder.close))

    def instantiate_classes(self) -> None:
        """Build the objects, where they are asked for."""
        if self.until != "options":
            super().instantiate_classes()

    def _changes(self) -> str:
        """A remark about options that differ from those that the resumed run began with.

        Raises:
            ValueError: the checkpoint belongs to another model or another head.
        """
        line = self.line
        if self.checkpoint_key not in self.checkpoint:
            raise ValueError(f"checkpoint {line.ckpt_path} belongs to another model")
        options = self.options
        before = dict(line.record)
        if not before:
            hparams = self.checkpoint.get("hyper_parameters", {})
            hparams = flat({"model": hparams, "data": hparams})
            before = {name: hparams.get(name, options[name]) for name in options}
        # A model that has taken over the rate of the optimizer can resume with another.
        rate = options.get("optimizer.lr")
        if rate is not None and rate == options.get("model.learning_rate"):
            before["optimizer.lr"] = rate
        changes = []
        keeps_seed = line.command == "fit" and self.resumes_random_states
        for name in sorted(before.keys() | options.keys()):
            change = f"{before.get(name)} -> {options.get(name)}"
            if before.get(name) == options.get(name):
                continue
            if _FIXED.match(name) or (name == "seed_everything" and keeps_seed):
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

    def _run(self) -> None:
        """Do what the command line says."""
        command = self.line.command
        if command != "fit" and self.line.ckpt_path is None:
            raise ValueError(f"{command} needs a checkpoint: --ckpt_path FILE, last or best")
        self.checkpoint = {}  # free the memory
        folder = self.folder.path if self.keeps or self.folder.resumed else None
        remark = self.remark if command == "fit" else ""
        print_once(f"{self.title}{f': {folder}' if folder else ''}{remark}", flush=True)
        try:
            metrics = self.fit() if command == "fit" else self.evaluate(command)
        except Stopped as stop:
            again = f"{command_words()} --ckpt_path {stop.path}"
            print_once(f"{stop}; resume with: {again}", flush=True)
            raise SystemExit(128 + stop.signum) from None
        except Exception as error:
            self.in_batches |= self.step > self.began
            if self.in_batches:
                last = self.folder.path / "checkpoints" / "last.ckpt"
                saved = f"; the latest checkpoint is {last}" if last.is_file() else ""
                ended = f"{self.title} ended after step {self.step}: {one_line(error)}{saved}"
                print_once(f"catnat: {ended}", file=sys.stderr)
                if isinstance(error, (OSError, FloatingPointError)):
                    raise SystemExit(1) from error  # of the machine, or of numbers: not a bug
            raise
        if metrics or self.keeps:
            self._show(metrics, folder)

    @rank_zero_only
    def _show(self, metrics: Metrics, folder: Path | None) -> None:
        """Print the metrics of a run, and where to look further; keep those of training.

        The file ``metrics.json`` marks a run as finished: a mere test of a checkpoint writes none.
        """
        if folder and self.keeps:
            write_whole(folder / "metrics.json", (json.dumps(metrics, indent=1) + "\n").encode())
        table = Table(show_header=False)
        for name, value in metrics.items():
            table.add_row(name, value if isinstance(value, str) else f"{value:.4g}")
        console = Console(soft_wrap=True, highlight=False)
        console.print(table)
        for sentence in warnings_of(metrics):
            console.print(sentence)
        if folder:  # runs/<model>/<head>/version_<k>
            console.print(f"run: {folder}")
            console.print(f"compare runs: catnat compare {folder.parent.parent}/*/version_*")
            if any(folder.glob("events.*")):
                console.print(f"tensorboard --logdir {folder.parent.parent}")

    # -- TensorBoard ---------------------------------------------------------------------------

    def make_logger(self, first_step: int) -> RunLogger:
        """The logger of the run's event file; a resumed run writes from the first step on."""
        folder = self.folder.path  # its name in full, so that "name" adds none
        logger = RunLogger(folder.parent, "", folder.name, default_hp_metric=False)
        logger.resumed_at = first_step if self.folder.resumed else None
        return logger

    @rank_zero_only
    def write_hparams(
        self, logger: TensorBoardLogger, metrics: Metrics, step: int, **hparams: Any
    ) -> None:
        """Fill TensorBoard's hparams tab; warnings go to TEXT."""
        tested = {name: value for name, value in metrics.items() if name.startswith("test/")}
        logger.log_hyperparams(self.hparams() | {"steps": self.step} | hparams, tested, step)
        for sentence in warnings_of(metrics):
            logger.experiment.add_text("warnings", sentence, step)
        logger.save()

    def hparams(self) -> Options:
        """The options of model and data, for checkpoints and TensorBoard."""
        options = self.options
        hparams = {
            name.partition(".")[2]: value
            for group in ("data.", "model.")  # the class_path is the model's
            for name, value in options.items()
            if name.startswith(group)
        }
        return hparams | {"data_seed": options.get("data.seed"), "seed": options["seed_everything"]}
