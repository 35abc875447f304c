"""The command line of train.py: names and options, with one-line errors.

Nothing here imports torch, which takes seconds: a misspelt name is answered at once.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import errno
import importlib
import importlib.util
import logging
import os
import re
import shlex
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

_WIDTH = 100  # of help pages
SHORT = ("model", "data", "trainer")  # groups that can be left out of an option's name
_NAMES = ("model", "head", "print_config", "help")  # read before there is a parser

_DISK_ERRORS = (
    errno.ENOSPC,  # full
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,  # something else lies where a folder or a file should be
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.EPIPE,  # nobody reads the output any more
)

HELP = """\
usage: python train.py [fit | test] --model MODEL --head HEAD [options]

Trains a model and tests it (fit, the default), or only tests a checkpoint.

  --model MODEL        {models}
  --head HEAD          {heads}
  --num_latents N --num_categories K   of vae and mlp-vae
  --variant V          of their data: gray, binary or stochastic
  --theta P            of gsl's data: probability of each true edge
  --estimator E        of gsl: score_function or local_expectation
  --max_steps N        {steps}
  --seed N             of weights and noise
  --devices N --strategy ddp ...   any flag of Lightning's Trainer
  --ckpt_path PATH     continue (or test) a checkpoint: a file, last or best
  --save_every N       steps between checkpoints
  --config FILE        options from a YAML file; other options win
  --print_config       print all options as such a file, and stop
  --import MODULE      import it first: heads it defines can be chosen

Full names are --model.X, --data.X, --trainer.X, --fisher.X; the first three
groups can be left out. To list them: --help model, data, trainer or fisher.
Runs lie in runs/<model>/<head>/version_<k>: tensorboard --logdir runs
PPO has other options: --model ppo --help
"""


class UsageError(Exception):
    """Something on the command line is wrong; the message is one line."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))


class _NameParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


# -- names, before torch -----------------------------------------------------------------------


def read_names(argv: list[str], models: Collection[str]) -> tuple[argparse.Namespace, list[str]]:
    """Command, model, head and imports, from options or files; and the options that are left."""
    parser = _NameParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", "--model.name")
    parser.add_argument("--head", "--model.head")
    parser.add_argument("--import", dest="imports", action="append", default=[])
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--ckpt_path", "--ckpt-path")
    parser.add_argument("--print_config", "--print-config", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    command = "fit" if argv[0].startswith("-") else argv[0]
    check_choice("command", command, ("fit", "test"))
    names, rest = parser.parse_known_args(argv[0 if argv[0].startswith("-") else 1 :])
    for path in reversed(names.config):  # the last one wins
        _add_names_of_file(names, path)
    if not isinstance(names.ckpt_path, str | None) or names.ckpt_path == "":
        raise UsageError(f"--ckpt_path {names.ckpt_path!r} is no file, and neither last nor best")
    names.command, names.head_given = command, names.head is not None
    files = [f"--config={path}" for path in names.config]
    if names.ckpt_path is not None:
        files.append(f"--ckpt_path={names.ckpt_path}")
        if record := record_beside(Path(names.ckpt_path)):  # its run had a model and a head
            _add_names_of_file(names, str(record))
    names.model = "vae" if names.model is None else names.model
    check_choice("--model", names.model, models)
    heads = builtin_heads()
    names.head = "natural" if names.head is None else heads.get(names.head, names.head)
    if not names.imports:
        check_choice("--head", names.head, heads)
    return names, [*files, *rest]


def record_beside(ckpt_path: Path) -> Path | None:
    """The config.yaml of the run that a checkpoint file belongs to, None if it belongs to none."""
    record = ckpt_path.parent.parent / "config.yaml"
    return record if ckpt_path.parent.name == "checkpoints" and record.is_file() else None


def _add_names_of_file(names: argparse.Namespace, path: str) -> None:
    config = read_yaml(path)
    for group in (*SHORT, "fisher"):
        if not isinstance(config.get(group, {}), dict):
            raise UsageError(f"--config {path}: {group} should hold options, got {config[group]!r}")
    model = config.get("model", {})
    for what, value in (("name", model.get("name")), ("head", model.get("head"))):
        if not isinstance(value, str | None):
            raise UsageError(f"--config {path}: model.{what} should be a name, got {value!r}")
    modules = config.get("import") or []
    if not isinstance(modules, list) or not all(isinstance(each, str) for each in modules):
        wanted = "import should be a list of modules, like [my_heads]"
        raise UsageError(f"--config {path}: {wanted}, got {modules!r}")
    names.model = model.get("name") if names.model is None else names.model
    names.head = model.get("head") if names.head is None else names.head
    names.imports += [each for each in modules if each not in names.imports]
    names.ckpt_path = config.get("ckpt_path") if names.ckpt_path is None else names.ckpt_path


def read_yaml(path: str) -> dict[str, Any]:
    """The options in a file, by group."""
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {getattr(error, 'strerror', error)}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"--config {path} is no YAML: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--config {path} should read like what --print_config prints")
    return config


