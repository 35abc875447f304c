"""Names on a command line: command, model, head, data, imports and checkpoint.

Nothing here imports torch, which takes seconds: a misspelt name is answered at once.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from catnat.checks import did_you_mean
from catnat.training.errors import UsageError

_IMAGES = ("mnist", "fashion-mnist", "kmnist")
# Models that Lightning trains, and the data that each can learn from; the first is the default.
LIGHTNING_MODELS = {"vae": _IMAGES, "mlp-vae": _IMAGES, "gsl": ("community-graph",)}
# Algorithms of reinforcement learning, which Stable-Baselines3 trains; they play in environments.
RL_MODELS = ("ppo", "a2c")
MODELS = (*LIGHTNING_MODELS, *RL_MODELS)
DATA = tuple(dict.fromkeys(name for names in LIGHTNING_MODELS.values() for name in names))

GROUPS = ("model", "data", "trainer", "fisher")
SHORT = ("model", "data", "trainer")  # groups that can be left out of an option's name


@dataclass
class Names:
    """The names that decide which options a command line has.

    Args:
        command: "fit" or "test".
        model: a name of ``MODELS``, or the path of a LightningModule such as my_module.MyVAE.
        head: the name of a head. None: the default of a model of the user's own.
        data: a name of ``DATA``, or the path of a LightningDataModule. None: the model's default.
        imports: modules to import first.
        ckpt_path: a file, "last" or "best"; None for a new run.
        root: the folder of all runs.
        print_config: print the configuration, do not run.
        help: print this page of help, "" for that of the model, and do not run; None: run.
        given: which of model.head and data.name the command line or its files set.
    """

    command: str = "fit"
    model: str = "vae"
    head: str | None = None
    data: str | None = None
    imports: list[str] = field(default_factory=list)
    ckpt_path: str | None = None
    root: str = "runs"
    print_config: bool = False
    help: str | None = None
    given: set[str] = field(default_factory=set)

    @property
    def home(self) -> Path:
        """The folder of all runs of this model with this head."""
        return Path(self.root, self.model, self.head or "no_head")


class PlainParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong."""
        raise UsageError(message)


def read_names(argv: list[str]) -> tuple[Names, list[str]]:
    """The names, from options or files; and the options that are left."""
    parser = PlainParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", "--model.name")
    parser.add_argument("--head", "--model.head")
    parser.add_argument("--data", "--data.name")
    parser.add_argument("--import", dest="imports", action="append", default=[])
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--ckpt_path", "--ckpt-path")
    root = ("--default_root_dir", "--default-root-dir", "--trainer.default_root_dir")
    parser.add_argument(*root, dest="root")
    parser.add_argument("--print_config", "--print-config", action="store_true")
    parser.add_argument("-h", "--help", nargs="?", const="")
    command = "fit" if argv[0].startswith("-") else argv[0]
    check_choice("command", command, ("fit", "test", "report"))
    found, rest = parser.parse_known_args(argv[0 if argv[0].startswith("-") else 1 :])
    options = [f"--config={path}" for path in found.config] + rest
    if found.root is not None:
        options.append(f"--trainer.default_root_dir={found.root}")
    for path in reversed(found.config):  # the last one wins
        add_names_of_file(found, path)
    given = {"model.head": found.head, "data.name": found.data}
    if not isinstance(found.ckpt_path, str | None) or found.ckpt_path == "":
        raise UsageError(f"--ckpt_path {found.ckpt_path!r} is no file, and neither last nor best")
    if found.ckpt_path is not None:
        options.append(f"--ckpt_path={found.ckpt_path}")
        if record := record_beside(Path(found.ckpt_path)):  # its run had a model and a head
            if found.model is not None:
                check_model(found.ckpt_path, record, found.model)
            add_names_of_file(found, str(record))
    del found.config
    chosen = {name: value for name, value in vars(found).items() if value is not None}
    names = Names(command, **chosen)
    names.given = {name for name, value in given.items() if value is not None}
    _check_names(names)
    return names, options


def _check_names(names: Names) -> None:
    """Raise if a model, data or a head is misspelt; complete a built-in model's names."""
    own_model = "." in names.model
    if not own_model:
        check_choice("--model", names.model, MODELS, "a class like my_module.MyVAE")
    if names.model in RL_MODELS:
        if names.data is not None:
            raise UsageError(f"--data {names.data}: {names.model} plays in environments; see --env")
    elif names.data is not None and "." not in names.data:
        choices = LIGHTNING_MODELS.get(names.model, DATA)
        check_choice("--data", names.data, choices, "a class like my_module.MyDataModule")
    if names.head is None:
        names.head = None if own_model else "natural"
        return
    heads = builtin_heads()
    names.head = heads.get(names.head, names.head)
    if not names.imports and not own_model and "." not in (names.data or ""):
        check_choice("--head", names.head, heads)


def record_beside(ckpt_path: Path) -> Path | None:
    """The config.yaml of the run that a checkpoint file belongs to, None if it belongs to none."""
    record = ckpt_path.parent.parent / "config.yaml"
    return record if ckpt_path.parent.name == "checkpoints" and record.is_file() else None


def check_model(ckpt_path: str, record: Path, model: str) -> None:
    """Raise if the run of a checkpoint, whose config.yaml is record, has another model."""
    made = (read_yaml(str(record)).get("model") or {}).get("name")
    if made != model:
        raise UsageError(f"checkpoint {ckpt_path} is one of another model: {made}, not {model}")


def add_names_of_file(names: argparse.Namespace | Names, path: str) -> None:
    """Add the names that a configuration file has and the command line has not."""
    config = read_yaml(path)
    for group in GROUPS:
        if not isinstance(config.get(group, {}), dict):
            raise UsageError(f"--config {path}: {group} should hold options, got {config[group]!r}")
    keys = {"model": "model.name", "head": "model.head", "data": "data.name"}
    for name, key in (keys | {"root": "trainer.default_root_dir"}).items():
        group, _, option = key.partition(".")
        value = config.get(group, {}).get(option)
        if not isinstance(value, str | None):
            raise UsageError(f"--config {path}: {key} should be a name, got {value!r}")
        if getattr(names, name) is None:
            setattr(names, name, value)
    modules = config.get("import") or []
    if not isinstance(modules, list) or not all(isinstance(each, str) for each in modules):
        wanted = "import should be a list of modules, like [my_heads]"
        raise UsageError(f"--config {path}: {wanted}, got {modules!r}")
    names.imports += [each for each in modules if each not in names.imports]
    if names.ckpt_path is None:
        names.ckpt_path = config.get("ckpt_path")


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
    for name in names:
        import_module(f"--import {name}", name)


def import_module(asked: str, name: str) -> Any:
    """A module of the user's, which may lie in the working directory.

    Args:
        asked: the option that asks for the module, for the error if there is none.
        name: of the module.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{asked}: {error}") from error


def check_choice(what: str, value: str, choices: Collection[str], other: str = "") -> None:
    """Raise unless value is one of the choices.

    Args:
        what: which value it is, such as "--head".
        value: what the user wrote.
        choices: what can be written.
        other: what else could be written, in words.
    """
    if value not in choices:
        listed = ", ".join(choices) + (f", or {other}" if other else "")
        raise UsageError(f"{what} {value!r} is not one of {listed}{did_you_mean(value, choices)}")
