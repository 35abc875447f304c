"""Checks of a plan's options by the command line, before the first run."""

from pathlib import Path

from catnat.cli.names import Options
from catnat.sweeps.defaults import Rows, resolve
from catnat.sweeps.plan import Plan


def check(plan: Plan, rows: Rows, folder: Path) -> None:
    """Raise a ValueError for options of runs without a row that the command line does not take.

    Runs that differ only in numbers, or in heads without options, are checked once.

    Args:
        plan: the plan.
        rows: rows of runs that are done.
        folder: folder of the runs.
    """
    if plan.program:
        return
    checked: set[tuple[str, ...]] = set()
    for run in [*plan.examples(), *plan.runs(rows)]:
        kinds = _kinds(run.options)
        if not kinds <= checked and rows.get(run) is None:
            checked |= kinds
            resolve(run.arguments(folder))


def _kinds(options: Options) -> set[tuple[str, ...]]:
    """What to check in options: which are given together, types of numbers, other values."""
    from catnat.heads.registry import head_names  # imports PyTorch

    given = {name: value for name, value in options.items() if value is not None}
    has_head_options = any(name.startswith("head_options") for name in given)
    if given.get("head") in head_names() and not has_head_options:
        given["head"] = "a known one"
    kinds = {(str(given.get("head")), *sorted(given))}
    for name, value in given.items():
        is_number = isinstance(value, int | float)
        kinds.add((name, type(value).__name__ if is_number else str(value)))
    return kinds
