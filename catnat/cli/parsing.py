"""A LightningCLI whose model, data and options have short names."""

import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks.timer import Interval
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import catnat.datamodules
import catnat.lit_modules  # noqa: F401 - classes that --model and --data find by name
from catnat.callbacks import FisherMonitor
from catnat.callbacks.checkpoints import BestCheckpoint
from catnat.checks import did_you_mean, require_choice
from catnat.cli.names import MODELS, OptionNames, Options, program_name
from catnat.cli.request import Request, read_options, recipe_file
from catnat.heads.registry import head_names

# A default of Lightning's Timer, which YAML could not write into config.yaml.
yaml.SafeDumper.add_representer(Interval, lambda dumper, kind: dumper.represent_str(kind.value))

_NO_LENGTH = {"trainer.max_steps": "-1", "trainer.max_epochs": "null", "trainer.max_time": "null"}
_CLASSES = {  # of options whose value may be the name of a class
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
    "callbacks": Callback,
    "logger": Logger,
}
_ON_CPU = {"max_steps": 2000, "nll_samples": 64}  # where the command line does not set them


class CatnatCLI(LightningCLI):
    """A LightningCLI in subclass mode, with recipes, whose options have short names.

    Args:
        request: the command line.

    Attributes:
        data: import path of the data module.
        typed: options that the command line sets, by full name.
        given: options that the command line and its files set, by full name.
        remark: text about the defaults of a CPU.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.remark = ""
        for module in request.imports:
            import_module(module, "--import")
        self.model_type = find_class(request.model_path, LightningModule, "--model")
        self.recipe = self._find_recipe()
        options = read_options(self.recipe) if self.recipe else {}
        options |= request.record | request.in_configs
        self.data = request.data or options.get("data.class_path")
        self.data_type = find_class(self.data, LightningDataModule, "--data") if self.data else None
        super().__init__(
            LightningModule,
            subclass_mode_model=True,
            run=False,
            save_config_callback=None,
            seed_everything_default=0,
            parser_kwargs={"allow_abbrev": False, "exit_on_error": False},
            auto_configure_optimizers="optimizer" not in _parameters(self.model_type),
            load_from_checkpoint_support=False,
        )

    def _find_recipe(self) -> str | None:
        """The recipe of the model, or of the nearest built-in class that it is a subclass of."""
        names = {path.rpartition(".")[2]: name for name, path in MODELS.items()}
        for base in self.model_type.__mro__:
            if base.__module__.startswith("catnat.") and base.__name__ in names:
                return recipe_file(names[base.__name__], self.request.recipe)
        if self.request.recipe != "default":
            raise ValueError(f"--recipe {self.request.recipe}: {self.request.model} has no recipe")
        return None

    # -- the parser ----------------------------------------------------------------------------

    def setup_parser(self, *args: Any) -> None:
        """Make the parser, and a page of help that has the options of the chosen classes."""
        super().setup_parser(*args)
        usage = f"{program_name()} --model MODEL ..."
        self.page = self.init_parser(usage=usage, description="Options by their full names:")
        self._add_arguments(self.page)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add any model and data to the parser, those that are chosen to the page of help."""
        is_parser = parser is self.parser
        model_type = LightningModule if is_parser else self.model_type
        data_type = LightningDataModule if is_parser else self.data_type
        parser.add_lightning_class_args(model_type, "model", is_parser)
        if data_type:
            parser.add_lightning_class_args(data_type, "data", is_parser, required=False)
        parser.add_lightning_class_args(FisherMonitor, "fisher")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({"trainer.devices": 1, "trainer.enable_model_summary": False})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options that every run has."""
        parser.add_argument("--import", type=list[str] | str, default=[], help="modules to import")
        parser.add_argument("--ckpt_path", type=str | None, help="checkpoint: a file, last or best")
        parser.add_argument("--save_every", type=PositiveInt | None, help="steps between saves")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the command line, or show all options."""
        kind = self.model_type
        is_built_in = kind.__module__.startswith("catnat.lit_modules.")
        short_path = f"catnat.lit_modules.{kind.__name__}"
        path = short_path if is_built_in else self.request.model_path
        choices = {"model": path, "data": self.data}
        parsed = parse(parser, self.page, self.request, self.recipe, choices, self._link_options())
        self.config, self.typed, self.given = parsed
        self._shorten_on_cpu()

    def _link_options(self) -> dict[str, str]:
        """Let options of the model follow from options of the data; return them by target."""
        derived_options = getattr(self.data_type, "derived_options", {})
        data_options = _parameters(self.data_type) if self.data_type else {}
        links = {}
        for target in getattr(self.model_type, "options_of_data", ()):
            source, function = derived_options.get(target, (target, None))
            if source in data_options:
                ends = (f"data.init_args.{source}", f"model.init_args.{target}")
                self.parser.link_arguments(*ends, function)
                links[f"model.{target}"] = f"data.{source}"
        return links

    def _shorten_on_cpu(self) -> None:
        """Take fewer steps and samples on a CPU, where the command line does not set them."""
        trainer = self.config.trainer
        on_cpu = trainer.accelerator == "cpu" or not torch.accelerator.is_available()
        if not on_cpu or self.request.record:
            return
        options = self.config.model.get("init_args") or {}
        if "nll_samples" in options and "model.nll_samples" not in self.given:
            options["nll_samples"] = _ON_CPU["nll_samples"]
        if not self.given & _NO_LENGTH.keys():
            steps = _ON_CPU["max_steps"]
            self.remark = f", --max_steps {steps} on a CPU"
            if trainer.max_steps > 0:
                self.remark += f"; the recipe: --max_steps {trainer.max_steps}"
            trainer.max_steps = steps


