"""The names of the command line: commands, models, heads, data, options. Imports no torch."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from catnat.checks import did_you_mean

Options = dict[str, Any]  # by full name, such as trainer.max_steps

COMMANDS = ("fit", "validate", "test", "predict")
TOOLS = ("sweep", "status", "tables", "figures", "compare")
MODELS = {
    "vae": "catnat.lit_modules.DiscreteVAE",
    "mlp-vae": "catnat.lit_modules.MLPDiscreteVAE",
    "gsl": "catnat.lit_modules.GraphStructureLearner",
    "ppo": "catnat.sb3.recipes.PPO",
    "a2c": "catnat.sb3.recipes.A2C",
}
RL_MODELS = ("ppo", "a2c")
DATA = {
    "mnist": "catnat.datamodules.MNISTDataModule",
    "fashion-mnist": "catnat.datamodules.FashionMNISTDataModule",
    "kmnist": "catnat.datamodules.KMNISTDataModule",
    "community-graph": "catnat.datamodules.CommunityGraphDataModule",
}
_IMAGES = ("mnist", "fashion-mnist", "kmnist")
DATA_OF = {"vae": _IMAGES, "mlp-vae": _IMAGES, "gsl": ("community-graph",)}
HEADS = ("softmax", "sparsemax", "sigmoid", "natural")
ALIASES = {
    "catnat-sigma": "sigmoid",
    "catnat-sigmoid": "sigmoid",
    "catnat-nu": "natural",
    "catnat-natural": "natural",
}
_LEFT_OUT = ("trainer", "model", "data")  # groups that an option with a unique name needs not name
_READ_FIRST = ("model", "head", "data", "recipe", "config", "seeds")  # in request.py
_OF_ANY_CLASS = ("class_path", "dict_kwargs", "help")  # after the group of a class


class OptionNames:
    """The options of a parser, with short names where the group can be left out.

    Args:
        full_names: all options, such as "trainer.max_steps".
        other_names: full names by other short names.

    >>> names = OptionNames(["model.width", "trainer.max_steps", "trainer.callbacks"])
    >>> names.expand(["--max-steps=3", "--model.width", "7", "--callbacks+=Timer"])
    ['--trainer.max_steps=3', '--model.width', '7', '--trainer.callbacks+=Timer']
    >>> names.expand(["--widht=7"])
    Traceback (most recent call last):
    ValueError: unknown option --widht; did you mean --width?
    """

    def __init__(self, full_names: Iterable[str], other_names: Mapping[str, str] = {}) -> None:
        self.full_names = {*full_names}
        self.groups = {name.partition(".")[0] for name in self.full_names if "." in name}
        self.short_names: dict[str, str] = {}
        for group in _LEFT_OUT:  # a name of the Trainer is that of a model or of data, too
            members = {x.partition(".")[2]: x for x in self.full_names if x.startswith(f"{group}.")}
            ambiguous = [
                name for name in members if self.short_names.get(name, "").startswith("model.")
            ]
            self.short_names |= members
            for name in ambiguous:
                del self.short_names[name]
        self.short_names |= {"seed": "seed_everything", **other_names}

    def check(self, name: str) -> None:
        """Raise an error if an option is unknown, given by its full name."""
        option = self.option_of(name)
        group, _, rest = option.partition(".")
        is_class = rest in _OF_ANY_CLASS and group in self.groups
        if option not in self.full_names and not is_class:
            known = self.short_names.get(name)
            close = did_you_mean(name, {*_READ_FIRST, *self.full_names, *self.short_names})
            hint = (
                f"; in a file its name is {known}" if known else close.replace("mean ", "mean --")
            )
            raise ValueError(f"unknown option --{name}{hint}")

    def expand(self, words: Iterable[str]) -> list[str]:
        """The words of a command line, with full names.

        Raises:
            ValueError: an option is unknown.
        """
        return [self._expand(word) if word.startswith("--") else word for word in words]

    def option_of(self, name: str) -> str:
        """The option that a name is a part of: trainer.logger for trainer.logger.save_dir."""
        parts = name.replace(".init_args.", ".").split(".")
        return ".".join(parts[: 2 if parts[0] in self.groups else 1]).removesuffix("+")

    def _expand(self, word: str) -> str:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_").replace(".init_args.", ".")
        first, dot, rest = name.partition(".")
        option = first.removesuffix("+")
        if option in self.short_names:
            name = f"{self.short_names[option]}{first.removeprefix(option)}{dot}{rest}"
        self.check(name)
        return f"--{name}{equals}{value}"


def program_name() -> str:
    """The command the user typed: python train.py, or the console command catnat."""
    return "catnat" if Path(sys.argv[0]).stem == "catnat" else "python train.py"
