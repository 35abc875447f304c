"""What a command line asks for, read once. Nothing here imports torch."""

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catnat.checks import did_you_mean, require_choice

Options = dict[str, Any]  # by their names
COMMANDS = ("fit", "validate", "test", "predict")
HEADS = ("softmax", "sparsemax", "sigmoid", "natural")
DATA = {
    "mnist": "catnat.datamodules.MNISTDataModule",
    "fashion-mnist": "catnat.datamodules.FashionMNISTDataModule",
    "kmnist": "catnat.datamodules.KMNISTDataModule",
    "community-graph": "catnat.datamodules.CommunityGraphDataModule",
}
IMAGES = ("mnist", "fashion-mnist", "kmnist")


@dataclass(frozen=True)
class Recipe:
    """What belongs to a model.

    Args:
        path: of its class.
        data: names of data that it can learn from; the first is the default.
        steps: the length of a run for which nobody gives one.
        steps_on_cpu: the same on a CPU.
        defaults: options that differ from the defaults of the classes.
    """

    path: str
    data: tuple[str, ...] = ()
    steps: int = 60_000
    steps_on_cpu: int = 2_000
    defaults: Options = field(default_factory=dict)


MODELS = {
    "vae": Recipe("catnat.lit_modules.DiscreteVAE", IMAGES),
    "mlp-vae": Recipe(
        "catnat.lit_modules.MLPDiscreteVAE",
        IMAGES,
        defaults={"data.variant": "stochastic", "data.batch_size": 128},
    ),
    "gsl": Recipe("catnat.lit_modules.GraphStructureLearner", ("community-graph",), 5_000, 5_000),
    "ppo": Recipe("catnat.sb3.recipes.PPO", (), 8_000_000, 30_000),
    "a2c": Recipe("catnat.sb3.recipes.A2C", (), 8_000_000, 30_000),
}
RL_MODELS = ("ppo", "a2c")
# Options that say what a run consists of, by their short names.
_CHOICES = {
    "model": "model.class_path",
    "head": "model.head",
    "data": "data.class_path",
    "default_root_dir": "trainer.default_root_dir",
}
_READ_HERE = {*_CHOICES.values(), "ckpt_path", "config", "import"}


