"""Options of the commands about plans and runs."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path


def make_parser(command: str, doc: str | None) -> ArgumentParser:
    """A parser for ``catnat <command>``, with the option that takes a part of the runs."""
    parser = ArgumentParser(
        f"catnat {command}",
        description=doc,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE[,VALUE]",
        help="only runs with these values of options, or with seed=1,2",
    )
    return parser


def plan_parser(command: str, doc: str | None) -> ArgumentParser:
    """A parser with the options of all commands about plans."""
    parser = make_parser(command, doc)
    add = parser.add_argument
    add("plans", nargs="+", metavar="PLAN", help="a YAML file")
    add("--scale", help="scale of the plan (default: small, or the first scale)")
    add("--results", type=Path, help="folder of the rows (default: that of the plan, or results)")
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    return parser


def read_pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Words such as NAME=VALUE of an option."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in pairs:
            raise ValueError(f"{option} {word}: expected name=value, and a name once")
        pairs[name] = value
    return pairs
