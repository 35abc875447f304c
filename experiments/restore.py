"""Make run folders again from a published table, so that its sweep goes on where it ended.

    python experiments/restore.py vae_adam --scale small     # from results/vae_adam_*.csv
    python experiments/sweep.py vae_adam --scale small       # does only what is missing there
    python experiments/tables.py vae_adam --scale small      # of both

A folder made again has the numbers of its run (metrics.json), with the digits that the table has,
or the record that the run was given up. It has no checkpoint, no log and no curves. A run that is
there already stays as it is. ``all`` takes all tables that were published.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from experiments import plan, runs, stages, status
from experiments.command_line import Parser, add_table_options, load, wanted
from experiments.plan import Experiment, Run
from experiments.train_interface import ROOT

FILES = ("runs", "search", "all_rates")
Key = frozenset[tuple[str, str]]


def main(argv: list[str] | None = None) -> int:
    """Write the folders; 0, or 1 if lines of a table belong to no run of its plan."""
    parser = Parser("restore.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "tables", nargs="+", metavar="TABLE", help=f"{', '.join(plan.names())}; all"
    )
    add_table_options(parser, "that of the published table")
    text = "folder of the published tables (default: results)"
    parser.add_argument("--source", type=Path, default=ROOT / "results", help=text)
    args = parser.parse_args(argv)
    foreign = 0
    with parser.one_line_errors():
        for name in wanted(args.tables):
            table = plan.load(name, args.scale, args.runs).name
            if args.tables == ["all"] and not lines_of(table, args.source):
                continue
            experiment = load(name, args, args.scale or published_scale(table, args.source))
            made, left = restore(experiment, args.source)
            print(f"{experiment.name}, {experiment.scale}: {made} in {experiment.folder}")
            if left and not args.only:
                foreign += left
                lines = f"{left} more in the published table"
                print(f"{experiment.name}: {lines}, which the plan does not have", file=sys.stderr)
    return min(1, foreign)


def restore(experiment: Experiment, source: Path) -> tuple[str, int]:
    """Make the folders of a table; how many runs, and how many lines belong to no run."""
    lines = lines_of(experiment.name, source)
    if not lines:
        raise ValueError(f"there is no {experiment.name}_runs.csv in {source}")
    known: dict[Key, Run] = {}
    made = 0
    while True:  # a stage of a cell is known when the one before is done
        new = {_key_of(experiment, run): run for run in stages.known(experiment)}
        new = {key: run for key, run in new.items() if key not in known}
        if not new:
            break
        known |= new
        for key in new.keys() & lines.keys():
            made += not runs.done(new[key]) and _write(new[key], lines[key])
    _note_commands(experiment, source)
    return runs.counted(made), len(lines.keys() - known.keys())


def lines_of(name: str, source: Path) -> dict[Key, dict[str, str]]:
    """The runs of a published table: what was recorded of each, by its settings and seed."""
    found: dict[Key, dict[str, str]] = {}
    for kind in FILES:
        path = source / f"{name}_{kind}.csv"
        for line in csv.DictReader(path.read_text().splitlines()) if path.is_file() else ():
            columns = list(line)
            named = {column: line[column] for column in columns[: columns.index("seed") + 1]}
            rest = {column: line[column] for column in columns[len(named) :] if line[column]}
            found.setdefault(_key(named), rest)
    return found


def published_scale(name: str, source: Path) -> str:
    """The scale of a published table, which it says itself."""
    path = source / f"{name}.md"
    found = re.search(r"^- Scale: `(\w+)`", path.read_text(), re.M) if path.is_file() else None
    if found is None:
        raise ValueError(f"there is no table {path} that says its scale")
    return found[1]


def _key_of(experiment: Experiment, run: Run) -> Key:
    named = run.cell | run.settings
    return _key({experiment.short(option): v for option, v in named.items()} | {"seed": run.seed})


def _key(named: Mapping[str, Any]) -> Key:
    """Names and values as text, with numbers as the folders of runs have them."""
    return frozenset((name, _text(value)) for name, value in named.items())


def _text(value: Any) -> str:
    if isinstance(value, bool):  # float() knows it, too
        return str(value)
    try:
        return f"{float(value):.6g}"
    except (TypeError, ValueError):
        return "" if value is None else str(value)


def _write(run: Run, line: dict[str, str]) -> bool:
    """Write what a table says about a run; False if it says nothing."""
    state = line.get("status", "finished")
    if state == "finished":
        numbers = {name: float(value) for name, value in line.items() if name != "status"}
        runs.write_json(run.home / "version_0" / "metrics.json", numbers)
    elif state == "failed":
        runs.record_failure(run, 1, "given up, as its published table says")
    elif state == "stopped":
        runs.record_stop(run, "stopped early, as its published table says")
    return state in ("finished", "failed", "stopped")


def _note_commands(experiment: Experiment, source: Path) -> None:
    """Keep the commands that made the published runs, for the next table of them."""
    path = source / f"{experiment.name}.md"
    found = re.search("^- Made by: (.*)$", path.read_text(), re.M) if path.is_file() else None
    commands = re.findall("`([^`]+)`", found[1]) if found else []
    status.note_commands(experiment, [c for c in commands if "experiments/tables.py" not in c])


if __name__ == "__main__":
    sys.exit(main())
