"""Rows of the studies, by csv alone, without code of the project."""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

from scipy import stats

HERE = Path(__file__).parent
HEADS = ("softmax", "sigmoid", "natural")


def rows(study, **wanted):
    """Finished rows of a study with these values; a value of None means an empty field."""
    with open(HERE / study / "runs.csv", newline="") as file:
        for row in csv.DictReader(file):
            found = {name: row.get(name) or None for name in wanted}
            if row["status"] == "finished" and found == wanted:
                yield row


def cells(chosen, names, metric):
    """Values of a metric by the values of some columns, one for each seed."""
    groups = defaultdict(dict)
    for row in chosen:
        if row[metric]:
            groups[tuple(row[name] for name in names)][row["seed"]] = float(row[metric])
    return {key: list(by_seed.values()) for key, by_seed in groups.items()}


def mean(values):
    """Arithmetic mean."""
    return statistics.fmean(values)


def p_value(first, second):
    """Of Welch's test."""
    return stats.ttest_ind(first, second, equal_var=False).pvalue
