"""Options of a command line: short names, types, one-line errors, help."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from catnat.checks import did_you_mean
from catnat.heads import head_option_names
from catnat.training.errors import UsageError
from catnat.training.names import SHORT, read_yaml

_WIDTH, _INDENT = 100, 33  # of help pages
_NAMES = ("model", "head", "data", "print_config", "help")  # read before there is a parser
# What users of other programs write, and what it is called here.
_CALLED = {
    "lr": ("learning_rate",),
    "steps": ("max_steps", "total_steps"),
    "total_steps": ("max_steps",),
    "epochs": ("max_epochs",),
    "gpu": ("devices",),
    "gpus": ("devices",),
    "k": ("num_categories",),
    "n": ("num_latents",),
}
_OPTIONS_OF = {
    "num_latents": "vae and mlp-vae",
    "num_categories": "vae and mlp-vae",
    "variant": "vae and mlp-vae",
    "theta": "gsl",
    "estimator": "gsl",
    "env": "ppo and a2c",
}
_ALIASES = {"max_steps": "trainer.total_steps", "trainer.max_steps": "trainer.total_steps"}


class Parser(ArgumentParser):
    """A parser that knows which options follow from others, and keeps whole numbers whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.follows: dict[str, str] = {}  # from an option to the one that decides it

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a class; see jsonargparse."""
        added: list[str] = super().add_class_arguments(*args, **kwargs)
        for action in self._actions:
            if hasattr(action, "_typehint"):
                action._typehint = _int_before_float(action._typehint)
        return added

    def link(self, source: str, target: str, function: Callable[..., Any] | None = None) -> None:
        """Let the option target be a function of the option source; by default the same value."""
        self.link_arguments(source, target, compute_fn=function)
        self.follows[target] = source


def _int_before_float(kind: Any) -> Any:
    """The type of an option; int comes before float where both are allowed.

    jsonargparse tries the types of a union in order, and float makes 1.0 of 1. For Lightning the
    two differ: limit_val_batches 1 is one batch, 1.0 is all batches. The order in a signature is
    not enough: jsonargparse makes Optional[int | float], and Python's cache may answer with the
    equal Optional[float | int] that another library made before.
    """
    kinds = get_args(kind)
    if get_origin(kind) not in (Union, UnionType) or not {int, float} <= set(kinds):
        return kind
    return Union[(int, *(each for each in kinds if each is not int))]


def base_parser(model: str) -> Parser:
    """A parser with the options that all models have."""
    parser = Parser(exit_on_error=False, allow_abbrev=False, print_config=None)
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ckpt_path", type=str | None, default=None)
    parser.add_argument("--save_every", type=PositiveInt | None, default=None)
    parser.add_argument("--import", type=list[str], default=[])
    parser.add_argument("--model.name", type=str, default=model)
    return parser


def parse(parser: Parser, argv: list[str]) -> Namespace:
    """Parse options whose group may be left out."""
    words = list(_full_names(argv, parser))
    for word in words:
        if word.startswith("--config="):
            _check_names_in(read_yaml(word.removeprefix("--config=")), parser)
    asked = (n for n, word in enumerate(words) if word.partition("=")[0].endswith(".help"))
    if (first := next(asked, None)) is not None:
        # --logger.help CSVLogger prints the page of one class: other options do not matter.
        words = words[first : first + (1 if "=" in words[first] else 2)]
    try:
        return parser.parse_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(_plain(str(error))) from error


def parse_object(parser: Parser, options: dict[str, Any]) -> Namespace:
    """Parse options that a file holds, by group."""
    _check_names_in(options, parser)
    try:
        config: Namespace = parser.parse_object(options)
        return config
    except argparse.ArgumentError as error:
        raise UsageError(_plain(str(error))) from error


def instantiate(parser: Parser, config: Namespace) -> Namespace:
    """Make the objects that a configuration describes; the configuration stays as it is."""
    options = config.clone()
    for group in ("model", "data"):
        options[group].pop("name", None)  # says which class, and is no argument of it
    # Since 4.49 jsonargparse calls it by the first name.
    return getattr(parser, "instantiate", parser.instantiate_classes)(options)  # type: ignore[no-any-return]


def given(parser: Parser, argv: list[str]) -> set[str]:
    """Names of the options that a command line sets, itself or in the files that it names."""
    known, found = option_names(parser), set()
    for arg in _full_names(argv, parser):
        name, _, value = arg.removeprefix("--").partition("=")
        if name == "config":
            found |= {each for each in known if _holds(read_yaml(value), each.split("."))}
        elif arg.startswith("--"):
            found.add(_known_part(name.rstrip("+"), known) or name)
    return {name for name in found if not any(each.startswith(f"{name}.") for each in found)}


def _check_names_in(options: dict[str, Any], parser: Parser) -> None:
    """Raise if a file has an option that the parser has not."""
    known = option_names(parser)
    groups = {name.rpartition(".")[0] for name in known}
    for name in _names_in(options, groups):
        if not _known_part(name, known) and name not in parser.follows:
            meant = did_you_mean(name, known)
            if not meant and "." not in name:  # its group is missing
                full = {short_name(each): each for each in known}
                near = difflib.get_close_matches(name, full, 1)
                meant = f"; did you mean {full[near[0]]}?" if near else ""
            raise UsageError(f"unknown option {name}{meant}")


def _names_in(options: dict[str, Any], groups: set[str], before: str = "") -> Iterator[str]:
    """Full names of the options in nested dictionaries."""
    for key, value in options.items():
        name = f"{before}{key}"
        if name in groups and isinstance(value, dict):
            yield from _names_in(value, groups, f"{name}.")
        else:
            yield name


def _holds(config: object, parts: list[str]) -> bool:
    """Whether nested dictionaries have such a key."""
    if not parts:
        return True
    return isinstance(config, dict) and parts[0] in config and _holds(config[parts[0]], parts[1:])


def option_names(parser: Parser) -> list[str]:
    """Full names of all options, without leading dashes."""
    return list(parser.get_defaults().keys())


def _full_names(argv: list[str], parser: Parser) -> Iterator[str]:
    """--max_steps and --max-steps become --trainer.max_steps; an unknown option raises."""
    known = option_names(parser)
    for arg in argv:
        if not arg.startswith("--"):
            yield arg
            continue
        typed, equals, value = arg[2:].partition("=")
        name = typed.rstrip("+").replace("-", "_")
        candidates = [name, *(f"{group}.{name}" for group in SHORT), _ALIASES.get(name, name)]
        follows = (parser.follows[each] for each in candidates if each in parser.follows)
        if followed := next(follows, None):
            if followed.split(".")[-1] != name.split(".")[-1]:
                raise UsageError(f"--{typed} follows from --{followed}: set that")
            candidates = [followed]
        full = next((each for each in candidates if _known_part(each, known)), None)
        if full is None:
            raise UsageError(f"unknown option --{typed}{_close_option(name, known)}")
        yield f"--{full}{'+' * typed.endswith('+')}{equals}{value}"


def _close_option(name: str, known: list[str]) -> str:
    """; did you mean the option with the closest name? Full names are compared with full names."""
    has_group = name.split(".")[0] in {each.split(".")[0] for each in known if "." in each}
    near = known if has_group else [*_NAMES, *map(short_name, known)]
    if called := next((each for each in _CALLED.get(name.lower(), ()) if each in near), None):
        return f"; did you mean --{called}?"
    if "model.head_options" in known and name in head_option_names():
        return f"; did you mean --head_options.{name}?"
    if name in _OPTIONS_OF:
        return f": it is one of --model {_OPTIONS_OF[name]}"
    return did_you_mean(name, near).replace("mean ", "mean --") or "; see --help"


def short_name(name: str) -> str:
    """An option's name without the group that can be left out."""
    group, dot, rest = name.partition(".")
    return rest if dot and group in SHORT else name


