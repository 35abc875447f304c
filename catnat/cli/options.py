"""What a command line asks for, read once. Nothing here imports torch."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catnat.checks import did_you_mean, require_choice

COMMANDS = ("fit", "validate", "test", "predict")
HEADS = ("softmax", "sparsemax", "sigmoid", "natural")
MODELS = {
    "vae": "catnat.lit_modules.DiscreteVAE",
    "mlp-vae": "catnat.lit_modules.MLPDiscreteVAE",
    "gsl": "catnat.lit_modules.GraphStructureLearner",
    "ppo": "catnat.cli.rl.PPO",
    "a2c": "catnat.cli.rl.A2C",
}
RL_MODELS = ("ppo", "a2c")
DATA = {
    "mnist": "catnat.datamodules.MNISTDataModule",
    "fashion-mnist": "catnat.datamodules.FashionMNISTDataModule",
    "kmnist": "catnat.datamodules.KMNISTDataModule",
    "community-graph": "catnat.datamodules.CommunityGraphDataModule",
}
# The data that a model can learn from; the first is the default.
IMAGES = ("mnist", "fashion-mnist", "kmnist")
DATA_OF = {"vae": IMAGES, "mlp-vae": IMAGES, "gsl": ("community-graph",)}
# Defaults of a run for which nobody gives a length, by model and device.
_GRAPHS = {"trainer.max_steps": 5_000}
_GAMES = {"accelerator": {"trainer.total_steps": 8_000_000}, "cpu": {"trainer.total_steps": 30_000}}
LENGTHS: dict[str, dict[str, dict[str, Any]]] = {
    "vae": {
        "accelerator": {"trainer.max_steps": 60_000},
        "cpu": {"trainer.max_steps": 2_000, "model.nll_samples": 64},
    },
    "gsl": {"accelerator": _GRAPHS, "cpu": _GRAPHS},
    "ppo": _GAMES,
    "a2c": _GAMES,
}
# Other defaults of the options of data, by model.
DATA_DEFAULTS = {"mlp-vae": {"data.variant": "stochastic", "data.batch_size": 128}}
# Options that name what a run consists of, by every name they have.
_CHOICES = {
    "model": "model.class_path",
    "head": "model.head",
    "data": "data.class_path",
    "default_root_dir": "trainer.default_root_dir",
    "ckpt_path": "ckpt_path",
}
_WITHOUT_VALUE = ("print_config", "help")


@dataclass
class CommandLine:
    """What a command line asks for, from its options, its files, or the run that it resumes.

    Args:
        command: one of ``COMMANDS``.
        model: a name of ``MODELS``, or the path of a class.
        head: its name; None for the model's default.
        data: the path of a class; None for the model's default.
        root: the folder of all runs.
        ckpt_path: the checkpoint to resume or to test.
        record: the options of the run that the checkpoint belongs to, a file.
        configs: further files of options.
        imports: modules to import first.
        options: pairs of a name and a value, as they were typed, without those above.
        in_files: options of all files, by full name.
    """

    command: str
    model: str = "vae"
    head: str | None = None
    data: str | None = None
    root: str = "runs"
    ckpt_path: Path | None = None
    record: Path | None = None
    configs: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    options: list[tuple[str, str | None]] = field(default_factory=list)
    in_files: dict[str, Any] = field(default_factory=dict)

    @property
    def model_path(self) -> str:
        """The path of the model's class."""
        return MODELS.get(self.model, self.model)


def read_command_line(argv: list[str]) -> CommandLine:
    """Read the words of a command line, and the files that they name.

    Raises:
        ValueError: a word, a file or a name is wrong.
    """
    words = list(argv)
    line = CommandLine(words.pop(0) if words and not words[0].startswith("-") else "fit")
    require_choice(COMMANDS, command=line.command)
    typed_choices: dict[str, Any] = {}
    for name, value in _pairs(words):
        full_name = _CHOICES.get(name, name)
        if full_name in _CHOICES.values():
            typed_choices[full_name] = value
        elif name == "config":
            line.configs.append(str(value))
        elif name == "import":
            line.imports.append(str(value))
        else:
            line.options.append((name, value))
    files = [read_options(path) for path in line.configs]
    choices = _merge(*files, typed_choices)
    if wanted := choices.get("ckpt_path"):
        model = _short_name(choices.get("model.class_path", line.model))
        home = Path(choices.get("trainer.default_root_dir") or line.root, model)
        line.ckpt_path = find_checkpoint(home, choices.get("model.head"), wanted)
        line.record = record_of(line.ckpt_path)
        if line.record:
            files.insert(0, read_options(str(line.record)))
            choices = _merge(*files, typed_choices)
    line.in_files = _merge(*files)
    for options in files:
        modules = options.get("import") or []
        line.imports += [modules] if isinstance(modules, str) else modules
    line.model = _short_name(choices.get("model.class_path", line.model))
    line.head = choices.get("model.head")
    line.root = choices.get("trainer.default_root_dir") or line.root
    _check_names(line)
    line.data = _data_path(choices.get("data.class_path"), line.model)
    return line


