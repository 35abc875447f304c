"""The program behind ``python train.py`` and the command ``catnat``."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from catnat import __version__
from catnat.checks import did_you_mean
from catnat.cli.errors import UsageError
from catnat.cli.names import (
    COMMANDS,
    DATA,
    HEADS,
    MODELS,
    RL_MODELS,
    TOOLS,
    Options,
    program_name,
)
from catnat.cli.request import Request, read_request, split_seeds

# Beginnings of messages of Lightning that a user of this program can do nothing about.
_UNHELPFUL = (
    *("GPU available", "TPU available", "💡 Tip", "Seed set to", "`Trainer.fit` stopped"),
    *("`Trainer(limit", "LOCAL_RANK", "`weights_only` was not set", "Restor", "Loaded model"),
    "You are using a CUDA device",
)
_UNHELPFUL_WARNINGS = (
    r".*(does not have many workers|is smaller than the logging interval|exists and is not empty"
    r"|steps are not replayed as CUDA graphs: the device is not a CUDA device"
    r"|LeafSpec|all_gather is deprecated|is not in the possible render_modes"
    r"|The render mode is None|GPU available but not used"  # after --accelerator cpu
    r"|torch.jit.script. is deprecated)"  # in torch-geometric
)
_PAGE = f"""\
usage: {program_name()} [fit|validate|test|predict] --model MODEL --head HEAD ...
       {program_name()} {"|".join(TOOLS)} --help

Trains a model and tests it (fit, the default), or only evaluates a checkpoint.
It is a LightningCLI and supports the options of one.

  --model MODEL        {", ".join(MODELS)} (default vae);
                       or a class such as my_module.MyModel
  --head HEAD          {", ".join(HEADS)}; or your own
  --data DATA          {", ".join(DATA)};
                       or my_module.MyData
  --max_steps N        length of the run (on a CPU, 2,000 steps by default);
                       or --max_epochs N, --max_time DD:HH:MM:SS (not ppo, a2c)
  --seed N             random seed of weights and noise
  --seeds 1..10        one run for each seed, and a table
  --ckpt_path PATH     resume or test a checkpoint: a file, last or best
  --save_every N       steps between checkpoints
  --recipe paper       the settings of the paper
  --config FILE        options from a YAML file, such as --print_config prints
  --import MODULE      module to import first, for example one that defines heads

Full names are --model.X, --data.X, --trainer.X, --fisher.X, --checkpoint.X. You can
omit the first three groups. This command explains the options of a model:
{program_name()} --model vae --help
--print_config prints all options with their values. Runs are saved in
runs/<model>/<head>/version_<k>. To see their curves: tensorboard --logdir runs

  sweep, status        train the runs of a plan; show how many have finished
  tables, figures      make tables and figures of a plan
  compare              compare any runs"""


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns 0, 1 (could not finish), 2 (wrong usage) or 128 + signal."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return run(words)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # the reader has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        return _say(error, error.code)


def run(words: list[str]) -> int:
    """Do what a command line asks for; returns the exit code.

    Raises:
        UsageError: an option, a file or a name is wrong.
    """
    if words and words[0] in TOOLS:
        with _usage_errors("sweep"):
            return _main_of(words[0])(words[1:])
    if "--version" in words:
        print(f"catnat {__version__}")
        return 0
    if not words or words in (["-h"], ["--help"]):
        print(_PAGE)
        return 0
    with _usage_errors("train"):
        other_words, seeds = split_seeds(words)
        if seeds:
            return _main_of("seeds")(other_words, seeds)
        request = _read(words)
        if "help" in request.actions:
            print(_PAGE)
        elif not request.actions and os.environ.get("LOCAL_RANK", "0") == "0":
            head = f" with {request.head}" if request.head else ""
            print(f"{request.command} {request.model}{head}: loading PyTorch ...", flush=True)
        ready = _run_of(request, "end")
    import_module("catnat.cli.run").execute(ready)
    return 0


def resolve(words: Sequence[str]) -> Options:
    """The options of a run by full name, defaults included; nothing is built.

    Raises:
        UsageError: an option, a file or a name is wrong.
    """
    with _usage_errors("train"):
        return _run_of(_read(words), "options").options


def build(words: Sequence[str]) -> Any:
    """The model, the data and the Trainer of a command line, as a run that has not started.

    Raises:
        UsageError: an option, a file or a name is wrong.
    """
    with _usage_errors("train"):
        return _run_of(_read(words), "objects")


def _main_of(command: str) -> Callable[..., int]:
    """The function behind a command for many runs, which is imported when it is called."""
    return import_module(f"catnat.sweeps.{command}").main


def _run_of(request: Request, until: str) -> Any:
    if request.model in RL_MODELS:
        run_type = import_module("catnat.cli.rl").SB3Run
    else:
        run_type = import_module("catnat.cli.lightning").LightningRun
    _silence()
    return run_type(request, until)


def _read(words: Sequence[str]) -> Request:
    """Read names and files; a wrong command gets the closest one."""
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        choices = (*COMMANDS, *TOOLS)
        close = did_you_mean(words[0], choices)
        raise ValueError(
            f"unknown command {words[0]!r}{close or ';'} choose from {', '.join(choices)}"
        )
    return read_request(list(words))


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
    except Exception as error:
        raise UsageError(error) from error


def _say(message: object, code: int) -> int:
    """Print one line about what went wrong, and return the exit code."""
    print(f"catnat: {message}", file=sys.stderr)
    return code


def _silence() -> None:
    """Turn off the messages and warnings that users can do nothing about."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda record: not record.getMessage().startswith(_UNHELPFUL))
    warnings.filterwarnings("ignore", _UNHELPFUL_WARNINGS)
