"""Which rows of this folder belong to which question."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from measures import Runs, best, curves, log_step_of, pair, read, select

TREES = ["sigmoid", "natural"]
HEADS = ["softmax", *TREES]


def size(N: int, K: int, data: str) -> dict[str, Any]:
    """Options of a VAE: latents, categories, and gray or binary images."""
    return {"num_latents": N, "num_categories": K, "variant": data}


# -- VAEs ------------------------------------------------------------------------------------------

COLUMN = ["variant", "num_latents", "num_categories"]
SMALL = [(data, N, K) for N, K in ((10, 8), (20, 16)) for data in ("gray", "binary")]
LONGEST = [(data, N, K) for N, K in ((10, 8), (20, 32)) for data in ("gray", "binary")]
SGD = {"optimizer": "sgd", "gradient_clip": 0, "learning_rate": [0.001, 0.003, 0.01, 0.03]}


def vae(**options: Any) -> Runs:
    """The convolutional VAE: 60,000 steps of Adam at rate 0.001, unless options differ."""
    setting = {"model": "vae", "stage": "final", "lr_decay": 1.0, "max_steps": 60000}
    setting |= {"optimizer": "adam", "learning_rate": 0.001}
    return select("vae/runs.csv", **setting | options)


def longest(data: str, N: int, K: int) -> list[Runs]:
    """Softmax and sigmoid: validations of 192,000 steps."""
    return pair("vae/longest_curve.csv", **size(N, K, data))


# -- the factor of steps ---------------------------------------------------------------------------

SIZES = ((10, 8), (20, 16), (20, 32))  # N, K
SETTINGS = (("gumbel", 1), ("gumbel", 8), ("gumbel", 64), ("score-function", 64))  # and draws
GUMBEL = "straight-through Gumbel"
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
    "coupling -1": {"second": "sigmoid-opposed-1"},
    "coupling -0.5": {"second": "sigmoid-opposed-0.5"},
    "coupling 0": {"second": "sigmoid-coupled-0"},
    "coupling 0.25": {"second": "sigmoid-coupled-0.25"},
    "coupling 0.5": {"second": "sigmoid-coupled-0.5"},
    "coupling 1": {"second": "sigmoid-coupled-1"},
    "coupling 2": {"second": "sigmoid-coupled-2"},
}
CHANGED_HEADS = (
    "natural",
    "sigmoid-rotated-3",
    "natural-rotated-3",
    "sigmoid-chain",
    "sigmoid-shuffled",
    "sigmoid-flat",
    "sigmoid-steep",
    "softmax-haar",
    "softmax-paths",
    "softmax-steep",
    "softmax-scaled-2",
    "softmax-scaled-4",
    "sigmoid-ungated",
    "natural-ungated",
    "sigmoid-levels",
    "sigmoid-paths-gradient",
    "softmax-paths-tree-gradient",
    "sigmoid-natural-gradient-0.1",
    "softmax-natural-gradient-0.1",
)
INTERVENTIONS = CHANGED_SETTINGS | {head: {"second": head} for head in CHANGED_HEADS}


def mechanism(K: int, **options: Any) -> list[Runs]:
    """Two heads: gray MNIST, 60,000 steps, Adam at rate 0.001, unless the options differ."""
    setting: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.001, "variant": "gray"}
    setting |= {"plans": "mechanism", "stage": "final", "max_steps": 60000}
    return pair("mechanism/runs.csv", num_categories=K, **setting | options)


def noise(estimator: str, draws: int, *heads: str) -> list[Runs]:
    """Two heads with an estimator and a number of draws."""
    return pair("without_noise/curves.csv", *heads, estimator=estimator, draws=draws)


def networks(encoder: str, decoder: str, steps: int = 20000) -> list[Runs]:
    """Softmax and sigmoid with an encoder and a decoder."""
    where = {"encoder": encoder, "decoder": decoder, "max_steps": steps}
    return pair("architecture/curves.csv", **where)


def long_convolutional() -> list[float]:
    """Log factors after 60,000 steps, convolutional (10, 16), softmax at its best rate there.

    Softmax's runs are those of the study vae: the search of the study architecture chose another.
    """
    _, sigmoid = networks("conv", "conv", 60000)
    softmax = vae(head="softmax", **size(10, 16, "gray"))["val/loss"]
    losses = curves(sigmoid)
    steps = [log_step_of(losses.loc[seed].dropna(), softmax[seed]) for seed in losses.index]
    return [np.log(60000) - step for step in steps]


def other_data(study: str, K: int, estimator: str, head: str = "sigmoid") -> list[Runs]:
    """Softmax and a head on other data."""
    where = {"num_categories": K, "estimator": estimator}
    return pair(f"{study}/curves.csv", "softmax", head, **where)


# -- graphs ----------------------------------------------------------------------------------------


def searched_graphs() -> Runs:
    """Graphs by score function: theta's and psi's rates have the lowest mean validation loss."""
    runs = select("graphs/runs.csv", plans="gsl")
    search, final = runs[runs["stage"] == "search"], runs[runs["stage"] == "final"]
    cell, rates = ["theta", "head", "head_options.tail"], ["learning_rate", "psi_learning_rate"]
    chosen = best(search, final, "val/loss", cell, rates)
    return chosen[chosen["psi_learning_rate"] != ""]


# -- output layers ---------------------------------------------------------------------------------

STEPS = {"words": 1000, "pairs": 1000, "docs": 800, "docs-before": 800, "small": 1000}


def output_layers() -> Runs:
    """Output layers at the rates with the best validation of seed 0."""
    runs = read("language_model/outputs.csv")
    return best(runs.loc[[0]], runs, "val", ["text", "output", "steps"], ["rate"])


def step_times(text: str) -> pd.Series[float]:
    """The milliseconds of a whole training step, by output."""
    return select("language_model/step_times_h200.csv", text=text).set_index("output")["ms"]


def at_equal_time(layers: Runs, text: str) -> Runs:
    """Runs at equal time: each output does the steps that fit into the fastest one's full run."""
    ms = step_times(text)
    steps = (STEPS[text] * ms.min() / ms).astype(int)
    layers = layers[layers["text"] == text]
    return layers[layers["steps"] == layers["output"].map(steps)]
