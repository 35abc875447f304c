"""Make run folders again from a published table, so that its sweep goes on where it ended.

    python experiments/restore.py vae_adam                   # from results/vae_adam_*.csv
    python experiments/sweep.py vae_adam --scale small       # does only what is missing there
    python experiments/tables.py vae_adam --scale small      # of both

A folder made again has the numbers of its run (metrics.json), with the digits that the table has,
or the record that the run was given up. It has no checkpoint, no log and no curves. Folders of runs
that have begun here stay as they are. ``all`` takes all tables that were published.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from experiments import plan, runs, stages, status
from experiments.command_line import Parser, wanted
from experiments.plan import Experiment, Run
from experiments.train_interface import ROOT

FILES = ("runs", "search", "all_rates")
STATES = ("finished", "failed", "stopped", "missing")
Key = frozenset[tuple[str, str]]


class Line(NamedTuple):
    """What a table says of a run: where, how it ended, and its numbers."""

    place: str
    state: str
    numbers: dict[str, float | None]


class Restored(NamedTuple):
    """How many runs were made again, how many had begun here, and the lines of no run."""

    made: int
    left: int
    foreign: list[Line]


def main(argv: list[str] | None = None) -> int:
    """Write the folders; 0, 1 if lines of a table belong to no run of its plan, or 2."""
    parser = Parser("restore.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "tables", nargs="+", metavar="TABLE", help=f"{', '.join(plan.names())}; all"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder (default runs)")
    text = "folder of the published tables (default: results)"
    parser.add_argument("--source", type=Path, default=ROOT / "results", help=text)
    args = parser.parse_args(argv)
    foreign = 0
    with parser.one_line_errors():
        names = wanted(args.tables)
        if args.tables == ["all"]:
            names = [name for name in names if (args.source / f"{name}_runs.csv").is_file()]
            if not names:
                raise ValueError(f"--source {args.source}: there is no published table")
        found = [load(name, args.runs, args.source) for name in names]
        for experiment, lines in found:
            result = restore(experiment, lines)
            note_commands(experiment, args.source)
            begun = (
                f"; {runs.counted(result.left)} that had begun here left alone"
                if result.left
                else ""
            )
            made = f"{runs.counted(result.made)} made again in {experiment.folder}{begun}"
            print(f"{experiment.name}, {experiment.scale}: {made}")
            for line in result.foreign[:1]:
                count = len(result.foreign)
                text = f"{count} of its lines belong to no run of the plan, such as {line.place}"
                print(f"{experiment.name}: {text}", file=sys.stderr)
            foreign += len(result.foreign)
    return min(1, foreign)


def load(name: str, folder: Path, source: Path) -> tuple[Experiment, dict[Key, Line]]:
    """A table at the scale it was published with, and its runs by settings and seed."""
    table = plan.load(name, None, folder).name
    experiment = plan.load(name, published_scale(table, source), folder)
    if stages.by_tpe(experiment):
        raise ValueError(f"{table}: a search by TPE cannot be made again from its table")
    needed = FILES[:2] if stages.searched(experiment) else FILES[:1]
    lines: dict[Key, Line] = {}
    for kind in FILES:
        path = source / f"{table}_{kind}.csv"
        if kind in needed and not path.is_file():
            raise ValueError(f"there is no {path}")
        if path.is_file():
            lines = dict(lines_of(path, _needed(experiment, kind))) | lines
    return experiment, lines


def restore(experiment: Experiment, lines: dict[Key, Line]) -> Restored:
    """Make the folders of a table."""
    known: dict[Key, Run] = {}
    made = left = 0
    while True:  # a stage of a cell is known when the one before is done
        new = {_key_of(experiment, run): run for run in _possible(experiment)}
        new = {key: run for key, run in new.items() if key not in known}
        if not new:
            break
        known |= new
        for key in new.keys() & lines.keys():
            if runs.done(new[key]):
                continue
            if runs.running(new[key]) or any(new[key].home.glob("version_*")):
                left += 1
            else:
                made += _write(new[key], lines[key])
    return Restored(made, left, [line for key, line in lines.items() if key not in known])


def lines_of(path: Path, needed: set[str]) -> Iterator[tuple[Key, Line]]:
    """The runs in a file of a published table; an error names the place of what is wrong."""
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    header = rows[0] if rows else []
    for column in ("seed", *sorted(needed)):
        if column not in header:
            raise ValueError(f"{path}: no column {column}; it has {', '.join(header) or 'none'}")
    first = header.index("seed") + 1  # numbers are behind the seed, settings before it
    for number, row in enumerate(rows[1:], 2):
        place = f"{path}, line {number}"
        if len(row) != len(header):
            raise ValueError(f"{place}: {len(header)} values expected, got {len(row)}")
        rest = dict(zip(header[first:], row[first:], strict=True))
        state = rest.pop("status", "finished")
        if state not in STATES:
            raise ValueError(f"{place}: unknown status {state!r}; choices: {', '.join(STATES)}")
        numbers = {name: _number(value, place) for name, value in rest.items() if value}
        if state == "finished" and not numbers:
            raise ValueError(f"{place}: finished, but without any number")
        yield _key(dict(zip(header[:first], row, strict=False))), Line(place, state, numbers)


def published_scale(name: str, source: Path) -> str:
    """The scale of a published table, which it says itself."""
    path = source / f"{name}.md"
    if not path.is_file():
        raise ValueError(f"{name} has no published runs: there is no {path}")
    found = re.search(r"^- Scale: `(\w+)`", path.read_text(), re.M)
    if found is None:
        raise ValueError(f"{path} does not say its scale, as tables.py writes it")
    return found[1]


def note_commands(experiment: Experiment, source: Path) -> None:
    """Keep the commands that made the published runs, for the next table of them."""
    text = (source / f"{experiment.name}.md").read_text()
    found = re.search("^- Made by: (.*)$", text, re.M)
    commands = re.findall("`([^`]+)`", found[1]) if found else []
    status.note_commands(experiment, [c for c in commands if "experiments/tables.py" not in c])


def _possible(experiment: Experiment) -> Iterator[Run]:
    """All runs that are known, and those of other settings that were searched."""
    yield from stages.known(experiment)
    for cell in experiment.cells():
        for trial in stages.searching(experiment, cell):
            for seed in experiment.seeds:
                yield experiment.run(cell, trial.settings, seed)


def _needed(experiment: Experiment, kind: str) -> set[str]:
    """The columns without which a file is not that of a table."""
    cell = next(iter(experiment.cells()), {})
    names = {experiment.short(option) for option in cell}
    if kind == "runs":
        names |= set(experiment.metrics)
    if kind == "search" and experiment.search is not None:
        names.add(experiment.search.metric)
    return names


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


def _number(value: str, place: str) -> float | None:
    """A number, None for NaN, as in metrics.json."""
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{place}: expected a number, got {value!r}") from None
    return None if math.isnan(number) else number


def _write(run: Run, line: Line) -> bool:
    """Write what a table says about a run; False if it says that there is none."""
    if line.state == "finished":
        runs.write_json(run.home / "version_0" / "metrics.json", line.numbers)
    elif line.state == "failed":
        runs.record_failure(run, 1, "given up, as its published table says")
    elif line.state == "stopped":
        runs.record_stop(run, "stopped early, as its published table says")
    return line.state != "missing"


if __name__ == "__main__":
    sys.exit(main())
