"""Claims about heads and estimators together."""

from __future__ import annotations

from itertools import product

import numpy as np
from measures import Claims, Runs, differences, factor, interval, log_factors, row, select, welch

SETTINGS = (  # estimator, first temperature; the lowest one is half of it
    ("gumbel", 1.0),
    ("gumbel-rao", 1.0),
    ("gumbel-rao", 0.5),
    ("reinmax", ""),
    ("straight-through", ""),
)
USUAL, LOW = SETTINGS[0], SETTINGS[2]
WORDS = dict(
    zip(
        (
            "straight-through Gumbel",
            "Gumbel-Rao, τ = 1",
            "Gumbel-Rao, τ = 0.5",
            "ReinMax",
            "straight-through",
        ),
        SETTINGS,
        strict=True,
    )
)
TREES = ("sigmoid", "natural", "sigmoid-opposed-0.5")


def runs(setting: tuple[str, object], head: str, file: str = "curves") -> Runs:
    """Final runs of a head, each at its own rate, or their curves."""
    estimator, temperature = setting
    options = {"estimator": estimator, "temperature": temperature, "head": head}
    if file == "runs":
        options["stage"] = "final"
    return select(f"estimators_main/{file}.csv", **options).sort_index()


def gain(
    before: tuple[str, object], after: tuple[str, object], head: str, rival: str = "softmax"
) -> list[float]:
    """Times fewer steps with a head and an estimator than with the rival's."""
    return factor(log_factors(runs(before, rival), runs(after, head)))


def together() -> Claims:
    """Heads and estimators, convolutional VAE (10, 8)."""
    for setting, head in product(SETTINGS, ("softmax", *TREES)):
        finals = runs(setting, head, "runs")
        means = finals[["test/nll", "test/elbo"]].mean()
        factors = []
        if head != "softmax":
            pair_of_curves = runs(setting, "softmax"), runs(setting, head)
            factors = [factor(log_factors(*pair_of_curves, steps)) for steps in (20000, 60000)]
        cells = (setting[0], setting[1] or "none", head)
        yield row(*cells), finals["learning_rate"].unique(), means, *factors
    for words, setting in WORDS.items():
        logs = log_factors(runs(setting, "softmax"), runs(setting, "sigmoid"))
        model = "convolutional, (10, 8), own rates"
        yield row("MNIST", model, words, "60,000"), factor(logs), len(logs)
    same = [gain(setting, setting, "sigmoid")[0] for setting in (USUAL, LOW, SETTINGS[3])]
    yield "together.factors", same
    yield "together.usual", gain(USUAL, LOW, "sigmoid")
    best = max(SETTINGS, key=lambda x: runs(x, "softmax", "runs")["test/elbo"].mean())
    yield "together.best-softmax", gain(best, LOW, "sigmoid")
    yield "together.softmax", gain(USUAL, best, "softmax")
    nlls = [runs(*x, "runs")["test/nll"] for x in ((LOW, "sigmoid"), (USUAL, "softmax"))]
    yield "together.nll", [nll.mean() for nll in nlls]
    nlls = [runs(*x, "runs")["test/nll"] for x in ((LOW, "sigmoid"), (best, "softmax"))]
    yield "together.nll-best", welch(*nlls)[:3]
    # How often a seed's factor is larger than with Gumbel.
    usual = log_factors(runs(USUAL, "softmax"), runs(USUAL, "sigmoid"))
    larger = []
    for setting in SETTINGS[1:4]:
        logs = log_factors(runs(setting, "softmax"), runs(setting, "sigmoid"))
        larger += [int((logs > usual).sum()), len(logs)]
    yield "together.larger", larger
    heads = ("softmax", *TREES)
    losses = [[runs(x, head, "runs")["test/elbo"].mean() for head in heads] for x in SETTINGS]
    gaps = np.array(losses[0]) - np.array(losses[-1])
    yield "together.straight-through", gaps.min(), gaps.max()
    opposed = "sigmoid-opposed-0.5"
    for setting in SETTINGS:
        name = row("sigmoid-opposed-0.5", setting[0], setting[1] or "none")
        elbo = differences(
            *(runs(setting, head, "runs") for head in (opposed, "sigmoid")), "test/elbo"
        )
        yield name, gain(setting, setting, opposed, rival="sigmoid"), interval(elbo)
