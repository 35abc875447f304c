"""Rows of runs, statistics of them, and the numbers that pages state.

Runs are tables with a row for each seed. A curve is the validation losses of a run, by step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

PAPER = Path(__file__).resolve().parent
PRINTED = json.loads((PAPER / "paper.json").read_text())  # the paper's own tables
PAGES = [PAPER.parent / "README.md", *PAPER.rglob("*.md"), *PAPER.parent.glob("docs/*.md")]
NUMBER = re.compile(r"-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?")
END = re.compile(r"\n\n|\n- |\n\||\n#")  # of a paragraph, an entry of a list, or a row
Runs = pd.DataFrame
Numbers = Sequence[float]


# -- rows ------------------------------------------------------------------------------------------


@cache
def read(path: str) -> Runs:
    """Finished rows. If a row is a validation (column step), its run gets columns METRIC_STEP."""
    rows = pd.read_csv(PAPER / path)
    if "status" in rows:
        rows = rows[rows["status"] == "finished"]
    options = [name for name in rows if "/" not in name]
    rows[options] = rows[options].astype(object).fillna("")
    if "step" not in rows:
        return rows
    options.remove("step")
    metrics = [name for name in rows if "/" in name]
    runs = rows.pivot(index=options, columns="step", values=metrics)
    runs.columns = [f"{metric}_{step}" for metric, step in runs.columns]
    return runs.reset_index()


def select(path: str, **options: Any) -> Runs:
    """The rows in which each option has the value, or one of a list of values."""
    rows = read(path)
    for name, value in options.items():
        rows = rows[rows[name].isin(value if isinstance(value, list) else [value])]
    return rows


def by_seed(path: str, **options: Any) -> Runs:
    """The selected runs by seed; the last one where a seed was run twice."""
    runs = select(path, **options).drop_duplicates("seed", keep="last")
    return runs.set_index("seed").sort_index()


# -- statistics ------------------------------------------------------------------------------------


def interval(numbers: Numbers) -> list[float]:
    """Mean and 95 % t interval; one number alone has none."""
    if len(numbers) == 1:
        return [*numbers]
    test = stats.ttest_1samp(numbers, 0)
    return [float(np.mean(numbers)), *test.confidence_interval()]


def factor(log_factors: Numbers) -> list[float]:
    """Geometric mean and 95 % t interval of factors, from their logarithms."""
    return [float(bound) for bound in np.exp(interval(log_factors))]


def p_of(numbers: Numbers) -> float:
    """The p of a mean of 0."""
    return float(stats.ttest_1samp(numbers, 0).pvalue)


def welch(first: Numbers, second: Numbers) -> list[float]:
    """Difference of means, Welch's 95 % interval, and p."""
    test = stats.ttest_ind(first, second, equal_var=False)
    difference = float(np.mean(first) - np.mean(second))
    return [difference, *test.confidence_interval(), float(test.pvalue)]


def differences(first: Runs, second: Runs, metric: str) -> list[float]:
    """A metric of the first runs minus that of the second, by seed."""
    return (first[metric] - second[metric]).dropna().tolist()


def curve(run: pd.Series[Any], until: float = np.inf) -> pd.Series[float]:
    """The validation losses of a run by the logarithm of the step."""
    losses = run.filter(regex=r"^val/loss_\d+$").dropna().astype(float)
    losses.index = [int(name.rpartition("_")[2]) for name in losses.index]
    losses = losses[losses.index <= until].sort_index()
    return losses.set_axis(np.log(losses.index))


def log_step_of(losses: pd.Series[float], target: float) -> float:
    """When a curve first reaches a loss, interpolated over the logarithm of the steps."""
    after = int(np.argmax(losses <= target))
    if after == 0:
        raise ValueError(f"the loss {target} is not between two validations of the run")
    points = losses.iloc[[after, after - 1]]
    return float(np.interp(target, points, points.index))


def log_factors(first: Runs, second: Runs, until: float = np.inf) -> list[float]:
    """By seed, log of the steps of the first head divided by those of the second to the same loss.

    The loss is the higher one of their last two: softmax's, where softmax is behind.
    """
    logs = []
    for seed in first.index.intersection(second.index):
        curves = [curve(runs.loc[seed], until) for runs in (first, second)]
        target = max(losses.iloc[-1] for losses in curves)
        one, other = (log_step_of(losses, target) for losses in curves)
        logs.append(one - other)
    return logs


