"""From the runs of a table to its rows: mean and spread over seeds, tests, the paper's numbers."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from experiments import runs, stages
from experiments.plan import Experiment, Run
from experiments.plan_rules import PAPER
from experiments.schema import Options
from experiments.significance import Comparison, Verdict, compare, deviation, verdicts


@dataclass(frozen=True)
class Entry:
    """One metric of one cell.

    Attributes:
        values: of the seeds that finished, where they are finite.
        comparison: with the best of the group.
        verdict: Holm's p-value, and whether the cell is bold.
        paper: the paper's row, with mean and perhaps std and bold; empty if it has none.
    """

    values: list[float]
    comparison: Comparison
    verdict: Verdict
    paper: dict[str, Any]

    @property
    def bold(self) -> bool:
        """The best of its group, or not to be told from it."""
        return self.verdict.bold

    @property
    def mean(self) -> float:
        """Over seeds; NaN without any."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Over seeds, with n - 1; NaN for fewer than two."""
        return deviation(self.values)

    @property
    def difference(self) -> float:
        """Ours minus the paper's."""
        return self.mean - float(self.paper.get("mean", math.nan))


@dataclass(frozen=True)
class Row:
    """One cell of the table: what was selected, the runs, and an entry for each metric."""

    cell: Options
    selected: list[Options]
    at_edge: bool
    runs: list[Run]
    planned: int
    entries: dict[str, Entry]
    notes: list[str]

    @property
    def finished(self) -> int:
        """How many runs have numbers."""
        return sum(runs.metrics(run) is not None for run in self.runs)


def rows(experiment: Experiment) -> list[Row]:
    """All cells, in the order of the grid; those without runs too."""
    cells = experiment.cells()
    made = [stages.final(experiment, cell) for cell in cells]
    values = [_values(experiment, each) for each in made]
    places = [(metric, i) for metric in experiment.metrics for i in range(len(cells))]
    compared: dict[tuple[str, int], Comparison] = {}
    for metric, described in experiment.metrics.items():
        for group in _groups(cells):
            found = compare([values[i][metric] for i in group], described.better)
            compared |= {(metric, i): each for i, each in zip(group, found, strict=True)}
    judged = dict(zip(places, verdicts([compared[place] for place in places]), strict=True))
    search = experiment.search
    top = search.top if search is not None and stages.searched(experiment) else 1
    return [
        Row(
            cell,
            stages.selected(experiment, cell),
            stages.at_edge(experiment, cell),
            made[i],
            len(made[i]) or top * len(experiment.final_seeds()),
            {
                metric: Entry(
                    [value for value in values[i][metric] if math.isfinite(value)],
                    compared[metric, i],
                    judged[metric, i],
                    paper_entry(experiment, cell, metric),
                )
                for metric in experiment.metrics
            },
            _notes(experiment, cell, made[i]),
        )
        for i, cell in enumerate(cells)
    ]


def _groups(cells: list[Options]) -> list[list[int]]:
    """Cells that differ in the head alone."""
    groups: dict[str, list[int]] = {}
    for index, cell in enumerate(cells):
        rest = {option: value for option, value in cell.items() if option != "head"}
        groups.setdefault(json.dumps(rest), []).append(index)
    return list(groups.values())


def paper_entry(experiment: Experiment, cell: Options, metric: str) -> dict[str, Any]:
    """The paper's mean, std and bold of a cell; empty where it has none."""
    key = experiment.metrics[metric].paper
    if key is None or experiment.paper is None:
        return {}
    key, minus, optimal = key.partition(" - ")
    ours = _paper_row(experiment, cell)
    entry: dict[str, Any] = (ours.get(key, {}) if key else ours) if ours else {}
    if not minus or not entry:
        return entry
    subtracted = _paper_row(experiment, cell | {"head": optimal})
    if not subtracted:
        return {}
    return {"mean": entry["mean"] - (subtracted[key] if key else subtracted)["mean"]}


def _paper_row(experiment: Experiment, cell: Options) -> dict[str, Any]:
    assert experiment.paper is not None
    wanted = {"head": cell.get("head")}
    for option, name in experiment.paper.keys.items():
        value = cell[option]
        if isinstance(name, dict):
            name, value = name["name"], name["values"].get(value, value)
        wanted[name] = value
    table = json.loads(PAPER.read_text())[experiment.paper.table]
    found = (row for row in table if all(row.get(k) == v for k, v in wanted.items()))
    return next(found, {})


def _values(experiment: Experiment, made: list[Run]) -> dict[str, list[float]]:
    found = [numbers for run in made if (numbers := runs.metrics(run)) is not None]
    return {
        metric: [float(each[metric]) for each in found if metric in each]
        for metric in experiment.metrics
    }


def _notes(experiment: Experiment, cell: Options, made: list[Run]) -> list[str]:
    """What should not be overlooked in a cell."""
    found = [numbers for run in made if (numbers := runs.metrics(run)) is not None]
    counts = {
        "failed": sum(runs.failure(run) is not None for run in made),
        "collapsed": sum(each.get("test/collapsed", 0) > 0 for each in found),
        "with dead edges": sum(each.get("test/dead_edges", 0) > 0 for each in found),
        "not finite": sum(not all(map(math.isfinite, each.values())) for each in found),
    }
    notes = [f"{count} {what}" for what, count in counts.items() if count]
    searched = stages.searching(experiment, cell)
    lost = sum(runs.failure(run) is not None for run in searched)
    early = sum(runs.stopped(run) is not None for run in searched)
    if lost:
        notes.append(f"{lost} of {len(searched)} failed in the search")
    if early:
        notes.append(f"{early} of {len(searched)} stopped early in the search")
    if stages.at_edge(experiment, cell):
        option = experiment.search.option if experiment.search else ""
        notes.append(f"{experiment.short(option)} at the edge of the search")
    return notes
