"""The program behind ``python train.py`` and the command ``catnat``."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from catnat import __version__
from catnat.cli.errors import is_mistake, one_line, own_error
from catnat.cli.options import DATA, MODELS, RL_MODELS, command_words, load, read_names
from catnat.sweeps import run_command

COMMANDS = ("sweep", "status", "tables", "figures", "compare")
_PAGE = """\
usage: {command} [fit|validate|test|predict] --model MODEL --head HEAD ...

Trains a model and tests it (fit, the default), or only evaluates a checkpoint.
It is a LightningCLI: what you know of one works here.

  --model MODEL        {models}; or my_module.MyModel
  --head HEAD          softmax, sparsemax, sigmoid, natural; or your own
  --data DATA          {data};
                       or my_module.MyData
  --max_steps N        how long; or --max_epochs N, --max_time DD:HH:MM:SS, which
                       ppo and a2c do not have
  --seed N             of weights and noise
  --ckpt_path PATH     resume or test a checkpoint: a file, last or best
  --save_every N       steps between checkpoints
  --config FILE        options from a YAML file, as --print_config prints one
  --import MODULE      import it first: heads it defines can be chosen

Full names are --model.X, --data.X, --trainer.X, --fisher.X, --checkpoint.X; the
first three groups can be left out. Options of a model and of its data or games:
{command} --model vae --help; all with their values: --print_config
Runs lie in runs/<model>/<head>/version_<k>: tensorboard --logdir runs"""


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns 0, 1 (could not finish), 2 (wrong usage) or 128 + signal."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return run_command(argv[0], argv[1:])
    try:
        _main(argv)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # a reader has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not is_mistake(error):
            raise own_error(error) from None
        return _say(one_line(error), 1 if isinstance(error, OSError) else 2)
    return 0


def _main(argv: list[str]) -> None:
    if "--version" in argv:
        print(f"catnat {__version__}")
        return
    words = [word for word in argv if word not in ("-h", "--help")]
    helps = len(words) < len(argv) or not argv
    if helps:
        print(_PAGE.format(command=command_words(), models=", ".join(MODELS), data=", ".join(DATA)))
        if not any(word.startswith("--model") for word in words):
            return
    names = read_names(words)
    if helps:
        if names.model in RL_MODELS:
            kind = load(names.path)
            for games, usual in (("Atari games", kind.atari), ("other games", kind.not_atari)):
                if listed := ", ".join(f"{name} {value}" for name, value in usual.items()):
                    print(f"\nDefaults for {games}, in place of those below: {listed}")
            print("Evaluations sample actions in Atari games, elsewhere they take the likeliest.")
        with contextlib.suppress(SystemExit):  # where a page of help ends
            others = "--help" if names.model in RL_MODELS else "--data.help"
            command_line(names.model)([*words, others])
        words.append(f"--model.help={names.path}")
    elif os.environ.get("LOCAL_RANK", "0") == "0" and not any(
        word.startswith("--print_config") or ".help" in word for word in words
    ):
        head = f" with {names.head}" if names.head else ""
        print(f"{names.command} {names.model}{head}: loading PyTorch ...", flush=True)
    command_line(names.model)(words)


def command_line(model: str) -> Any:
    """The class that does what a command line asks for, given the name of the model."""
    if model in RL_MODELS:
        from catnat.cli.rl import RLCLI

        return RLCLI
    from catnat.cli.lightning import CatnatCLI

    return CatnatCLI


def _say(message: object, code: int) -> int:
    """Print one line about what went wrong, and return the exit code."""
    print(f"catnat: {message}", file=sys.stderr)
    return code