def _pairs(words: list[str]) -> list[tuple[str, str | None]]:
    """Names and values of options; --max-steps is --max_steps, and init_args can be left out."""
    pairs: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("--") or word in ("-c", "-h"):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_").replace(".init_args.", ".")
            name = {"h": "help", "c": "config"}.get(name, name)
            pairs.append((name, value if equals else None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], word)
        else:
            raise ValueError(f"unrecognized arguments: {word}")
    for name, typed_value in pairs:
        if not typed_value and name.rpartition(".")[2] not in _WITHOUT_VALUE:
            raise ValueError(f"--{name} needs a value")
    return pairs


def _merge(*options: dict[str, Any]) -> dict[str, Any]:
    """Options of several files, of which later ones count."""
    return {name: value for each_file in options for name, value in each_file.items()}


def _short_name(path: str) -> str:
    """The short name of a model, where it has one."""
    return next((name for name in MODELS if MODELS[name] == path), path)


def _check_names(line: CommandLine) -> None:
    """Check the names of model and head; heads that are defined elsewhere are not known yet."""
    if "." not in line.model:
        require_choice((*MODELS, "or my_module.MyVAE"), model=line.model)
    defined_elsewhere = line.imports or line.model not in MODELS or "torch" in sys.modules
    if line.head and not defined_elsewhere:
        require_choice(HEADS, head=line.head.removeprefix("catnat-"))


def _data_path(data: str | None, model: str) -> str | None:
    """The path of the data's class; names of data are checked."""
    if model in RL_MODELS:
        if data is not None:
            raise ValueError(f"--data {data}: {model} plays in environments; see --env")
        return None
    if data is not None and "." not in data:
        require_choice((*DATA_OF.get(model, tuple(DATA)), "or my_module.MyData"), data=data)
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
    folder = head.removeprefix("catnat-") if head else "*"  # folders have no alias
    checkpoints = list(home.glob(f"{folder}/version_*/checkpoints/{wanted}.ckpt"))
    if not checkpoints:
        raise ValueError(f"there is no {wanted}.ckpt in any run under {home / folder}")
    return max(checkpoints, key=lambda path: path.stat().st_mtime_ns)


def read_options(path: str) -> dict[str, Any]:
    """The options in a file, by full name."""
    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path} should read like what --print_config prints")
    options = flat(config)
    for group, paths in (("model", MODELS), ("data", DATA)):
        if name := options.pop(group, None):
            if name in paths:
                raise ValueError(f"config files need class_path: {paths[name]}, not {name}")
            options[f"{group}.class_path"] = name
    return options


def flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by their full names.

    >>> flat({"model": {"class_path": "my.VAE", "init_args": {"head": "natural"}}})
    {'model.class_path': 'my.VAE', 'model.head': 'natural'}
    """
    flat_options: dict[str, Any] = {}
    for name, value in options.items():
        full_name = prefix if name == "init_args" else f"{prefix}{name}."
        if isinstance(value, dict):
            flat_options |= flat(value, full_name)
        else:
            flat_options[full_name.removesuffix(".")] = value
    return flat_options


def command_words() -> str:
    """How the user called this program: python train.py, or the console command catnat."""
    return "catnat" if Path(sys.argv[0]).stem == "catnat" else "python train.py"


def load(path: str, option: str = "") -> Any:
    """The object behind a path such as my_module.MyVAE, also in the working directory.

    Args:
        path: of the object.
        option: that asks for it, for the message where there is none.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{option} {path}: give the path of a class, such as my_module.{name}")
    module = import_module(module_name, f"{option} {path}")
    if not hasattr(module, name):
        close = did_you_mean(name, vars(module))
        raise ValueError(f"{option} {path}: {module_name} has no {name}{close}")
    return getattr(module, name)


def import_module(name: str, option: str = "--import") -> Any:
    """Import a module, which may lie in the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{option}: {error}") from error
