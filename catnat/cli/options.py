"""Options of a command line: which there are, and their short names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jsonargparse import ArgumentParser

from catnat.flat_heads import head_option_names


def add_arguments(
    parser: ArgumentParser, of: Callable[..., Any], group: str | None = None
) -> set[str]:
    """Add the arguments of a class to a parser, or those of a function up to ``*``.

    Returns:
        their names.
    """
    if isinstance(of, type):
        return set(parser.add_class_arguments(of, group, fail_untyped=False))
    kinds = {name: each.kind for name, each in inspect.signature(of).parameters.items()}
    skip: set[str | int] = {
        name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY
    }
    return set(parser.add_function_arguments(of, group, skip=skip))


def arguments(of: Callable[..., Any] | None) -> set[str]:
    """Names of the options of a class or a function; None has none."""
    return add_arguments(ArgumentParser(), of) if of else set()


def short_names(
    model: type, data: Callable[..., Any] | None, trainer: type, links: Mapping[str, str]
) -> dict[str, str]:
    """Full names of options by their short ones: max_steps is trainer.max_steps.

    An option of the model or of its data comes before one of the Trainer. A name that both have
    must be written in full.

    Args:
        model: class behind the options of the model.
        data: class or function behind those of the data, if there is one.
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
                raise ValueError(f"--{typed} follows from --{full}: set that")
            name = full + name.removeprefix(known)
        yield f"--{name}{plus}{equals}{value}"