def _known_part(name: str, known: list[str]) -> str | None:
    """The option that a name belongs to, None if to none.

    Usually that is the name itself; --trainer.logger.save_dir belongs to trainer.logger.
    """
    parts = name.split(".")
    starts = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((start for start in starts if start in known), None)


def _plain(message: str) -> str:
    """jsonargparse's message in one line: the option, the value and what can be written.

    jsonargparse reports errors as text only: the option, the value and the type are read from it.
    """
    key = re.search(r'[Pp]arser key "([^"]+)"', message)
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    if key is None or value is None:
        return re.sub(r'Parser key "([^"]+)":', r"--\1:", message)
    if value[1] == "None":
        return f"--{short_name(key[1])} is needed: it has no default"
    if known := re.search(r"given class_path '(?:\w+\.)*(\w+)':\s+(.*)", message):
        return _problem_of_class(key[1], *known.groups())
    if part := re.match(r"NestedArg\(key='([^']+)'", value[1]):
        return f"--{key[1]}.{part[1]} needs a class that has it: --{key[1]} CLASS"
    literals = ", ".join(re.findall(r"Literal\[(.*?)\]", message))
    choices = list(dict.fromkeys(re.findall(r"[^\s,']+", literals)))
    if choices:
        close = did_you_mean(value[1], choices)
        return f"--{key[1]} {value[1]!r} is not one of {', '.join(choices)}{close}"
    kinds = set(re.findall(r"Expected an? <class '(?:\w+\.)*(\w+)'>", message)) - {"NoneType"}
    wanted = " or ".join(sorted(kinds, reverse=True))  # str, int, float: always in one order
    if kinds == {"dict"}:
        wanted = f"--{short_name(key[1])}.NAME VALUE, once for each"
    if "Expected a dot import path" in message:
        wanted = " or ".join(filter(None, ("the name of a class", wanted)))
    if restricted := re.search(r"does not conform to restriction v([<>=]+)(\S+)", message):
        wanted = f"a number {restricted[1]} {restricted[2]}"
    if wanted == "float" and value[1].lower().lstrip("+-") in ("nan", "inf", "infinity"):
        wanted = "a finite number"
    return f"--{key[1]} {value[1]!r}: expected {wanted or 'another kind of value'}"