def builtin_heads() -> dict[str, str]:
    """Names and aliases of the heads in catnat/*heads.py, read without importing them."""
    spec = importlib.util.find_spec("catnat")
    assert spec is not None and spec.origin is not None
    heads: dict[str, str] = {}
    files = sorted(Path(spec.origin).parent.glob("*heads.py"))
    for node in (node for file in files for node in ast.parse(file.read_text()).body):
        words = {word.arg: word.value for word in getattr(node, "keywords", ())}
        if "name" in words:
            name = ast.literal_eval(words["name"])
            aliases = ast.literal_eval(words["aliases"]) if "aliases" in words else ()
            heads |= dict.fromkeys((name, *aliases), name)
    return heads


def import_modules(names: list[str]) -> None:
    """Import the user's modules, which may lie in the working directory."""
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"--import {name}: {error}") from error


def check_choice(what: str, value: str, choices: Collection[str]) -> None:
    """Raise unless value is one of the choices."""
    if value not in choices:
        listed = ", ".join(choices)
        raise UsageError(f"{what} {value!r} is not one of {listed}{hint(value, choices)}")


def hint(value: str, choices: Collection[str]) -> str:
    """; did you mean this or that? Nothing if nothing is close."""
    close = difflib.get_close_matches(value, list(choices), 1)
    return f"; did you mean {close[0]}?" if close else ""


# -- options, once the parser is there -----------------------------------------------------------


def base_parser(model: str, save_every: int) -> ArgumentParser:
    """A parser with the options that all models have."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, print_config=None)
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ckpt_path", type=str | None, default=None)
    parser.add_argument("--save_every", type=PositiveInt, default=save_every)
    parser.add_argument("--import", type=list[str], default=[])
    parser.add_argument("--model.name", type=str, default=model)
    return parser


def how_to_go_on(folder: Path, path: str) -> str:
    """The command line that continues a run."""
    return shlex.join(
        ["python", "train.py", "--config", f"{folder}/config.yaml", "--ckpt_path", path]
    )


def parse(parser: ArgumentParser, argv: list[str]) -> Namespace:
    """Parse options whose group may be left out."""
    words = list(_full_names(argv, option_names(parser), _links(parser)))
    asked = (n for n, word in enumerate(words) if word.partition("=")[0].endswith(".help"))
    if (first := next(asked, None)) is not None:
        # The page of one class: other options have no say.
        words = words[first : first + (1 if "=" in words[first] else 2)]
    try:
        return parser.parse_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(_plain(str(error), parser)) from error


def given(parser: ArgumentParser, argv: list[str]) -> set[str]:
    """Names of the options that a command line sets, itself or in the files that it names."""
    known, found = option_names(parser), set()
    for arg in _full_names(argv, known, _links(parser)):
        name, _, value = arg.removeprefix("--").partition("=")
        if name == "config":
            found |= {each for each in known if _holds(read_yaml(value), each.split("."))}
        elif arg.startswith("--"):
            found.add(_known_part(name.rstrip("+"), known) or name)
    return {name for name in found if not any(each.startswith(f"{name}.") for each in found)}


def _holds(config: object, parts: list[str]) -> bool:
    """Whether nested dictionaries have such a key."""
    if not parts:
        return True
    return isinstance(config, dict) and parts[0] in config and _holds(config[parts[0]], parts[1:])


def option_names(parser: ArgumentParser) -> list[str]:
    """Full names of all options, without leading dashes."""
    options = [a for a in parser._actions if "".join(a.option_strings).startswith("-")]
    return [a.dest for a in options if a.dest not in SHORT]


def _links(parser: ArgumentParser) -> dict[str, str]:
    """Options that follow from others: jsonargparse has them as 'f(data.x) --> model.y'."""
    names = [name for action in parser._actions for name in action.option_strings]
    found = (re.fullmatch(r"(?:\w+\()?([\w.]+)\)? --> ([\w.]+)", name) for name in names)
    return {each[2]: each[1] for each in found if each}


def _full_names(argv: list[str], known: list[str], links: dict[str, str]) -> Iterator[str]:
    """--max_steps and --max-steps become --trainer.max_steps; an unknown option raises."""
    for arg in argv:
        if not arg.startswith("--"):
            yield arg
            continue
        typed, equals, value = arg[2:].partition("=")
        name = typed.rstrip("+").replace("-", "_")
        candidates = [name, *(f"{group}.{name}" for group in SHORT)]
        if followed := next((links[each] for each in candidates if each in links), None):
            if followed.split(".")[-1] != name.split(".")[-1]:
                raise UsageError(f"--{typed} follows from --{followed}: set that")
            candidates = [followed]
        full = next((each for each in candidates if _known_part(each, known)), None)
        if full is None:
            full_names = name.split(".")[0] in {each.split(".")[0] for each in known if "." in each}
            near = known if full_names else [*_NAMES, *map(short_name, known)]
            close = hint(name, near).replace("mean ", "mean --")
            raise UsageError(f"unknown option --{typed}{close or '; see --help'}")
        yield f"--{full}{'+' * typed.endswith('+')}{equals}{value}"


def short_name(name: str) -> str:
    """An option's name without the group that can be left out."""
    return name.removeprefix(_group(name))


