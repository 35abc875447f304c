"""Which rows of this folder belong to which question."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from measures import Runs, best, curves, log_factors, log_step_of, pair, read, select

TREES = ["sigmoid", "natural"]
HEADS = ["softmax", *TREES]

SMALL = [(data, N, K) for N, K in ((10, 8), (20, 16)) for data in ("gray", "binary")]
LONGEST = [(data, N, K) for N, K in ((10, 8), (20, 32)) for data in ("gray", "binary")]
SGD = {"optimizer": "sgd", "gradient_clip": 0, "learning_rate": [0.001, 0.003, 0.01, 0.03]}


def vae(**options: Any) -> Runs:
    """The convolutional VAE: 60,000 steps of Adam at rate 0.001, unless options differ."""
    setting = {"model": "vae", "stage": "final", "lr_decay": 1.0, "max_steps": 60000}
    setting |= {"optimizer": "adam", "learning_rate": 0.001}
    return select("vae/runs.csv", **setting | options)


SIZES = ((10, 8), (20, 16), (20, 32))  # N, K
GUMBEL = "straight-through Gumbel"
SETTINGS = {  # estimator and draws, and their words
    ("gumbel", 1): GUMBEL,
    ("gumbel", 8): f"{GUMBEL}, 8 draws",
    ("gumbel", 64): f"{GUMBEL}, 64 draws",
    ("score-function", 64): "score function, 64 draws",
}
ESTIMATORS = {"gumbel": GUMBEL, "straight-through": "straight-through, 1 % unimix"}
NETWORKS = (  # encoder, decoder
    ("dense", "dense"),
    ("conv", "conv"),
    ("dense", "conv"),
    ("conv", "dense"),
    ("conv-plain", "conv-plain"),
)
OTHER_DATA = (  # study, words, N, K, steps
    ("glyphs", "letters of free fonts", 20, 16, 20000),
    ("glyphs", "letters of free fonts", 20, 32, 20000),
    ("frames", "frames of 26 games, 64 x 64", 32, 32, 10000),
)
PROBING = {"plans": "probing", "optimizer": "", "decoder": "plain", "even": 0.0, "draws": 1}
CHANGED_SETTINGS: dict[str, dict[str, Any]] = {
    "Adam, rate 0.0005": {"learning_rate": 0.0005},
    "Adam, rate 0.001": {},
    "Adam, rate 0.002": {"learning_rate": 0.002},
    "plain SGD, best rates": {"optimizer": "sgd", "learning_rate": [0.003, 0.01]},
    "one draw of z, again": PROBING,
    "eight draws of z": PROBING | {"draws": 8},
    "tree in the decoder": PROBING | {"decoder": "tree"},
    "copies in the decoder": PROBING | {"decoder": "copies"},
    "price on uneven use": PROBING | {"even": 1.0},
}
COUPLINGS = {"-1": "opposed-1", "-0.5": "opposed-0.5"}
COUPLINGS |= {C: f"coupled-{C}" for C in ("0", "0.25", "0.5", "1", "2")}
CHANGED_HEADS = (
    *("natural", "sigmoid-rotated-3", "natural-rotated-3"),
    *("sigmoid-chain", "sigmoid-shuffled", "sigmoid-flat", "sigmoid-steep"),
    *("softmax-haar", "softmax-paths", "softmax-steep", "softmax-scaled-2", "softmax-scaled-4"),
    *("sigmoid-ungated", "natural-ungated", "sigmoid-levels"),
    *("sigmoid-paths-gradient", "softmax-paths-tree-gradient"),
    *("sigmoid-natural-gradient-0.1", "softmax-natural-gradient-0.1"),
)
INTERVENTIONS = {
    **CHANGED_SETTINGS,
    **{f"coupling {C}": {"second": f"sigmoid-{name}"} for C, name in COUPLINGS.items()},
    **{head: {"second": head} for head in CHANGED_HEADS},
}


def mechanism(**options: Any) -> list[Runs]:
    """Two heads: gray MNIST, 60,000 steps, Adam at rate 0.001, unless the options differ."""
    setting: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.001, "variant": "gray"}
    setting |= {"plans": "mechanism", "stage": "final", "max_steps": 60000}
    return pair("mechanism/runs.csv", **setting | options)


def noise(estimator: str, draws: int, *heads: str) -> list[Runs]:
    """Two heads with an estimator and a number of draws."""
    return pair("without_noise/curves.csv", *heads, estimator=estimator, draws=draws)


def networks(encoder: str, decoder: str, steps: int = 20000) -> list[Runs]:
    """Softmax and sigmoid with an encoder and a decoder."""
    return pair("architecture/curves.csv", encoder=encoder, decoder=decoder, max_steps=steps)


def long_convolutional() -> pd.Series[float]:
    """Log factors after 60,000 steps, convolutional (10, 16), softmax at its best rate there.

    Softmax's runs are those of the study vae: the search of the study architecture chose another.
    """
    _, sigmoid = networks("conv", "conv", 60000)
    softmax = vae(head="softmax", num_latents=10, num_categories=16, variant="gray")["val/loss"]
    losses = curves(sigmoid)
    steps = [log_step_of(losses.loc[seed].dropna(), softmax[seed]) for seed in losses.index]
    return np.log(60000) - pd.Series(steps, losses.index)


def other_data(study: str, K: int, estimator: str, head: str = "sigmoid") -> list[Runs]:
    """Softmax and a head on other data."""
    return pair(f"{study}/curves.csv", "softmax", head, num_categories=K, estimator=estimator)


def latents() -> Iterator[tuple[str, str, str, int, pd.Series[float]]]:
    """Rows of "Does it help my latents?": data, model, estimator, steps, and log factors."""
    for N, K in SIZES:
        model = f"convolutional, ({N}, {K})"
        for steps in (20000, 60000):
            logs = log_factors(*mechanism(num_categories=K), steps)
            yield "MNIST", model, GUMBEL, steps, logs
        runs = mechanism(num_categories=K, **PROBING | {"draws": 8})
        yield "MNIST", model, f"{GUMBEL}, 8 draws", 60000, log_factors(*runs)
        runs = pair("vae/longest_curve.csv", num_categories=K, variant="binary")
        yield "MNIST, binary", model, GUMBEL, 60000, log_factors(*runs, 60000)
    for setting, words in SETTINGS.items():
        logs = log_factors(*noise(*setting), 10000)
        yield "MNIST", "convolutional, (10, 8)", words, 10000, logs
    for (encoder, decoder), steps in product(NETWORKS, (20000, 60000)):
        model = f"{encoder} encoder, {decoder} decoder, (10, 16)"
        long = (encoder, decoder, steps) == ("conv", "conv", 60000)
        logs = long_convolutional() if long else log_factors(*networks(encoder, decoder, steps))
        yield "MNIST", model, GUMBEL, steps, logs
    for (study, data, N, K, steps), estimator in product(OTHER_DATA, ESTIMATORS):
        logs = log_factors(*other_data(study, K, estimator), steps)
        yield data, f"convolutional, ({N}, {K})", ESTIMATORS[estimator], steps, logs


def searched_graphs() -> Runs:
    """Graphs by score function: theta's and psi's rates have the lowest mean validation loss."""
    runs = select("graphs/runs.csv", plans="gsl")
    runs = runs[runs["psi_learning_rate"] != ""]
    tails = runs["head_options.tail"].map(lambda tail: f", tail {tail}" if tail else "")
    runs = runs.assign(head=runs["head"] + tails)
    search, final = runs[runs["stage"] == "search"], runs[runs["stage"] == "final"]
    rates = ["learning_rate", "psi_learning_rate"]
    return best(search, final, "val/loss", ["theta", "head"], rates)


STEPS = {"words": 1000, "pairs": 1000, "docs": 800, "small": 1000}


def step_times(text: str) -> pd.Series[float]:
    """The milliseconds of a whole training step, by output."""
    return select("language_model/step_times_h200.csv", text=text).set_index("output")["ms"]


def output_layers() -> Runs:
    """Output layers ("head") at best rates (validation of seed 0); % above the better softmax.

    At equal time each does the steps that fit into the full run of the fastest one.
    """
    runs = read("language_model/outputs.csv").rename(columns={"output": "head"})
    runs = best(runs.loc[[0]], runs, "val", ["text", "head", "steps"], ["rate"])
    parts = [runs[runs["steps"] == runs["text"].map(STEPS)]]
    for text in ("words", "docs"):
        ms = step_times(text)
        steps = (STEPS[text] * ms.min() / ms).astype(int)
        at_equal_time = (runs["text"] == text) & (runs["steps"] == runs["head"].map(steps))
        parts.append(runs[at_equal_time].assign(text=f"{text}, equal time"))
    layers = pd.concat(parts)
    is_softmax = layers["head"].isin(["softmax", "softmax-bfloat16"])
    means = layers[is_softmax].groupby(["text", "head"])["test"].mean()
    best_softmax = means.groupby("text").min()
    return layers.assign(above=100 * (layers["test"] / layers["text"].map(best_softmax) - 1))
