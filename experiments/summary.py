"""From the runs of a table to its rows: mean and spread over seeds, tests, the paper's numbers."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from experiments import runs, stages
from experiments.plan import HERE, Experiment, Options, Run

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Entry:
    """One metric of one cell.

    Attributes:
        values: of the seeds that finished.
        p_value: of Welch's t-test against the best of the group; None where it says nothing.
        bold: the best of its group, or not significantly worse.
        paper: the paper's row, with mean and perhaps std and bold; empty if it has none.
    """

    values: list[float]
    p_value: float | None
    bold: bool
    paper: dict[str, Any]

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
    groups: dict[str, list[int]] = {}
    for index, cell in enumerate(cells):
        rest = {option: value for option, value in cell.items() if option != "head"}
        groups.setdefault(json.dumps(rest), []).append(index)
    entries: list[dict[str, Entry]] = [{} for _ in cells]
    for metric, described in experiment.metrics.items():
        for group in groups.values():
            tested = compared([values[i][metric] for i in group], described.get("better"))
            for i, (p_value, bold) in zip(group, tested, strict=True):
                theirs = paper_entry(experiment, cells[i], metric)
                entries[i][metric] = Entry(values[i][metric], p_value, bold, theirs)
    top = (experiment.search or {}).get("top", 1) if stages.searched(experiment) else 1
    return [
        Row(
            cell,
            stages.selected(experiment, cell),
            each,
            len(each) or top * len(experiment.seeds),
            entry,
            _notes(experiment, cell, each),
        )
        for cell, each, entry in zip(cells, made, entries, strict=True)
    ]


def compared(samples: list[list[float]], better: str | None) -> list[tuple[float | None, bool]]:
    """Welch's test of each sample against the one with the best mean: (p-value, bold).

    Bold is the best, and what is not significantly different from it. Where there is nothing to
    test with, a single value for instance, only the best is; where no direction is better, none.
    """
    sign = -1 if better == "higher" else 1
    means = [sign * statistics.fmean(each) if each else math.nan for each in samples]
    known = [i for i, mean in enumerate(means) if math.isfinite(mean)]
    if not known or better is None:
        return [(None, False)] * len(samples)
    best = min(known, key=lambda i: means[i])
    result: list[tuple[float | None, bool]] = []
    for i, sample in enumerate(samples):
        p_value = welch(sample, samples[best]) if i in known and i != best else None
        same = p_value is not None and p_value >= SIGNIFICANT
        result.append((p_value, i == best or same or (i in known and means[i] == means[best])))
    return result


def welch(a: list[float], b: list[float]) -> float | None:
    """Two-sided p-value of equal means, variances apart; None where a sample is too small."""
    if min(len(a), len(b)) < 2:
        return None
    if statistics.pvariance(a) == statistics.pvariance(b) == 0:  # scipy: NaN
        return 1.0 if a[0] == b[0] else 0.0
    from scipy.stats import ttest_ind

    return float(ttest_ind(a, b, equal_var=False).pvalue)


def deviation(values: list[float]) -> float:
    """Sample standard deviation, NaN for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def paper_entry(experiment: Experiment, cell: Options, metric: str) -> dict[str, Any]:
    """The paper's mean, std and bold of a cell; empty where it has none."""
    key = experiment.metrics[metric].get("paper")
    if key is None or not experiment.paper:
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
    wanted = {"head": cell.get("head")}
    for option, name in experiment.paper["keys"].items():
        value = cell[option]
        if isinstance(name, dict):
            name, value = name["name"], name["values"].get(value, value)
        wanted[name] = value
    table = json.loads((HERE / "paper.json").read_text())[experiment.paper["table"]]
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
    if lost:
        notes.append(f"{lost} of {len(searched)} failed in the search")
    option = str((experiment.search or {}).get("option", ""))
    tried = [run.settings[option] for run in searched if option]
    if len(set(tried)) > 2 and made and made[0].settings[option] in (min(tried), max(tried)):
        notes.append(f"{experiment.short(option)} at the edge of the search")
    return notes
