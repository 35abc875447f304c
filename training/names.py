"""Command, model, head and imports of a command line, and the help page.

Nothing here imports torch, which takes seconds: a misspelt name is answered at once.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import yaml

from catnat.training.errors import UsageError

MODELS = ("vae", "mlp-vae", "gsl", "ppo")
SHORT = ("model", "data", "trainer")  # groups that can be left out of an option's name

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


class _NameParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def read_names(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
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
    check_choice("--model", names.model, MODELS)
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


def help_page(steps: int, steps_on_cpu: int) -> str:
    """The page that fits a screen."""
    heads = ", ".join(dict.fromkeys(builtin_heads().values()))
    said = f"{steps:,}"
    if steps_on_cpu != steps:
        said += f" if there is an accelerator, else {steps_on_cpu:,}"
    return HELP.format(models=", ".join(MODELS), heads=heads, steps=said)