def _group(name: str) -> str:
    """The part of an option's name that can be left out."""
    first, dot, _ = name.partition(".")
    return first + dot if first in SHORT else ""


def _known_part(name: str, known: list[str]) -> str | None:
    """The option that a name sets or, like --logger.save_dir and --head_options.center, adds to."""
    parts = name.split(".")
    starts = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((start for start in starts if start in known), None)


def _plain(message: str, parser: ArgumentParser) -> str:
    """jsonargparse's message in one line: the option, the value and what would do."""
    if group := re.search(r"Group '(\S+)' does not accept option '(\S+)'", message):
        name = ".".join(group.groups())
        return f"unknown option {name}{hint(name, option_names(parser))}"
    if option := re.fullmatch(r"Option '(\S+)' is not accepted", message):
        full = {short_name(name): name for name in option_names(parser)}
        near = difflib.get_close_matches(option[1], full, 1)
        meant = f"; did you mean {full[near[0]]}?" if near else ""
        return f"unknown option {option[1]}{meant}"
    key = re.search(r'[Pp]arser key "([^"]+)"', message)
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    if key is None or value is None:
        return re.sub(r'Parser key "([^"]+)":', r"--\1:", message)
    if known := re.search(r"given class_path '(?:\w+\.)*(\w+)':\s+(.*)", message):
        return _problem_of_class(key[1], *known.groups())
    if part := re.match(r"NestedArg\(key='([^']+)'", value[1]):
        return f"--{key[1]}.{part[1]} needs a class that has it: --{key[1]} CLASS"
    literals = ", ".join(re.findall(r"Literal\[(.*?)\]", message))
    choices = list(dict.fromkeys(re.findall(r"[^\s,']+", literals)))
    if choices:
        close = hint(value[1], choices)
        return f"--{key[1]} {value[1]!r} is not one of {', '.join(choices)}{close}"
    kinds = dict.fromkeys(re.findall(r"Expected an? <class '(?:\w+\.)*(\w+)'>", message))
    wanted = " or ".join(kind for kind in kinds if kind != "NoneType")
    if "Expected a dot import path" in message:
        wanted = " or ".join(filter(None, ("the name of a class", wanted)))
    return f"--{key[1]} {value[1]!r}: expected {wanted or 'another kind of value'}"


def _problem_of_class(option: str, name: str, problem: str) -> str:
    """One line about an option whose value is an object of a class."""
    if missing := re.search(r"arguments are required: (.*)", problem):
        return f"--{option} {name} needs --{option}.{missing[1].replace(', ', f' and --{option}.')}"
    if unknown := re.search(r"Option '(\S+)' is not accepted", problem):
        return f"--{option} {name} has no option {unknown[1]}; see --{option}.help {name}"
    return f"--{option} {name}: {problem}"


def group_help(parser: ArgumentParser, group: str) -> str:
    """The options of one group, one line each."""
    lines = []
    for name in option_names(parser):
        if not name.startswith(f"{group}.") or name.endswith(".help"):
            continue
        action = next(each for each in parser._actions if each.dest == name)
        text = " ".join((action.help or "").split()).split(". ")[0].rstrip(".").replace("``", "")
        default = parser.get_default(name)
        value = "" if default is None else f" [{default}]"
        option = f"  --{short_name(name):28} "
        room = _WIDTH - len(option + value)
        lines.append(option + (text if len(text) <= room else f"{text[: room - 4]} ...") + value)
    return "\n".join(lines)


def help_page(models: Collection[str], steps: int, steps_on_cpu: int) -> str:
    """The page that fits a screen."""
    heads = ", ".join(dict.fromkeys(builtin_heads().values()))
    said = f"{steps:,}"
    if steps_on_cpu != steps:
        said += f" if there is an accelerator, else {steps_on_cpu:,}"
    return HELP.format(models=", ".join(models), heads=heads, steps=said)


# -- what users see of Lightning -----------------------------------------------------------------


@contextmanager
def usage_errors(raised_in: tuple[str, ...] = ("",)) -> Iterator[None]:
    """What these modules raise in here is the user's to mend: one line, not a traceback."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (ValueError, TypeError, MisconfigurationException) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith(raised_in):
            raise
        raise UsageError(error) from error


@contextmanager
def quiet_about_disks() -> Iterator[None]:
    """A full disk in TensorBoard's thread has no traceback: the main thread raises it again."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not is_disk_error(args.exc_value):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def is_disk_error(error: BaseException | None) -> bool:
    """Whether a disk, a folder or its permissions are to blame, and not a program."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def silence() -> None:
    """Leave out what users can do nothing about."""
    import lightning.pytorch  # noqa: F401 - sets levels of its own

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers",
        ".*is smaller than the logging interval",
        ".*exists and is not empty",
        ".*LeafSpec",
        ".*dirpath has changed",
        ".*all_gather is deprecated",
        ".*You have specified a mini-batch size",
        ".*is not in the possible render_modes",
        ".*The render mode is None",
        ".*torch.jit.script. is deprecated",  # in torch-geometric
    ):
        warnings.filterwarnings("ignore", message)
