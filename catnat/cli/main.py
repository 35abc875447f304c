"""The program behind ``python train.py`` and the command ``catnat``."""

from __future__ import annotations

import argparse
import errno
import os
import sys

from catnat import __version__
from catnat.cli.errors import RunFailed, UsageError, is_mistake, one_line
from catnat.cli.help import help_page
from catnat.cli.names import Names, command_words, read_names

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES,
         errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns 0, 1 (could not finish), 2 (wrong usage) or 128 + signal."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _main(argv)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # a reader has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, argparse.ArgumentError) as error:
        return _say(one_line(error), 2)
    except RunFailed as error:
        return _say(error, 1)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        return _say(f"{error} (checkpoints written before are intact)", 1)


def _main(argv: list[str]) -> int:
    if "--version" in argv:
        print(f"catnat {__version__}")
        return 0
    if not argv or {"-h", "--help"} & set(argv):
        print(help_page(argv), flush=True)
        return 0
    names = read_names(argv)
    if not any(word.startswith("--print_config") or ".help" in word for word in argv):
        head = f" with {names.head}" if names.head else ""
        print(f"{names.command} {names.model}{head}: loading PyTorch ...", flush=True)
    return run(names, argv)


def run(names: Names, argv: list[str]) -> int:
    """Train or test what the command line names."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from catnat.callbacks.checkpoints import Stopped

    try:
        if names.is_rl:
            from catnat.cli.rl import RLCLI

            RLCLI(argv)
        else:
            from catnat.cli.lightning import CatnatCLI

            CatnatCLI(argv)
    except Stopped as stop:
        print(f"{stop}; resume with: {command_words()} --ckpt_path {stop.path}", flush=True)
        return 128 + stop.signum
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        if not is_mistake(error):
            raise
        raise UsageError(error) from error
    return 0


def _say(message: object, code: int) -> int:
    """Print one line about what went wrong, and return the exit code."""
    print(f"catnat: {message}", file=sys.stderr)
    return code