def _problem_of_class(option: str, name: str, problem: str) -> str:
    """One line about an option whose value is an object of a class."""
    if missing := re.search(r"arguments are required: (.*)", problem):
        return f"--{option} {name} needs --{option}.{missing[1].replace(', ', f' and --{option}.')}"
    if unknown := re.search(r"Option '(\S+)' is not accepted", problem):
        return f"--{option} {name} has no option {unknown[1]}; see --{option}.help {name}"
    return f"--{option} {name}: {problem}"


def group_help(parser: Parser, group: str) -> str:
    """The options of one group with what each is for, as wide as the terminal."""
    texts = _help_texts(parser)
    names = [name for name in option_names(parser) if name.startswith(f"{group}.")]
    return "\n".join(
        _option_help(short_name(name), texts.get(name, ""), parser.get_default(name))
        for name in names
        if not name.endswith(".name")
    )


def _option_help(name: str, text: str, default: Any) -> str:
    """An option, and beside it, on as many lines as it takes, what it is for and its default."""
    words = re.sub(r"Defaults? ?(to|:) ?``[^`]*``\.?", "", " ".join(text.split())).strip()
    words = re.sub(r":\w+:`~?\.?([^`]*)`", r"\1", words).replace("``", "").rstrip(".")
    value = "" if default is None else f"[{default}]"
    option, width = f"  --{name} ", min(_WIDTH, shutil.get_terminal_size().columns)
    said = f"{words} {value}".strip() or "-"
    lines = textwrap.wrap(said, width - _INDENT, break_on_hyphens=False)
    if len(option) > _INDENT:
        return "\n".join([option.rstrip(), *(" " * _INDENT + line for line in lines)])
    return "\n".join([f"{option:{_INDENT}}{lines[0]}", *(" " * _INDENT + x for x in lines[1:])])


def _help_texts(parser: Parser) -> dict[str, str]:
    """What each option is for, by full name, from the docstrings that jsonargparse has read."""
    texts: dict[str, str] = {}

    class Collector(argparse.HelpFormatter):
        def add_argument(self, action: argparse.Action) -> None:
            texts[action.dest] = action.help or ""

    usual, parser.formatter_class = parser.formatter_class, Collector
    parser.format_help()
    parser.formatter_class = usual
    return texts
