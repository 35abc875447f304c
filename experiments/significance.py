"""Tests of each cell against the best of its group, and which cells are bold.

Welch's t-test compares means. Where one standard deviation is more than ten times the other, a rank
test (Mann-Whitney) takes its place. Holm's method adjusts the p-values for all tests of a table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SIGNIFICANT = 0.05
SPREADS = 10.0  # standard deviations that differ by more are not compared by Welch's test


@dataclass(frozen=True)
class Comparison:
    """A sample against the best of its group.

    Attributes:
        best: whether it is the best, or has the same mean.
        test: the test that was made; None where there is nothing to test with.
        p_value: of that test.
        narrow_p_value: of the same two means if the sample had no more spread than the best.
    """

    best: bool = False
    test: Literal["Welch", "rank"] | None = None
    p_value: float | None = None
    narrow_p_value: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What a table says of a cell: Holm's p-value, and whether the cell is bold."""

    adjusted: float | None
    bold: bool


def compare(samples: Sequence[Sequence[float]], better: str | None) -> list[Comparison]:
    """Each sample against the one with the best mean, whose values must all be finite.

    Where fewer than two samples have values, none is the best.
    """
    sign = -1 if better == "higher" else 1
    sound = [i for i, each in enumerate(samples) if each and all(map(math.isfinite, each))]
    opponents = sum(map(bool, samples)) > 1
    if not sound or not opponents or better is None:
        return [Comparison() for _ in samples]
    means = {i: sign * statistics.fmean(samples[i]) for i in sound}
    best = min(sound, key=means.__getitem__)
    return [
        _against(samples[i], samples[best], i == best or means[i] == means[best])
        if i in sound
        else Comparison()
        for i in range(len(samples))
    ]


def verdicts(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """All tests of a table together.

    Bold is the best of a group, and each cell that its test does not tell from the best. A cell
    whose own spread is the reason for that is not bold: one that the test would tell from the best
    if the cell's spread was only that of the best.
    """
    tested = [i for i, each in enumerate(comparisons) if each.p_value is not None]
    values = [_p(comparisons[i].p_value) for i in tested]
    adjusted = dict(zip(tested, holm(values), strict=True))
    found = []
    for i, each in enumerate(comparisons):
        same = i in adjusted and adjusted[i] >= SIGNIFICANT
        if same and each.narrow_p_value is not None:
            place = tested.index(i)
            others = [*values[:place], each.narrow_p_value, *values[place + 1 :]]
            same = holm(others)[place] >= SIGNIFICANT
        found.append(Verdict(adjusted.get(i), each.best or same))
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number: the least times m, the next times m - 1, and so on."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = largest
    return adjusted


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p-value of equal means, variances apart; None where a sample is too small."""
    if min(len(a), len(b)) < 2:
        return None
    if statistics.pvariance(a) == statistics.pvariance(b) == 0:  # scipy: NaN
        return 1.0 if a[0] == b[0] else 0.0
    from scipy.stats import ttest_ind

    return float(ttest_ind(a, b, equal_var=False).pvalue)


def interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Welch's 95 % interval of the difference of means, a minus b; two values each at least."""
    from scipy.stats import ttest_ind

    found = ttest_ind(a, b, equal_var=False).confidence_interval(1 - SIGNIFICANT)
    return float(found.low), float(found.high)


def rank_test(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p-value of Mann and Whitney's test; None where a sample is too small."""
    if min(len(a), len(b)) < 2:
        return None
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(a, b).pvalue)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation, NaN for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _against(sample: Sequence[float], best: Sequence[float], is_best: bool) -> Comparison:
    if sample is best or min(len(sample), len(best)) < 2:
        return Comparison(best=is_best)
    spread, least = deviation(sample), deviation(best)
    apart = max(spread, least) > SPREADS * min(spread, least)
    return Comparison(
        best=is_best,
        test="rank" if apart else "Welch",
        p_value=rank_test(sample, best) if apart else welch(sample, best),
        narrow_p_value=_narrow(sample, best) if spread > least else None,
    )


def _narrow(sample: Sequence[float], best: Sequence[float]) -> float:
    """Welch's p-value if the sample had the spread of the best, about its own mean."""
    difference = statistics.fmean(sample) - statistics.fmean(best)
    least = deviation(best)
    if least == 0:
        return 1.0 if difference == 0 else 0.0
    from scipy.stats import ttest_ind_from_stats

    means = statistics.fmean(sample), statistics.fmean(best)
    found = ttest_ind_from_stats(
        means[0], least, len(sample), means[1], least, len(best), equal_var=False
    )
    return float(found.pvalue)


def _p(value: float | None) -> float:
    assert value is not None
    return value
