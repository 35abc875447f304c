"""Names and files of a command line, read before PyTorch is imported."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catnat.checks import require_choice
from catnat.cli.names import ALIASES, COMMANDS, DATA, DATA_OF, HEADS, MODELS, RL_MODELS, Options

RECIPES = Path(__file__).parents[1] / "recipes"


@dataclass
class Request:
    """A command line, read as far as names and files go.

    Attributes:
        command: "fit", "validate", "test" or "predict".
        model: a built-in name, or a class.
        head: name of the head; None for the model's default.
        data: import path of a data module; None for the recipe's.
        root: the folder of all runs.
        recipe: "default" or "paper".
        imports: modules to import first.
        configs: YAML files of options, in the order given.
        in_configs: options in these files, by full name.
        ckpt_path: the checkpoint to resume or to evaluate.
        record: options of the run that the checkpoint belongs to, by full name.
        actions: "help", "model.help" and "print_config", where the command line has them.
        words: all other words of the command line.
    """

    command: str
    model: str
    head: str | None
    data: str | None
    root: str
    recipe: str
    imports: list[str]
    configs: list[str]
    in_configs: Options
    ckpt_path: Path | None
    record: Options
    actions: list[str]
    words: list[str]

    @property
    def model_path(self) -> str:
        """Import path or name of the model's class."""
        return MODELS.get(self.model, self.model)

    @property
    def record_path(self) -> Path | None:
        """The file of the options of the run that the checkpoint belongs to."""
        return _record_of(self.ckpt_path) if self.ckpt_path and self.record else None

    def home(self, head: str | None) -> Path:
        """The folder of all runs of the model with a head."""
        return Path(self.root, self.model, head or "no_head")


def read_request(words: list[str]) -> Request:
    """Read a command line.

    Raises:
        ValueError: a name or a file is wrong.
    """
    command = "fit"
    if words and not words[0].startswith("-"):
        command, *words = words
    require_choice(COMMANDS, command=command)
    typed, other_words = _parser().parse_known_args([_with_underscores(word) for word in words])
    in_configs: Options = {}
    for path in typed.config:
        in_configs |= read_options(path)
    root = typed.root or in_configs.get("trainer.default_root_dir") or "runs"
    model = _model_name(typed.model or in_configs.get("model.class_path") or "vae")
    head = typed.head or in_configs.get("model.head")
    ckpt_path = None
    record: Options = {}
    if wanted := typed.ckpt_path or in_configs.get("ckpt_path"):
        ckpt_path = find_checkpoint(Path(root, model), ALIASES.get(str(head), head), str(wanted))
        if ckpt_path.parent.name == "checkpoints" and _record_of(ckpt_path).is_file():
            record = read_options(_record_of(ckpt_path))
            if not typed.model and "model.class_path" not in in_configs:
                model = _model_name(record.get("model.class_path") or model)
            head = head or record.get("model.head")
    imports = (record | in_configs).get("import") or []
    imports = [imports] if isinstance(imports, str) else imports
    request = Request(
        command=command,
        model=model,
        head=ALIASES.get(str(head), head),
        data=typed.data,
        root=root,
        recipe=typed.recipe,
        imports=[*typed.imports, *imports],
        configs=typed.config,
        in_configs=in_configs,
        ckpt_path=ckpt_path,
        record=record,
        actions=typed.actions,
        words=other_words,
    )
    _check_names(request)
    return request


def _parser() -> argparse.ArgumentParser:
    """The parser of the options that say which classes and files a run has."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=None
    )
    parser.add_argument("--model", "--model.class_path")
    parser.add_argument("--head", "--model.head", "--model.init_args.head")
    parser.add_argument("--data", "--data.class_path")
    parser.add_argument("--default_root_dir", "--trainer.default_root_dir", dest="root")
    parser.add_argument("--recipe", choices=("default", "paper"), default="default")
    parser.add_argument("--import", action="append", default=[], dest="imports")
    parser.add_argument("--config", "-c", action="append", default=[])
    parser.add_argument("--ckpt_path")
    for action in ("help", "model.help", "print_config"):
        names = ("--help", "-h") if action == "help" else (f"--{action}",)
        parser.add_argument(*names, action="append_const", const=action, dest="actions", default=[])
    return parser


def _record_of(ckpt_path: Path) -> Path:
    return ckpt_path.parent.parent / "config.yaml"


def split_seeds(words: list[str]) -> tuple[list[str], list[int]]:
    """The words without --seeds, and its seeds.

    >>> split_seeds(["--model", "vae", "--seeds", "1..3"])
    (['--model', 'vae'], [1, 2, 3])
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--seeds", type=_seeds, default=[])
    typed, other_words = parser.parse_known_args(words)
    return other_words, typed.seeds


def _seeds(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    try:
        seeds = list(range(int(first), int(last) + 1)) if dots else list(map(int, text.split(",")))
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise argparse.ArgumentTypeError(f"--seeds {text} should read like 1..10 or 1,2,5")
    return seeds


def recipe_file(model: str, recipe: str) -> str:
    """The file of a recipe of a built-in model."""
    path = RECIPES / ("" if recipe == "default" else recipe) / f"{model}.yaml"
    if not path.is_file():
        raise ValueError(f"--recipe {recipe}: {model} has none")
    return str(path)


def _with_underscores(word: str) -> str:
    """The word, with underscores in the name of an option."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word


def _model_name(model: Any) -> str:
    """The built-in name of a model's class, or the class itself."""
    names = {path: name for name, path in MODELS.items()}
    return names.get(str(model), str(model))


def _check_names(request: Request) -> None:
    """Check the names of model, head and data; heads that modules define are not known yet."""
    if request.model.islower() and "." not in request.model:
        require_choice((*MODELS, "or my_module.MyModel"), model=request.model)
    may_define_heads = request.imports or request.model not in MODELS or "torch" in sys.modules
    if request.head and not may_define_heads:
        require_choice((*HEADS, *ALIASES), head=request.head)
    if request.model in RL_MODELS:
        require_choice(("fit", "test"), command=request.command)
        if request.data:
            raise ValueError(
                f"--data {request.data}: {request.model} learns from an environment; see --env"
            )
    if request.data and request.data.islower() and "." not in request.data:
        names = DATA_OF.get(request.model, tuple(DATA))
        require_choice((*names, "or my_module.MyData"), data=request.data)
        request.data = DATA[request.data]


def find_checkpoint(home: Path, head: str | None, wanted: str) -> Path:
    """The path of a checkpoint.

    Args:
        home: the folder of all runs of a model.
        head: name of the head; None for any.
        wanted: a file; or "last" or "best", the newest checkpoint of that name.
    """
    if wanted not in ("last", "best"):
        if not Path(wanted).is_file():
            raise ValueError(f"there is no checkpoint {wanted!r}; give a file, last or best")
        return Path(wanted)
    found = newest(home, f"{head or '*'}/version_*/checkpoints/{wanted}.ckpt")
    if not found:
        raise ValueError(f"there is no {wanted}.ckpt in any run under {home / (head or '*')}")
    return found


def newest(folder: Path, pattern: str) -> Path | None:
    """The newest of the files in a folder whose paths match a pattern."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns, default=None)


def read_options(path: str | Path) -> Options:
    """The options in a YAML file, by full name."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster in C
    try:
        config = yaml.load(Path(path).read_text(), loader)
        options = flat(config) if isinstance(config, dict) else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(config, dict) or not all(
        isinstance(config.get(group, {}), dict) for group in ("model", "trainer")
    ):
        raise ValueError(f"--config {path} should read like what --print_config prints")
    return options


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
