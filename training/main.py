"""The program behind ``python train.py`` and the command ``catnat``."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time

from catnat.training.errors import (
    RunFailed,
    UsageError,
    command_words,
    is_disk_error,
    quiet_about_disks,
    show_page,
    silence,
)
from catnat.training.help_pages import help_page
from catnat.training.names import GROUPS, Names, check_choice, read_names
from catnat.training.startup import first_imports


def program() -> int:
    """Run the words of the command line in a process of its own, which ends at once afterwards.

    Python would take more than a second to free one by one what torch and others have in memory.
    So one of the functions that Python calls at its end ends the process. Python calls them in
    reverse order, after all threads have ended: those that were registered while the program ran
    are called before.
    """
    codes: list[int] = []
    atexit.register(_end, codes)
    codes.append(main())
    return codes[0]


def _end(codes: list[int]) -> None:
    """End the process with this exit code; without one a bug ended the program, as Python does."""
    if codes:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a reader has gone, or it is closed
                stream.flush()
        os._exit(codes[0])


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns 0, 1 (could not finish), 2 (wrong usage) or 128 + signal."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv:
            return show_help(Names(help=""))
        if argv[0] == "report":
            from catnat.training.html_report import report_command

            return report_command(argv[1:])
        names, options = read_names(argv)
        return run(names, options) if names.help is None else show_help(names)
    except UsageError as error:
        return _say(error, 2)
    except RunFailed as error:
        return _say(error, 1)
    except OSError as error:
        if not is_disk_error(error):
            raise
        return _say(f"{error} (checkpoints written before are intact)", 1)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and isinstance(stop.code, int | None):
            return stop.code or 0  # 0: --trainer.logger.help CSVLogger; others: the user's own
        return _say("interrupted", 130)


def _say(message: object, code: int) -> int:
    """Print one line about what went wrong, and return the exit code."""
    print(f"{command_words()[-1]}: {message}", file=sys.stderr)
    return code


def show_help(names: Names) -> int:
    """Print the page of a model, or the options of one group."""
    if not names.help:
        return show_page(help_page(names.model))
    check_choice("help topic", names.help, GROUPS)
    silence()
    from catnat.training.command import load_program
    from catnat.training.options import group_help

    return show_page(group_help(load_program(names).build_parser([]), names.help) + "\n")


def run(names: Names, options: list[str]) -> int:
    """Train or test what the command line names."""
    began = time.monotonic()
    with first_imports(names, options):
        silence()
        from catnat.training import command
        from catnat.training.folders import closing_runs

    with closing_runs(), quiet_about_disks():
        return command.run(names, options, began)
