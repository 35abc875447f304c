"""The marks of `catnat tables` and `catnat compare`: Welch's t-test, Holm's method."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, mean, stdev
from typing import TypeVar

from scipy import stats

SIGNIFICANT = 0.05
BEST = math.inf  # in place of the p-value of the best sample, which has no test

Sample = Sequence[float]
Place = TypeVar("Place")  # of a sample in a table


def mean_and_spread(values: Sample, mean_format: str, spread_format: str) -> str:
    """Mean ± standard deviation; of one value, or of values that are not finite, the mean alone."""
    text = f"{fmean(values):{mean_format}}"
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return text
    return f"{text} ± {stdev(values):{spread_format}}"


def marked(groups: Iterable[tuple[Mapping[Place, Sample], str | None]]) -> set[Place]:
    """The places of a table whose samples are the best of their group, or not significantly worse.

    Args:
        groups: the samples of each group by their places, and whether "lower" or "higher" is
            better; None for a metric without a direction.
    """
    places: list[Place] = []
    p_values: list[float] = []
    for samples, better in groups:
        places += samples
        p_values += against_best(list(samples.values()), better)
    return {place for place, is_bold in zip(places, bold(p_values), strict=True) if is_bold}


def against_best(samples: Sequence[Sample], better: str | None) -> list[float]:
    """The p-values of Welch's two-sided test against the sample with the best mean.

    Every sample with the best mean has BEST. A sample of one value, or with a value that is not
    finite, has NaN, and the latter cannot be the best; neither has a single sample a best, nor a
    metric of which no direction is better.
    """
    sign = -1 if better == "higher" else 1
    # Exact means: equal constants have equal ones, however many they are.
    means = [sign * mean(sample) if sample else math.nan for sample in samples]
    best_mean = min(filter(math.isfinite, means), default=None)
    if better is None or best_mean is None or sum(map(bool, samples)) < 2:
        return [math.nan] * len(samples)
    best = samples[means.index(best_mean)]
    with warnings.catch_warnings(action="ignore"):  # of samples that are constant, or one value
        p_values = [stats.ttest_ind(x, best, equal_var=False).pvalue for x in samples]
    pairs = zip(means, p_values, strict=True)
    return [BEST if sample_mean == best_mean else float(p) for sample_mean, p in pairs]


def bold(p_values: Sequence[float]) -> list[bool]:
    """Mark the samples that are the best, or not significantly different after Holm's method."""
    tests = sorted((p, i) for i, p in enumerate(p_values) if math.isfinite(p))
    is_bold = [p == BEST for p in p_values]
    adjusted = 0.0
    for rank, (p, i) in enumerate(tests):
        adjusted = max(adjusted, p * (len(tests) - rank))
        is_bold[i] = adjusted >= SIGNIFICANT
    return is_bold


def interval(a: Sample, b: Sample) -> tuple[float, float]:
    """Welch's 95 % interval of the difference of means, a minus b."""
    with warnings.catch_warnings(action="ignore"):  # of samples that are constant
        test = stats.ttest_ind(a, b, equal_var=False)
        return test.confidence_interval(1 - SIGNIFICANT)


def mean_interval(sample: Sample) -> tuple[float, float]:
    """Student's 95 % interval of a mean; NaN for one value."""
    if len(sample) < 2:
        return math.nan, math.nan
    half = stats.t.ppf(1 - SIGNIFICANT / 2, len(sample) - 1) * stats.sem(sample)
    return fmean(sample) - half, fmean(sample) + half
