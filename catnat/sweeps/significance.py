"""Tests of each sample against the best of its group: Welch's t-test, Holm's method for many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy import stats

SIGNIFICANT = 0.05
BEST = math.inf  # in place of the p-value of the best sample, which has no test

Sample = Sequence[float]


def against_best(samples: Sequence[Sample], better: str | None) -> list[float | None]:
    """The p-value of each sample against the one with the best mean, which has BEST.

    Samples with a value that is not finite have None and cannot be the best; neither has a single
    sample a best, nor a metric of which no direction is better.
    """
    sign = -1 if better == "higher" else 1
    means = {
        i: sign * fmean(sample)
        for i, sample in enumerate(samples)
        if sample and all(map(math.isfinite, sample))
    }
    p_values: list[float | None] = [None] * len(samples)
    if better is None or not means or sum(map(bool, samples)) < 2:
        return p_values
    best = min(means, key=means.__getitem__)
    for i, mean in means.items():
        p_values[i] = BEST if mean == means[best] else p_value(samples[i], samples[best])
    return p_values


def p_value(sample: Sample, best: Sample) -> float | None:
    """Of Welch's two-sided test of equal means; None if a sample has one value.

    A large spread of its own does not make a sample one of the best: the p-value is the smaller of
    those with its own spread and with the spread of the best, if that is less.
    """
    if min(len(sample), len(best)) < 2:
        return None
    spread, best_spread = stdev(sample), stdev(best)
    if best_spread == 0:
        return 1.0 if spread == 0 and fmean(sample) == fmean(best) else 0.0
    return min(
        float(
            stats.ttest_ind_from_stats(
                fmean(sample), x, len(sample), fmean(best), best_spread, len(best), equal_var=False
            ).pvalue
        )
        for x in (spread, min(spread, best_spread))
    )


def bold(p_values: Sequence[float | None]) -> list[bool]:
    """Which samples are the best, or not significantly different after Holm's method."""
    tests = sorted((p, i) for i, p in enumerate(p_values) if p is not None and p != BEST)
    is_bold = [p == BEST for p in p_values]
    adjusted = 0.0
    for rank, (p, i) in enumerate(tests):
        adjusted = max(adjusted, p * (len(tests) - rank))
        is_bold[i] = adjusted >= SIGNIFICANT
    return is_bold


def interval(a: Sample, b: Sample) -> tuple[float, float]:
    """Welch's 95 % interval of the difference of means, a minus b."""
    test = stats.ttest_ind(a, b, equal_var=False)
    low, high = test.confidence_interval(1 - SIGNIFICANT)
    return float(low), float(high)
