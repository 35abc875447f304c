"""Rows of runs, statistics of them, and the numbers that pages state.

Runs are tables with a row for each seed. A pair is the runs of softmax and those of another head.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

PAPER = Path(__file__).resolve().parent
PRINTED = json.loads((PAPER / "paper.json").read_text())  # the paper's own tables
DOCS = [*PAPER.parent.glob("docs/*.md"), *PAPER.parent.glob("docs/heads/*.md")]
PAGES = [PAPER.parent / "README.md", *PAPER.rglob("*.md"), *DOCS]
NUMBER = re.compile(r"-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?")
Runs = pd.DataFrame


# -- rows ------------------------------------------------------------------------------------------

ORIGIN = {"plans", "status", "engine", "device", "commit"}  # of a row; not options of its run
COLUMN = ["variant", "num_latents", "num_categories"]  # of the paper's tables of likelihoods
BOUNDS = ["mean", "low", "high"]


@cache
def read(path: str) -> Runs:
    """Finished runs by seed; the last row where a run was repeated.

    If a row is a validation (column step), its run gets columns METRIC_STEP.
    """
    rows = pd.read_csv(PAPER / path)
    if "status" in rows:
        rows = rows[rows["status"] == "finished"]
    options = [name for name in rows if "/" not in name and name != "step"]
    empty = [name for name in options if rows[name].isna().any()]
    rows[empty] = rows[empty].astype(object).fillna("")
    if "step" in rows:
        rows = rows.set_index([*options, "step"]).unstack()
        rows.columns = [f"{metric}_{step}" for metric, step in rows.columns]
        rows = rows.reset_index()
    if "seed" not in rows:
        return rows
    rows = rows.drop_duplicates([name for name in options if name not in ORIGIN], keep="last")
    return rows.set_index("seed")


def select(path: str, **options: Any) -> Runs:
    """The runs of which each option has the value, or one of a list; seeds are the index."""
    runs = read(path)
    chosen = np.full(len(runs), True)
    for name, value in options.items():
        chosen &= runs[name].isin(value if isinstance(value, list) else [value])
    return runs[chosen]


def pair(path: str, first: str = "softmax", second: str = "sigmoid", **options: Any) -> list[Runs]:
    """The runs of two heads, by data, size and seed."""
    runs = select(path, head=[first, second], **options).reset_index()
    runs = runs.set_index([name for name in (*COLUMN, "seed") if name in runs]).sort_index()
    two = [runs[runs["head"] == head] for head in (first, second)]
    if not all(half.index.is_unique for half in two):
        raise ValueError(f"{path} has several runs of a seed for {first} or {second}, {options}")
    return two


def best(search: Runs, runs: Runs, metric: str, cell: list[str], rates: list[str]) -> Runs:
    """The runs at the rates with which a search has the lowest mean of a metric, by cell."""
    chosen = search.groupby([*cell, *rates])[metric].mean().groupby(cell).idxmin()
    return runs[runs.set_index([*cell, *rates]).index.isin(chosen)]


# -- statistics ------------------------------------------------------------------------------------


def interval(numbers: ArrayLike) -> list[float]:
    """Mean and 95 % t interval."""
    return [np.mean(numbers), *stats.ttest_1samp(numbers, 0).confidence_interval()]


def factor(log_factors: ArrayLike) -> list[float]:
    """Geometric mean and 95 % t interval of factors, from their logarithms."""
    return [*np.exp(interval(log_factors))]


def welch(first: ArrayLike, second: ArrayLike) -> list[float]:
    """Difference of means, Welch's 95 % interval, and its p."""
    test = stats.ttest_ind(first, second, equal_var=False)
    return [np.mean(first) - np.mean(second), *test.confidence_interval(), test.pvalue]


def leads(
    runs: Runs, metric: str, head: str, rival: str = "softmax", by: Sequence[str] = COLUMN
) -> Runs:
    """How far the mean of a head is above that of a rival, by cell: n of the head, and Welch."""
    samples = runs.groupby([*by, "head"])[metric].agg(list).unstack()[[head, rival]].dropna()
    tests = [[len(values), *welch(values, rivals)] for values, rivals in samples.to_numpy()]
    return pd.DataFrame(tests, samples.index, ["n", "mean", "low", "high", "p"])


def differences(first: Runs, second: Runs, metric: str) -> pd.Series[float]:
    """A metric of the first runs minus that of the second, by seed."""
    return (first[metric] - second[metric]).dropna()


def curves(runs: Runs, metric: str = "val/loss") -> Runs:
    """A metric of each run by step."""
    columns = runs.filter(regex=rf"^{metric}_\d+$")
    return columns.rename(columns=lambda name: int(name.rpartition("_")[2])).sort_index(axis=1)


def log_step_of(losses: pd.Series[float], target: float) -> float:
    """When a curve first reaches a loss, interpolated over the logarithm of the steps."""
    after = int(np.argmax(losses <= target))
    if after == 0:
        raise ValueError(f"the loss {target} is not between two validations of the run")
    points = losses.iloc[[after, after - 1]]
    return float(np.interp(target, points, np.log(points.index)))


def log_factors(first: Runs, second: Runs, until: float = np.inf) -> pd.Series[float]:
    """By seed, log of the steps of the first head divided by those of the second to the same loss.

    The loss is the higher one of their last two: softmax's, where softmax is behind.
    """
    seeds = first.index.intersection(second.index)
    pair_of_curves = [curves(runs).loc[:, :until] for runs in (first, second)]
    logs = []
    for seed in seeds:
        losses = [of_runs.loc[seed].dropna() for of_runs in pair_of_curves]
        target = max(curve.iloc[-1] for curve in losses)
        logs.append(np.subtract(*(log_step_of(curve, target) for curve in losses)))
    return pd.Series(logs, seeds, dtype=float)