def mean_curve(runs: Runs) -> pd.Series[float]:
    """The mean of the curves, as far as all of them go."""
    return pd.concat([curve(run) for _, run in runs.iterrows()], axis=1).dropna().mean(axis=1)


def crossing(first: Runs, second: Runs) -> list[int]:
    """The last step at which the mean curves change places, to a hundred; none if they never do."""
    seeds = first.index.intersection(second.index)
    ahead = (mean_curve(first.loc[seeds]) - mean_curve(second.loc[seeds])).dropna()
    signs = np.sign(ahead.to_numpy())
    changes = np.flatnonzero(signs[:-1] != signs[1:])
    if not len(changes):
        return []
    points = ahead.iloc[changes[-1] : changes[-1] + 2].sort_values()
    return [int(round(np.exp(np.interp(0, points, points.index)), -2))]


def interquartile_mean(*games: np.ndarray, axis: int = -1) -> Any:
    """The mean of the middle half of all returns together."""
    return stats.trim_mean(np.concatenate(games, axis), 0.25, axis)


def bootstrap(samples: Sequence[Numbers], statistic: Callable[..., Any]) -> list[float]:
    """A statistic of some samples and its 95 % interval, by the percentiles of 5,000 draws."""
    arrays = [np.array(sample) for sample in samples]
    rng = np.random.default_rng(1)
    drawn = stats.bootstrap(arrays, statistic, method="percentile", n_resamples=5000, rng=rng)
    return [float(statistic(*arrays)), *map(float, drawn.confidence_interval)]


# -- pages -----------------------------------------------------------------------------------------


class Statement(NamedTuple):
    """A place of a page: the words of a claim, and the numbers behind them.

    Attributes:
        page: its file.
        is_row: whether it is a row of a table.
        numbers: all of them until the end of the paragraph, of the list's entry, or of the row.
    """

    page: Path
    is_row: bool
    numbers: list[re.Match[str]]

    def holds(self, computed: Numbers) -> bool:
        """Whether the computed numbers are there, in their order, with the first one at once.

        A row has no other numbers.
        """
        places = self.places(computed)
        has_all = len(places) == len(computed) and places[0] == 0
        return has_all and (not self.is_row or len(places) == len(self.numbers))

    def places(self, computed: Numbers) -> list[int]:
        """Which of the numbers are the computed ones; others, such as "K = 8", lie between them."""
        places: list[int] = []
        for place, number in enumerate(self.numbers):
            if len(places) < len(computed) and agrees(number[0], computed[len(places)]):
                places.append(place)
        return places


def statements(words: str, count: int) -> Iterator[Statement]:
    """The places in pages that have these words, or rows that begin so with a count of numbers."""
    is_row = words.startswith("|")
    start = "^" if is_row else ""
    pattern = re.compile(start + r"\s+".join(map(re.escape, words.split())), re.MULTILINE)
    for page in PAGES:
        text = page.read_text()
        for match in pattern.finditer(text):
            end = END.search(text, match.end())
            numbers = NUMBER.finditer(text, match.end(), end.start() if end else len(text))
            statement = Statement(page, is_row, list(numbers))
            if not is_row or len(statement.numbers) == count:
                yield statement


def agrees(stated: str, computed: float) -> bool:
    """Whether a number of a page is the computed one, to the digits that it has."""
    mantissa, _, exponent = stated.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(stated.replace(",", "")) - computed) <= 0.5001 * unit


def renew(row: Statement, computed: Numbers) -> None:
    """Put computed numbers into a row of a table, with as many digits as there are now."""
    text = row.page.read_text()
    for match, number in reversed(list(zip(row.numbers, computed, strict=True))):
        digits = len(match[0].partition(".")[2])
        written = re.sub(r"^-(0(\.0*)?)$", r"\1", f"{number:,.{digits}f}")
        text = text[: match.start()] + written + text[match.end() :]
    row.page.write_text(text)