class CommandLine:
    """What a command line asks for: by its options, its files, or the run that it resumes.

    Args:
        argv: the words.

    Attributes:
        command: one of ``COMMANDS``.
        model: a name of ``MODELS``, or the path of a class.
        model_path: the path of the class.
        head: its name; None for the model's default.
        data: the path of a class; None for the model's default.
        root: the folder of all runs.
        ckpt_path: the checkpoint to resume or to test.
        record: options of the run that the checkpoint belongs to, by full name; empty without one.
        configs: files of options, that of the record first.
        in_configs: options of these files by full name, without those of the record.
        imports: modules to import first.
        options: pairs of a name and a value, as they were typed, without those above.

    Raises:
        ValueError: a word, a file or a name is wrong.
    """

    def __init__(self, argv: list[str]) -> None:
        words = list(argv)
        self.command = words.pop(0) if words and not words[0].startswith("-") else "fit"
        require_choice(COMMANDS, command=self.command)
        typed = [(_CHOICES.get(name, name), value) for name, value in _pairs(words)]
        self.options = [(name, value) for name, value in typed if name not in _READ_HERE]
        self.configs = [value for name, value in typed if name == "config"]
        self.in_configs: Options = {}
        for path in self.configs:
            self.in_configs |= read_options(path)
        choices = self.in_configs | dict(typed)
        self._choose(choices)
        self.ckpt_path = None
        self.record = {}
        if wanted := choices.get("ckpt_path"):
            self.ckpt_path = find_checkpoint(Path(self.root, self.model), self.head, wanted)
            record = self.ckpt_path.parent.parent / "config.yaml"
            if self.ckpt_path.parent.name == "checkpoints" and record.is_file():
                self.configs.insert(0, str(record))
                self.record = read_options(record)
                if "model.class_path" in self.record:
                    self.record["model.class_path"] = path_of(self.record["model.class_path"])
                self._choose(self.record | choices)
        modules = (self.record | self.in_configs).get("import") or []
        self.imports = [value for name, value in typed if name == "import"]
        self.imports += [modules] if isinstance(modules, str) else modules
        self._check_names()

    def _choose(self, choices: Options) -> None:
        """Set what the run consists of; folders and records have no alias of a head."""
        model: str = choices.get("model.class_path", "vae")
        self.model_path = path_of(model)
        names = {recipe.path: name for name, recipe in MODELS.items()}
        self.model = names.get(self.model_path, model)
        self.head = (choices.get("model.head") or "").removeprefix("catnat-") or None
        self.data = choices.get("data.class_path")
        self.root = choices.get("trainer.default_root_dir") or "runs"

    def _check_names(self) -> None:
        """Check the names of model, head and data; heads that modules define are not known yet."""
        if "." not in self.model:
            require_choice((*MODELS, "or my_module.MyVAE"), model=self.model)
        defined_elsewhere = self.imports or self.model not in MODELS or "torch" in sys.modules
        if self.head and not defined_elsewhere:
            require_choice(HEADS, head=self.head)
        if self.model in RL_MODELS:
            require_choice(("fit", "test"), command=self.command)
            if self.data:
                reason = f"{self.model} plays in environments; see --env"
                raise ValueError(f"--data {self.data}: {reason}")
        if self.data and "." not in self.data:
            names = MODELS[self.model].data if self.model in MODELS else DATA
            require_choice((*names, "or my_module.MyData"), data=self.data)
            self.data = DATA[self.data]


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Names and values of options; --max-steps is --max_steps, and init_args can be left out."""
    remaining_words = iter(words)
    for word in remaining_words:
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_").replace(".init_args.", ".")
        name = {"h": "help", "c": "config"}.get(name, name)
        if not word.startswith("-"):
            raise ValueError(f"unrecognized arguments: {word}")
        if name not in ("help", "print_config"):
            value = value if equals else next(remaining_words, "")
            if not value or (value.startswith("--") and not equals):
                raise ValueError(f"--{name} needs a value")
        yield name, value


def path_of(model: str) -> str:
    """The path of the class of a model as it is now: that of PPO differs in earlier records."""
    if model in MODELS:
        return MODELS[model].path
    return model.replace("catnat.cli.rl.", "catnat.sb3.recipes.")


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
    head_folder = head or "*"
    path = newest(home, f"{head_folder}/version_*/checkpoints/{wanted}.ckpt")
    if path is None:
        raise ValueError(f"there is no {wanted}.ckpt in any run under {home / head_folder}")
    return path


def newest(folder: Path, pattern: str) -> Path | None:
    """The newest of the files in a folder whose paths match a pattern."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns, default=None)


def read_options(path: str | Path) -> Options:
    """The options in a file, by full name."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster in C
    try:
        config = yaml.load(Path(path).read_text(), loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    groups = ("model", "trainer", "fisher", "checkpoint")
    if not isinstance(config, dict) or any(
        not isinstance(config.get(group, {}), dict) for group in groups
    ):
        raise ValueError(f"--config {path} should read like what --print_config prints")
    return flat(config)


def flat(options: Options, prefix: str = "") -> Options:
    """Options by their full names.

    >>> flat({"model": {"class_path": "my.VAE", "init_args": {"head": "natural"}}})
    {'model.class_path': 'my.VAE', 'model.head': 'natural'}
    """
    flat_options: Options = {}
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


def load(path: str, option: str) -> Any:
    """The class behind a path such as my_module.MyVAE, also in the working directory.

    Args:
        path: of the class.
        option: that asks for it, for the message where there is none.
    """
    module_name, _, name = path.rpartition(".")
    module = import_module(module_name, f"{option} {path}")
    loaded = getattr(module, name, None)
    if not isinstance(loaded, type):
        close = did_you_mean(name, vars(module))
        raise ValueError(f"{option} {path}: {module_name} has no class {name}{close}")
    return loaded


def import_module(name: str, option: str = "--import") -> Any:
    """Import a module, which may lie in the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{option}: {error}") from error
