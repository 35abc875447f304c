"""Options of a command line: a parser that keeps numbers whole, and short names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from catnat.cli.errors import UsageError
from catnat.flat_heads import head_option_names


class Parser(LightningArgumentParser):
    """A parser in which 1 stays an int where an option takes int and float.

    For Lightning the two differ: limit_val_batches 1 is one batch, 1.0 is all batches. jsonargparse
    tries the types of a union in order, and Python may answer Optional[int | float] with the equal
    Optional[float | int] that another library made before.
    """

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


def arguments(cls: type | None) -> set[str]:
    """Names of the arguments of a class, and of its base classes if it passes them on."""
    return set(ArgumentParser().add_class_arguments(cls, fail_untyped=False)) if cls else set()


def short_names(
    model: type, data: type | None, trainer: type, links: Mapping[str, str]
) -> dict[str, str]:
    """Full names of options by their short ones: max_steps is trainer.max_steps.

    An option of the model or of its data comes before one of the Trainer. A name that both have
    must be written in full.

    Args:
        model: class behind the options of the model.
        data: class behind those of the data, if there is one.
        trainer: class behind those of the Trainer.
        links: options of the model that follow from one of the data, by name.
    """
    of_model, of_data = arguments(model) - links.keys(), arguments(data)
    short = {name: f"trainer.{name}" for name in arguments(trainer) - (of_model & of_data)}
    if "head_options" in of_model:
        short |= {name: f"model.head_options.{name}" for name in head_option_names()}
    short |= {name: f"model.{name}" for name in of_model - of_data}
    short |= {name: f"data.{name}" for name in of_data - of_model}
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
        known = name if name in short else name.partition(".")[0]
        # --optimizer sgd is an option of our models, --optimizer SGD a class.
        if known in short and (known != "optimizer" or (value or following).islower()):
            full = short[known]
            if full.startswith("data.") and full[5:] != known.removeprefix("model."):
                raise UsageError(f"--{typed} follows from --{full}: set that")
            name = full + name.removeprefix(known)
        yield f"--{name}{plus}{equals}{value}"
