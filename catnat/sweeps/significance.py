"""Tests of each sample against the best of its group.

Welch's t-test compares means. Holm's method adjusts p-values for their number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

SIGNIFICANT = 0.05


class Comparison(NamedTuple):
    """A sample against the best of its group.

    Attributes:
        best: whether it is the best, or has the same mean.
        p_value: of the test; None where there is nothing to test with. Where the sample has the
            larger spread, the p-value it would have with the spread of the best, if that is less:
            a spread of its own does not make a sample one of the best.
    """

    best: bool = False
    p_value: float | None = None


def compare(samples: Sequence[Sequence[float]], better: str | None) -> list[Comparison]:
    """Each sample against the one with the best mean, whose values must all be finite.

    Where fewer than two samples have values, none is the best.
    """
    sign = -1 if better == "higher" else 1
    sound = [i for i, each in enumerate(samples) if each and all(map(math.isfinite, each))]
    found = [Comparison() for _ in samples]
    if better is None or not sound or sum(map(bool, samples)) < 2:
        return found
    means = {i: sign * statistics.fmean(samples[i]) for i in sound}
    best = min(sound, key=means.__getitem__)
    for i in sound:
        p_value = None if i == best else _against(samples[i], samples[best])
        found[i] = Comparison(means[i] == means[best], p_value)
    return found


def bold(comparisons: Sequence[Comparison]) -> list[bool]:
    """Which samples are the best, or not significantly different, by all tests of a table."""
    tested = [i for i, each in enumerate(comparisons) if each.p_value is not None]
    adjusted = holm([comparisons[i].p_value or 0.0 for i in tested])
    same = {i for i, p_value in zip(tested, adjusted, strict=True) if p_value >= SIGNIFICANT}
    return [each.best or i in same for i, each in enumerate(comparisons)]


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number: the least times m, the next times m - 1, and so on."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = largest
    return adjusted


def _against(sample: Sequence[float], best: Sequence[float]) -> float | None:
    p_value, least = welch(sample, best), deviation(best)
    if p_value is None or not deviation(sample) > least:
        return p_value
    return min(p_value, _test(sample, best, least, least)) if least else 0.0


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p-value of equal means, variances apart; None where a sample is too small."""
    if min(len(a), len(b)) < 2:
        return None
    if deviation(a) == deviation(b) == 0:  # scipy: NaN
        return 1.0 if a[0] == b[0] else 0.0
    return _test(a, b, deviation(a), deviation(b))


def _test(a: Sequence[float], b: Sequence[float], spread_a: float, spread_b: float) -> float:
    of_a = statistics.fmean(a), spread_a, len(a)
    of_b = statistics.fmean(b), spread_b, len(b)
    return float(stats.ttest_ind_from_stats(*of_a, *of_b, equal_var=False).pvalue)


def interval(a: Sequence[float], b: Sequence[float] = ()) -> tuple[float, float]:
    """95 % interval of the mean of a, or by Welch of the difference of means, a minus b."""
    test_of = stats.ttest_ind(a, b, equal_var=False) if b else stats.ttest_1samp(a, 0.0)
    found = test_of.confidence_interval(1 - SIGNIFICANT)
    return float(found.low), float(found.high)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation, NaN for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan
