"""The program behind ``python train.py`` and the command ``catnat``."""

from __future__ import annotations

import sys
import time

from catnat.training.errors import (
    RunFailed,
    UsageError,
    command_words,
    is_disk_error,
    quiet_about_disks,
    silence,
)
from catnat.training.help_pages import help_page
from catnat.training.names import GROUPS, Names, check_choice, read_names


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns 0, 1 (could not finish), 2 (wrong usage) or 128 + signal."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv:
            return show_help(Names(), [])
        if argv[0] == "report":
            from catnat.training.html_report import report_command

            return report_command(argv[1:])
        names, options = read_names(argv)
        return show_help(names, options) if names.help else run(names, options)
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


def show_help(names: Names, words: list[str]) -> int:
    """Print the page of a model, or the options of one group, which the first word names."""
    topics = [word for word in words if not word.startswith("-")]
    if not topics:
        print(help_page(names.model), end="")
        return 0
    check_choice("help topic", topics[0], GROUPS)
    silence()
    from catnat.training.command import load_program
    from catnat.training.options import group_help

    print(group_help(load_program(names).build_parser([]), topics[0]))
    return 0


def run(names: Names, options: list[str]) -> int:
    """Train or test what the command line names."""
    began = time.monotonic()
    silence()
    from catnat.training import command
    from catnat.training.folders import closing_runs

    with closing_runs(), quiet_about_disks():
        return command.run(names, options, began)
