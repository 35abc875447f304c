"""What verdicts are made of: rows, tests, the factor of steps, and numbers read from pages."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

PAPER = Path(__file__).resolve().parent
Row = dict[str, str]
Runs = dict[str, Row]  # by seed
Pair = Sequence[Runs]  # of two
Numbers = list[float]
SIZES = ("8", "16", "32")  # K of (10, 8), (20, 16), (20, 32)
TREES = ("sigmoid", "natural")
INTERVAL = "{} [{}, {}]"  # in a sentence: value and bounds
BOTH = ("softmax", "sigmoid")
NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)"


class Claim(NamedTuple):
    """A sentence of a page, and its numbers as the rows have them."""

    page: str
    sentence: str  # {} for each number
    computed: Sequence[float]


@cache
def read(path: str) -> list[Row]:
    """Finished rows. If a row is a validation (column step), its run gets columns METRIC_STEP."""
    with (PAPER / path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    if "step" not in rows[0]:
        return [row for row in rows if row.get("status", "finished") == "finished"]
    runs: dict[tuple[str, ...], Row] = {}
    for row in rows:
        options = {name: value for name, value in row.items() if name != "step" and "/" not in name}
        metrics = {f"{name}_{row['step']}": row[name] for name in row if "/" in name}
        runs.setdefault(tuple(options.values()), options).update(metrics)
    return list(runs.values())


@cache
def printed() -> dict[str, list[dict[str, Any]]]:
    """The paper's own tables."""
    tables: dict[str, list[dict[str, Any]]] = json.loads((PAPER / "paper.json").read_text())
    return tables


def select(path: str, options: str = "", **more: str) -> list[Row]:
    """Rows by "name=value name=first|second ..." and by further values; empty values match, too."""
    wanted = dict(option.split("=") for option in options.split()) | more
    allowed = {name: value.split("|") for name, value in wanted.items()}
    return [row for row in read(path) if all(row[name] in allowed[name] for name in allowed)]


def by_seed(path: str, options: str = "", **more: str) -> Runs:
    """The selected runs by seed; the last one where a seed was run twice."""
    return {row["seed"]: row for row in select(path, options, **more)}


def values(runs: Runs, metric: str) -> Numbers:
    """A metric of all runs, in the order of their seeds."""
    return [float(runs[seed][metric]) for seed in sorted(runs)]


def differences(pair: Pair, metric: str) -> Numbers:
    """A metric of the first runs minus that of the second, by seed."""
    first, second = pair
    common = sorted(first.keys() & second.keys())
    return [float(first[seed][metric]) - float(second[seed][metric]) for seed in common]


def mean(numbers: Numbers) -> float:
    """Arithmetic mean."""
    return float(np.mean(numbers))


def t_interval(numbers: Numbers) -> Numbers:
    """Mean and 95 % t interval."""
    low, high = stats.ttest_1samp(numbers, 0).confidence_interval()
    return [mean(numbers), low, high]


def t_test(numbers: Numbers) -> float:
    """The p of a mean of 0."""
    return float(stats.ttest_1samp(numbers, 0).pvalue)


def welch(pair: Pair, metric: str) -> Numbers:
    """Difference of means and Welch's 95 % interval."""
    first, second = (values(runs, metric) for runs in pair)
    low, high = stats.ttest_ind(first, second, equal_var=False).confidence_interval()
    return [mean(first) - mean(second), low, high]


def p_value(pair: Pair, metric: str) -> float:
    """The p of Welch's test."""
    first, second = (values(runs, metric) for runs in pair)
    return float(stats.ttest_ind(first, second, equal_var=False).pvalue)


def curve(run: Row, until: int = 10**9) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the steps, and validation losses."""
    named = {name.removeprefix("val/loss_"): value for name, value in run.items() if value}
    losses = {int(step): float(value) for step, value in named.items() if step.isdecimal()}
    steps = sorted(step for step in losses if step <= until)
    return np.log(steps), np.array([losses[step] for step in steps])


def log_step_of(log_steps: np.ndarray, losses: np.ndarray, target: float) -> float:
    """When a curve first reaches a loss, interpolated over the logarithm of the steps."""
    place = int(np.argmax(losses <= target))
    if place == 0:
        raise ValueError(f"the loss {target} is not between two validations of the run")
    share = (losses[place - 1] - target) / (losses[place - 1] - losses[place])
    return float(log_steps[place - 1] + share * (log_steps[place] - log_steps[place - 1]))


def log_factors(pair: Pair, until: int = 10**9) -> Numbers:
    """By seed, log of the steps of the first head divided by those of the second to the same loss.

    The loss is the higher one of their last two: softmax's, where softmax is behind.
    """
    ratios = []
    for seed in sorted(pair[0].keys() & pair[1].keys()):
        curves = [curve(runs[seed], until) for runs in pair]
        target = max(losses[-1] for _, losses in curves)
        first, second = (log_step_of(*points, target) for points in curves)
        ratios.append(first - second)
    return ratios


def factor(ratios: Numbers) -> Numbers:
    """Geometric mean and 95 % t interval of factors, from their logarithms."""
    return [float(bound) for bound in np.exp(t_interval(ratios))]


def vae(head: str, N: str, K: str, variant: str, options: str = "") -> Runs:
    """Runs of the convolutional VAE: 60,000 steps of Adam at rate 0.001, unless options differ."""
    setting = (
        "model=vae stage=final lr_decay=1.0 optimizer=adam learning_rate=0.001 max_steps=60000"
    )
    size = f"num_latents={N} num_categories={K} variant={variant}"
    return by_seed("vae/runs.csv", f"{setting} {options} {size} head={head}")


def text_of(page: str) -> str:
    """A page on one line."""
    return " ".join((PAPER / page).read_text().split())


def pattern_of(claim: Claim) -> str:
    """The regular expression of a sentence, with a group for each number."""
    return re.escape(" ".join(claim.sentence.split())).replace(r"\{\}", NUMBER)


def stated(claim: Claim) -> list[str]:
    """The numbers of the sentence in its page; none if the page does not have it exactly once."""
    matches = list(re.finditer(pattern_of(claim), text_of(claim.page)))
    return list(matches[0].groups()) if len(matches) == 1 else []


def agrees(number: str, computed: float) -> bool:
    """Whether a number of a page is the computed one, to the digits that it has."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(number.replace(",", "")) - computed) <= 0.5001 * unit
