"""Which command, model, head and data a command line asks for. Nothing here imports torch."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from catnat.checks import did_you_mean, require_choice

COMMANDS = ("fit", "validate", "test", "predict")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained if the command line says nothing else.

    Args:
        model: path of its class.
        data: names of the data that it can learn from; the first is the default.
        steps: with an accelerator.
        steps_on_cpu: without one.
        defaults: other defaults of options, by full name.
    """

    model: str = ""
    data: tuple[str, ...] = ()
    steps: int = 60_000
    steps_on_cpu: int = 2_000
    defaults: dict[str, Any] = field(default_factory=dict)


_IMAGES = ("mnist", "fashion-mnist", "kmnist")
RECIPES = {
    "vae": Recipe("catnat.lit_modules.DiscreteVAE", _IMAGES),
    "mlp-vae": Recipe(
        "catnat.lit_modules.MLPDiscreteVAE",
        _IMAGES,
        defaults={"data.variant": "stochastic", "data.batch_size": 128},
    ),
    "gsl": Recipe(
        "catnat.lit_modules.GraphStructureLearner",
        ("community-graph",),
        steps=5_000,
        steps_on_cpu=5_000,
    ),
    "ppo": Recipe("catnat.cli.rl.PPO", steps=8_000_000, steps_on_cpu=30_000),  # in Atari
    "a2c": Recipe("catnat.cli.rl.A2C", steps=8_000_000, steps_on_cpu=30_000),
}
RL_MODELS = ("ppo", "a2c")
MODELS = tuple(RECIPES)
DATA = {
    "mnist": "catnat.datamodules.MNISTDataModule",
    "fashion-mnist": "catnat.datamodules.FashionMNISTDataModule",
    "kmnist": "catnat.datamodules.KMNISTDataModule",
    "community-graph": "catnat.datamodules.CommunityGraphDataModule",
}


def read_names(argv: list[str]) -> argparse.Namespace:
    """What a command line asks for, from its options, its files, or the run that it resumes.

    Returns:
        ``command``; ``model``, a name of ``MODELS`` or the path of a class; ``path``, of that class
        in any case; ``head``, None for the model's default; ``data``, the path of a class, None
        for the model's default; ``imports``, modules to import first; ``ckpt_path``, the checkpoint
        to resume or to test; ``configs``, files of options, first that of the resumed run;
        ``root``, the folder of all runs; ``words``, the rest of the command line.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model", "--model.class_path")
    parser.add_argument("--head", "--model.head", "--model.init_args.head")
    parser.add_argument("--data", "--data.class_path")
    parser.add_argument("--import", dest="imports", action="append", default=[])
    parser.add_argument("-c", "--config", dest="configs", action="append", default=[])
    parser.add_argument("--ckpt_path", "--ckpt-path")
    roots = ("--trainer.default_root_dir", "--default_root_dir", "--default-root-dir")
    parser.add_argument(*roots, dest="root")
    command, words = (argv[0], argv[1:]) if argv and argv[0][:1] != "-" else ("fit", argv)
    require_choice(COMMANDS, command=command)
    found, rest = parser.parse_known_args(words)
    found.command, found.words = command, rest
    for path in reversed(found.configs):
        _add_names_of(read_yaml(path), found)
    if found.ckpt_path is not None:
        home = Path(found.root or "runs", _name(found.model))
        head = found.head and found.head.removeprefix("catnat-")  # folders have no alias
        found.ckpt_path = find_checkpoint(home, head, found.ckpt_path)
        if record := record_of(found.ckpt_path):
            _add_names_of(read_yaml(str(record)), found)
            found.configs.insert(0, str(record))
    found.model, found.root = _name(found.model), found.root or "runs"
    if "." not in found.model:
        require_choice((*MODELS, "or my_module.MyVAE"), model=found.model)
    found.path = RECIPES[found.model].model if found.model in RECIPES else found.model
    found.data = _data_path(found.data, found.model)
    return found


def _add_names_of(options: dict[str, Any], found: argparse.Namespace) -> None:
    """Add names that a file has, and neither the command line nor a later file."""
    model, data = (options.get(group) or {} for group in ("model", "data"))
    for name in (model, data):
        if isinstance(name, str) and (path := DATA.get(name, RECIPES.get(name, Recipe()).model)):
            raise ValueError(f"in a file {name} is written as class_path: {path}")
    model = {"class_path": model} if isinstance(model, str) else model
    data = {"class_path": data} if isinstance(data, str) else data
    found.model = found.model or model.get("class_path")
    found.head = found.head or (model.get("init_args") or {}).get("head")
    found.data = found.data or data.get("class_path")
    found.root = found.root or (options.get("trainer") or {}).get("default_root_dir")
    modules = options.get("import") or []
    modules = [modules] if isinstance(modules, str) else modules
    found.imports += [each for each in modules if each not in found.imports]
    found.ckpt_path = found.ckpt_path or options.get("ckpt_path")


def _name(model: str | None) -> str:
    """The short name of a model, where it has one."""
    return next((name for name in RECIPES if RECIPES[name].model == model), model or "vae")


def _data_path(data: str | None, model: str) -> str | None:
    """The path of the data's class; names of data are checked."""
    if model in RL_MODELS:
        if data is not None:
            raise ValueError(f"--data {data}: {model} plays in environments; see --env")
        return None
    choices = RECIPES[model].data if model in RECIPES else tuple(DATA)
    if data is not None and "." not in data:
        require_choice((*choices, "or my_module.MyData"), data=data)
    return DATA.get(data or "", data)


def record_of(ckpt_path: Path) -> Path | None:
    """The config.yaml of the run that a checkpoint file belongs to, None if it belongs to none."""
    record = ckpt_path.parent.parent / "config.yaml"
    return record if ckpt_path.parent.name == "checkpoints" and record.is_file() else None


def find_checkpoint(home: Path, head: str | None, wanted: str) -> Path:
    """The path of a checkpoint.

    Args:
        home: folder of all runs of a model.
        head: name of the head; None: any.
        wanted: a file; or "last" or "best", for the newest checkpoint of this name.
    """
    if wanted not in ("last", "best"):
        if not Path(wanted).is_file():
            raise ValueError(f"there is no checkpoint {wanted!r}; give a file, last or best")
        return Path(wanted)
    found = list(home.glob(f"{head or '*'}/version_*/checkpoints/{wanted}.ckpt"))
    if not found:
        raise ValueError(f"there is no {wanted}.ckpt in any run under {home / (head or '')}")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def read_yaml(path: str) -> dict[str, Any]:
    """The options in a file, by group."""
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path} should read like what --print_config prints")
    return config


def command_words() -> str:
    """How the user called this program: python train.py, or the console command catnat."""
    return "catnat" if Path(sys.argv[0]).stem == "catnat" else "python train.py"


def load(path: str, option: str = "") -> Any:
    """The object behind a path such as my_module.MyVAE, also in the working directory.

    Args:
        path: of the object.
        option: that asks for it, for the message where there is none.
    """
    module, _, name = path.rpartition(".")
    found = import_module(module, f"{option} {path}")
    if not hasattr(found, name):
        raise ValueError(
            f"{option} {path}: {module} has no {name}{did_you_mean(name, vars(found))}"
        )
    return getattr(found, name)


def import_module(name: str, option: str = "--import") -> Any:
    """Import a module, which may lie in the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{option}: {error}") from error