def crossings(first: Runs, second: Runs) -> np.ndarray:
    """The steps, to a hundred, at which the mean curves of two heads change places."""
    gaps = (curves(first) - curves(second)).dropna(how="all").dropna(axis=1).mean()
    before = np.flatnonzero(np.diff(np.sign(gaps)))
    log_steps = np.log(gaps.index)
    slopes = np.diff(gaps) / np.diff(log_steps)
    return np.exp(log_steps[before] - gaps.iloc[before] / slopes[before]).round(-2)


def bootstrap(games: Sequence[ArrayLike], rivals: Sequence[ArrayLike] = ()) -> list[float]:
    """The mean of the middle half of all returns together, and a 95 % interval by 5,000 draws.

    If there are rivals, that of the games minus that of the rivals.
    """

    def statistic(*samples: np.ndarray, axis: int = -1) -> Any:
        parts = samples[: len(games)], samples[len(games) :]
        means = [stats.trim_mean(np.concatenate(x, axis), 0.25, axis) for x in parts if x]
        return np.subtract(*means) if rivals else means[0]

    rng, samples = np.random.default_rng(1), [*games, *rivals]
    drawn = stats.bootstrap(samples, statistic, method="percentile", n_resamples=5000, rng=rng)
    return [statistic(*samples), *drawn.confidence_interval]


# -- pages -----------------------------------------------------------------------------------------


class Statement(NamedTuple):
    """A place in a page that states a claim.

    Attributes:
        page: its file.
        is_row: whether it is a row of a table.
        numbers: all numbers between the markers of the claim, or after the first cells of the row.
    """

    page: Path
    is_row: bool
    numbers: list[re.Match[str]]

    def holds(self, computed: Sequence[float]) -> bool:
        """Whether the computed numbers are there in their order; a row has no other numbers."""
        places = self.places(computed)
        return len(places) == len(computed) and (
            not self.is_row or len(places) == len(self.numbers)
        )

    def places(self, computed: Sequence[float]) -> list[int]:
        """Which of the numbers are the computed ones; settings such as "K = 8" may lie between."""
        places: list[int] = []
        for place, number in enumerate(self.numbers):
            if len(places) < len(computed) and agrees(number[0], computed[len(places)]):
                places.append(place)
        return places


def statements(claim: str, count: int) -> Iterator[Statement]:
    """The places that state a claim.

    ``<!--:NAME-->18 of 18<!--/-->`` marks the numbers of the claim NAME. A claim that begins with
    "|" is the first cells of rows of tables that have ``count`` more numbers.
    """
    is_row = claim.startswith("|")
    cells = r"\s+".join(map(re.escape, claim.split()))
    pattern = rf"^{cells}(.*)" if is_row else rf"(?s)<!--:{re.escape(claim)}-->(.*?)<!--/-->"
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(pattern, text, re.MULTILINE):
            numbers = NUMBER.finditer(text, *match.span(1))
            statement = Statement(page, is_row, list(numbers))
            if not is_row or len(statement.numbers) == count:
                yield statement


def unclaimed(page: Path, stated: Iterable[re.Match[str]]) -> list[str]:
    """The numbers of a page that are neither claims, nor in code, links or comments.

    A single digit counts where it is a share such as "5 of 5", or has a unit.
    """
    text = page.read_text()
    for number in stated:
        text = text[: number.start()] + " " * len(number[0]) + text[number.end() :]
    text = re.sub(r"(?s)```.*?```|<!--.*?-->|\$\$.*?\$\$", " ", text)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\$[^$\n]*\$", " ", text)
    text = re.sub(r"https?://\S+|\bH200\b|\bSB3\b|\bfloat(16|32|64)\b|\bint64\b", " ", text)
    single = r"\b\d (?:of|to) \d\b|(?<![\d.])\d(?= ?(?:%|times|nats))"
    return [
        *(found.replace(" ", "") for found in re.findall(single, text)),
        *(x for x in NUMBER.findall(text) if not re.fullmatch(r"-?\d", x)),
    ]


def agrees(stated: str, computed: float) -> bool:
    """Whether a number of a page is the computed one, to the digits that it has."""
    mantissa, _, exponent = stated.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(stated.replace(",", "")) - computed) <= 0.5001 * unit


def renew(row: Statement, computed: Sequence[float]) -> None:
    """Put computed numbers into a row of a table, with as many digits as there are now."""
    text = row.page.read_text()
    for match, number in reversed(list(zip(row.numbers, computed, strict=True))):
        digits = len(match[0].partition(".")[2])
        written = re.sub(r"^-(0(\.0*)?)$", r"\1", f"{number:,.{digits}f}")
        text = text[: match.start()] + written + text[match.end() :]
    row.page.write_text(text)


# -- claims ---------------------------------------------------------------------------------------

Claims = Iterator[tuple[Any, ...]]  # a name, then numbers and lists of numbers


def row(*cells: object) -> str:
    """The first cells of a row."""
    return f"| {' | '.join(map(str, cells))} |"


def rows(table: Runs) -> Claims:
    """A claim for each row of a table; its index has the first cells."""
    for cells, numbers in table.iterrows():
        yield row(*(cells if isinstance(cells, tuple) else [cells])), numbers.dropna()