def parse(
    parser: ArgumentParser,
    page: ArgumentParser,
    request: Request,
    recipe: str | None,
    choices: Options,
    links: Mapping[str, str] = {},
    other_names: Mapping[str, str] = {},
) -> tuple[Namespace, set[str], set[str]]:
    """Parse a command line.

    Args:
        parser: the parser.
        page: a parser of the chosen classes, which shows all options.
        request: the command line.
        recipe: a file of options, which is read first.
        choices: model and data.
        links: options that follow from others.
        other_names: full names of options by other short names.

    Returns:
        the values of all options, the options of the command line, and those of its files and of a
        recipe that it names, too.
    """
    names = OptionNames((x for x in _option_names(page) if x not in links), other_names)
    if "help" in request.actions:
        page.print_help()
        raise SystemExit(0)
    if "model.help" in request.actions:
        parser.parse_args([f"--model.help={request.model_path}"])
    for name in (*request.in_configs, *map(_name_of, request.words)):
        option = names.option_of(names.short_names.get(name, name))
        if f"model.{name}" in links and option == f"trainer.{name}":
            option = f"model.{name}"  # --num_nodes is the model's here, not the Trainer's
        if option in links:
            raise ValueError(f"--{option} follows from --{links[option]}: set that")
    _check_callables(request)
    for name in request.in_configs:  # the parser drops options of another class
        names.check(name)
    words = names.expand(request.words)
    typed = {names.option_of(_name_of(word)) for word in words if _name_of(word)}
    given = typed.union(map(names.option_of, request.in_configs))
    if request.head:
        require_choice(head_names(), head=request.head)
    choices = choices | {
        "model.head": request.head,
        "trainer.default_root_dir": request.root,
        "import": request.imports,
    }
    first_words = []
    if base := request.record_path or recipe:
        first_words.append(f"--config={base}")
    if recipe and not (request.head or request.ckpt_path) and request.model in MODELS:
        recommended = Path(recipe).parent / "unnamed_head" / Path(recipe).name
        if recommended.is_file():
            first_words.append(f"--config={recommended}")
    if given & _NO_LENGTH.keys():  # a length replaces a length of another kind
        first_words += [f"--{name}={value}" for name, value in _NO_LENGTH.items()]
    first_words += [f"--config={path}" for path in request.configs]
    first_words += [f"--{name}={value}" for name, value in choices.items() if value]
    if (
        recipe and request.recipe != "default"
    ):  # chosen, so no default of a device or game changes it
        given = given.union(map(names.option_of, read_options(recipe)))
    return parser.parse_args([*first_words, *words]), typed, given


def _check_callables(request: Request) -> None:
    """Raise an error for an unknown class, and for an option of one that is not named."""
    for option, name in _classes_in(request.words):
        find_class(name, _CLASSES[option.rpartition(".")[2]], f"--{option}")
    typed = [_name_of(word) for word in request.words]
    names = {name.removeprefix("model.") for name in (*typed, *request.in_configs, *request.record)}
    for name in typed:
        kind, dot, _ = name.removeprefix("model.").partition(".")
        named = {kind, f"{kind}.class_path"} & names
        if dot and kind in ("optimizer", "lr_scheduler") and not named:
            raise ValueError(f"--{name} needs --{kind} with the name of a class")


def _classes_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options whose values are names of classes without a module, with these values."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.removeprefix("--").partition("=")
        value = value if equals else following
        option = name.removesuffix("+")
        is_class = word.startswith("--") and option.rpartition(".")[2] in _CLASSES
        if is_class and value.isidentifier() and isinstance(yaml.safe_load(value), str):
            yield option, value


def print_config_if_asked(request: Request, parser: ArgumentParser, config: Namespace) -> None:
    """Print the values of all options, and end the program, if the command line asks for it."""
    if "print_config" in request.actions:
        print(parser.dump(config, skip_unset=False), end="")
        raise SystemExit(0)


def _option_names(parser: ArgumentParser) -> Iterator[str]:
    """The options of a parser by full name."""
    for name, value in vars(parser.get_defaults()).items():
        if isinstance(value, Namespace):
            yield from (f"{name}.{option}" for option in vars(value))
        else:
            yield name


def _parameters(kind: type) -> set[str]:
    """The arguments of a class, as far as its own signature and its bases' say."""
    return {
        name
        for base in kind.__mro__
        if "__init__" in vars(base)
        for name in inspect.signature(vars(base)["__init__"]).parameters
    }


def _name_of(word: str) -> str:
    """The name in a word of the command line; "" for a value."""
    return word[2:].partition("=")[0] if word.startswith("--") else ""


def find_class(path: str, base: type, option: str) -> Any:
    """The class behind an import path, or the subclass of ``base`` with a name.

    Args:
        path: such as my_module.MyVAE, also in the working directory, or DiscreteVAE.
        base: the class that it must be a subclass of.
        option: the option that asks for it, for the message.
    """
    module_name, _, name = path.rpartition(".")
    if module_name:
        classes = vars(import_module(module_name, f"{option} {path}"))
        where = module_name
    else:
        classes = {kind.__name__: kind for kind in _subclasses(base)}
        if name not in classes:
            close = did_you_mean(name, classes) or ";"
            raise ValueError(
                f"{option}: unknown class {name!r}{close} give a class, such as my_module.MyClass"
            )
    found = classes.get(name)
    if not isinstance(found, type):
        raise ValueError(
            f"{option} {path}: {where} has no class {name}{did_you_mean(name, classes)}"
        )
    if not issubclass(found, base):
        raise ValueError(f"{option} {path}: not a subclass of {base.__name__}")
    return found


def _subclasses(base: type) -> Iterator[type]:
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield kind
        yield from _subclasses(kind)


def import_module(name: str, option: str) -> Any:
    """Import a module, which may lie in the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{option}: {error}") from error
