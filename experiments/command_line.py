"""Command lines that answer bad input with one line and exit status 2."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from experiments import plan
from experiments.plan import Experiment


class Parser(argparse.ArgumentParser):
    """Answers bad input with one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message alone, without the usage, and leave with status 2."""
        self.exit(2, f"{self.prog}: {' '.join(str(message).split())}\n")

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """A ``ValueError`` raised in here is the user's to mend, and so is a file in the way."""
        try:
            yield
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self.error(f"{where}{error.strerror or error}")
        except ValueError as error:
            self.error(str(error))


def add_table_options(parser: argparse.ArgumentParser, scale: str) -> None:
    """The options by which tables are found, and which scale is the default."""
    text = f"{', '.join(plan.SCALES)}, or one of the plan's own (default: {scale})"
    parser.add_argument("--scale", help=text)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder (default runs)")
    text = "part of the table: options of its grid, and seed for final runs (searches are whole)"
    pairs = "KEY=VALUE[,VALUE]"
    parser.add_argument("--only", nargs="+", action="extend", type=_pair, default=[],
                        metavar=pairs, help=text)  # fmt: skip


def _pair(word: str) -> str:
    """A word of --only, which takes all words up to the next option."""
    if "=" not in word:
        text = f"{word}: expected key=value; names of tables come before --only"
        raise argparse.ArgumentTypeError(text)
    return word


def wanted(tables: list[str]) -> list[str]:
    """The tables that were asked for; all stands for those of the paper."""
    if "all" in tables and len(tables) > 1:
        raise ValueError("all: is no table beside others")
    return plan.names() if tables == ["all"] else list(dict.fromkeys(tables))


def load(
    name: str, args: argparse.Namespace, scale: str | None = None, extra: tuple[str, ...] = ()
) -> Experiment:
    """A table, or the part of it that was asked for."""
    scale = scale or args.scale
    whole = plan.load(name, scale, args.runs)
    short = {each: option for option, each in whole.names.items()}
    only: dict[str, list[str]] = {}
    for word in args.only:
        key, _, values = word.partition("=")
        only.setdefault(short.get(key, key), []).extend(values.split(","))
    return plan.load(name, scale, args.runs, only=only, extra=extra)
