"""Options of a command line: a parser that keeps numbers whole, short names, and comparisons."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from catnat.cli.errors import UsageError, closest, one_line
from catnat.flat_heads import head_names, head_option_names, make_head

_SHORT = ("trainer", "model", "data")  # groups that can be left out of an option's name
_TOP = ("config", "print_config", "seed_everything", "ckpt_path", "save_every", "import",
        "optimizer", "lr_scheduler", "return_predictions")  # fmt: skip


class Parser(LightningArgumentParser):
    """A parser in which 1 stays an int where an option takes int and float.

    For Lightning the two differ: limit_val_batches 1 is one batch, 1.0 is all batches. jsonargparse
    tries the types of a union in order, and Python may answer Optional[int | float] with the equal
    Optional[float | int] that another library made before.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "exit_on_error": False} | kwargs)

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a class; see jsonargparse."""
        added: list[str] = super().add_class_arguments(*args, **kwargs)
        for action in self._actions:
            if hasattr(action, "_typehint"):
                action._typehint = _int_first(action._typehint)
        return added


def _int_first(kind: Any) -> Any:
    """A type with int before float."""
    kinds = get_args(kind)
    if get_origin(kind) not in (Union, UnionType) or not {int, float} <= set(kinds):
        return kind
    return Union[(int, *(each for each in kinds if each is not int))]


def arguments(cls: type) -> set[str]:
    """Names of the arguments of a class, and of its base classes if it passes them on."""
    return set(ArgumentParser().add_class_arguments(cls, fail_untyped=False))


class FullNames:
    """Gives options their full names: --max-steps becomes --trainer.max_steps.

    Args:
        groups: the class behind each group of options.
        follow: options that follow from others, as full names from target to source.
        aliases: other names of options, with the full names.
    """

    def __init__(
        self,
        groups: Mapping[str, type | None],
        follow: Mapping[str, str],
        aliases: Mapping[str, str] = {},
    ) -> None:
        self.known = {group: arguments(cls) if cls else set() for group, cls in groups.items()}
        self.follow, self.aliases = follow, {"seed": "seed_everything", **aliases}
        if "head_options" in self.known["model"]:
            self._head_options = {f"head_options.{name}" for name in head_option_names()}
        else:
            self._head_options = set()

    def all(self) -> set[str]:
        """The names of all options, without groups that can be left out."""
        inside = {f"{group}.{each}" for group in self.known for each in self.known[group]}
        short = {each.removeprefix(f"{group}.") for each in inside for group in _SHORT}
        return {*_TOP, *self.aliases, "model", "head", "data", "help", *short, *self._head_options}

    def parse(self, parser: Any, words: list[str]) -> Any:
        """The options that words with full names set; a mistake is one line."""
        try:
            return parser.parse_args(words)
        except ArgumentError as error:
            raise UsageError(one_line(error, self.all())) from error

    def __call__(self, words: Iterable[str]) -> Iterator[str]:
        """The words of a command line with full names; an unknown option raises."""
        for word, following in _pairs(words):
            if not word.startswith("--"):
                yield word
                continue
            typed, equals, value = word[2:].partition("=")
            name = typed.rstrip("+").replace("-", "_")
            full = self._full(name, typed, value if equals else following)
            yield f"--{full}{'+' * typed.endswith('+')}{equals}{value}"

    def _full(self, name: str, typed: str, value: str) -> str:
        first, _, rest = name.partition(".")
        inner = rest.removeprefix("init_args.").partition(".")[0]
        if name in self.aliases:
            return self.aliases[name]
        if first in self.known and inner in {*self.known[first], "help", "init_args", "class_path"}:
            return self.follow.get(f"{first}.{inner}", name)
        owners = [group for group in _SHORT if first in self.known.get(group, ())]
        # --optimizer sgd is an option of our models, --optimizer SGD a class.
        if first in _TOP and not (owners and value.islower() and "." not in value):
            return name
        if len(owners) > 1:  # an option of the model or its data comes before one of the Trainer
            owners = [each for each in owners if each != "trainer"]
        owners = [each for each in owners if f"{each}.{first}" not in self.follow] or owners
        if len(owners) == 1:
            source = self.follow.get(f"{owners[0]}.{first}")
            if source and source.rpartition(".")[2] != first:
                raise UsageError(f"--{typed} follows from --{source}: set that")
            return source or f"{owners[0]}.{name}"
        if owners:
            both = " and ".join(f"--{group}.{name}" for group in owners)
            raise UsageError(f"--{typed} can mean {both}: write which")
        near = closest(name, self.all()).replace("mean ", "mean --")
        raise UsageError(f"unknown option --{typed}{near or '; see --help'}")


def _pairs(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each word with the one that follows it."""
    listed = list(words)
    return zip(listed, [*listed[1:], ""], strict=False)


def canonical_head(name: str) -> str:
    """The registered name of a head, which may be given by an alias such as catnat-natural."""
    try:
        return make_head(name, 4).name if name not in head_names() else name
    except ValueError:
        raise UsageError(
            f"--head {name!r} is not one of {', '.join(head_names())}{closest(name, head_names())}"
        ) from None
