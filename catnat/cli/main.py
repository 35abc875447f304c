"""The program behind ``python train.py`` and the command ``catnat``."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from catnat import __version__
from catnat.cli.errors import UsageError
from catnat.cli.options import (
    DATA,
    HEADS,
    MODELS,
    RL_MODELS,
    CommandLine,
    command_words,
)

# Messages of Lightning that a user of this program can do nothing about.
_UNHELPFUL = re.compile(
    r"[GT]PU available|💡 Tip|Seed set to|`Trainer.fit` stopped|`Trainer\(limit|LOCAL_RANK"
    r"|`weights_only` was not set|Restor|Loaded model weights|You are using a CUDA device"
)
_UNHELPFUL_WARNINGS = (
    r".*(does not have many workers|is smaller than the logging interval|exists and is not empty"
    r"|LeafSpec|all_gather is deprecated|is not in the possible render_modes"
    r"|The render mode is None|GPU available but not used"  # after --accelerator cpu
    r"|torch.jit.script. is deprecated)"  # in torch-geometric
)
COMMANDS = ("sweep", "status", "tables", "figures", "compare")
_PAGE = f"""\
usage: {command_words()} [fit|validate|test|predict] --model MODEL --head HEAD ...

Trains a model and tests it (fit, the default), or only evaluates a checkpoint.
It is a LightningCLI: what you know of one works here.

  --model MODEL        {", ".join(MODELS)}; or my_module.MyModel
  --head HEAD          {", ".join(HEADS)}; or your own
  --data DATA          {", ".join(DATA)};
                       or my_module.MyData
  --max_steps N        how long; or --max_epochs N, --max_time DD:HH:MM:SS, which
                       ppo and a2c do not have
  --seed N             random seed of weights and noise
  --ckpt_path PATH     resume or test a checkpoint: a file, last or best
  --save_every N       steps between checkpoints
  --config FILE        options from a YAML file, as --print_config prints one
  --import MODULE      import it first: heads it defines can be chosen

Full names are --model.X, --data.X, --trainer.X, --fisher.X, --checkpoint.X; the
first three groups can be left out. Options of a model and of its data or games:
{command_words()} --model vae --help; all with their values: --print_config
Runs lie in runs/<model>/<head>/version_<k>: tensorboard --logdir runs"""


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns 0, 1 (could not finish), 2 (wrong usage) or 128 + signal."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if words and words[0] in COMMANDS:
            with _usage_errors("sweep"):
                return import_module(f"catnat.sweeps.{words[0]}").main(words[1:])
        if "--version" in words:
            print(f"catnat {__version__}")
        elif not words or words in (["-h"], ["--help"]):
            print(_PAGE)
        else:
            command_line(words)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # a reader has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UsageError as error:
        return _say(error, error.code)
    return 0


def command_line(words: list[str], until: str = "end") -> Any:
    """What a command line describes.

    Args:
        words: of the command line.
        until: "options": parse them. "objects": build model, data and trainer, too. "end": do what
            the command line says.

    Raises:
        UsageError: a ValueError of one line.
    """
    with _usage_errors("train"):
        line = CommandLine(words)
        if until == "end":
            _announce(line)
        if line.model in RL_MODELS:
            cli = import_module("catnat.cli.rl").RLCLI
        else:
            cli = import_module("catnat.cli.lightning").CatnatCLI
    _silence()
    return cli(line, until)


@contextmanager
def _usage_errors(extra: str) -> Iterator[None]:
    """Raise what is wrong as a UsageError; a missing package comes with an extra of ours."""
    try:
        yield
    except (BrokenPipeError, UsageError):
        raise
    except ModuleNotFoundError as error:
        message = f'{error.name} is missing: pip install "catnat[{extra}]"'
        raise UsageError(ImportError(message)) from error
    except (OSError, ValueError) as error:
        raise UsageError(error) from error


def _announce(line: CommandLine) -> None:
    """Say what will be done, before imports take seconds."""
    typed_options = dict(line.options)
    is_first_rank = os.environ.get("LOCAL_RANK", "0") == "0"
    if "help" in typed_options:
        print(_PAGE)
    elif is_first_rank and "print_config" not in typed_options:
        head = f" with {line.head}" if line.head else ""
        print(f"{line.command} {line.model}{head}: loading PyTorch ...", flush=True)


def _say(message: object, code: int) -> int:
    """Print one line about what went wrong, and return the exit code."""
    print(f"catnat: {message}", file=sys.stderr)
    return code


def _silence() -> None:
    """Turn off messages and warnings that users can do nothing about; others stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda record: not _UNHELPFUL.match(record.getMessage()))
    warnings.filterwarnings("ignore", _UNHELPFUL_WARNINGS)
