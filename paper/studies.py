"""Which rows of this folder belong to which question."""

from __future__ import annotations

from typing import Any

from measures import Runs, by_seed, select

Pair = list[Runs]
TREES = ("sigmoid", "natural")
HEADS = ("softmax", *TREES)


def heads(path: str, first: str = "softmax", second: str = "sigmoid", **options: Any) -> Pair:
    """Runs of two heads by seed."""
    return [by_seed(path, head=head, **options) for head in (first, second)]


# -- VAEs ------------------------------------------------------------------------------------------

SMALL = [(N, K, data) for N, K in ((10, 8), (20, 16)) for data in ("gray", "binary")]
LONGEST = [(N, K, data) for N, K in ((10, 8), (20, 32)) for data in ("gray", "binary")]
SGD = {"optimizer": "sgd", "gradient_clip": 0, "learning_rate": [0.001, 0.003, 0.01, 0.03]}


def vae(head: str, N: int, K: int, variant: str, **options: Any) -> Runs:
    """The convolutional VAE: 60,000 steps of Adam at rate 0.001, unless options differ."""
    setting = {"optimizer": "adam", "learning_rate": 0.001, "max_steps": 60000} | options
    size = {"num_latents": N, "num_categories": K, "variant": variant}
    setting |= {"model": "vae", "stage": "final", "lr_decay": 1.0}
    return by_seed("vae/runs.csv", head=head, **setting, **size)


# -- the factor of steps ---------------------------------------------------------------------------

CHANGED = (  # heads of the study
    *("natural", "sigmoid-rotated-3", "natural-rotated-3", "sigmoid-chain", "sigmoid-shuffled"),
    *("sigmoid-flat", "sigmoid-steep", "softmax-haar", "softmax-paths", "softmax-steep"),
    *("softmax-scaled-2", "softmax-scaled-4", "sigmoid-ungated", "natural-ungated"),
    *("sigmoid-natural-gradient-0.1", "softmax-natural-gradient-0.1"),
)
OPPOSED = {"-1": "sigmoid-opposed-1", "-0.5": "sigmoid-opposed-0.5"}
COUPLED = OPPOSED | {C: f"sigmoid-coupled-{C}" for C in ("0", "0.25", "0.5", "1", "2")}
SETTINGS = (("gumbel", 1), ("gumbel", 8), ("gumbel", 64), ("score-function", 64))
NETWORKS = (  # encoder, decoder
    *(("dense", "dense"), ("conv", "conv"), ("dense", "conv"), ("conv", "dense")),
    ("conv-plain", "conv-plain"),
)
GUMBEL = "straight-through Gumbel"
ESTIMATORS = {"gumbel": GUMBEL, "straight-through": "straight-through, 1 % unimix"}
OTHER_DATA = (  # study, words, N, K, steps
    ("glyphs", "letters of free fonts", 20, 16, 20000),
    ("glyphs", "letters of free fonts", 20, 32, 20000),
    ("frames", "frames of Breakout, 64 x 64, stopped early", 32, 32, 6250),
)


def mechanism(K: int, *names: str, **options: Any) -> Pair:
    """Two heads: gray MNIST, 60,000 steps, Adam at rate 0.001, unless the options differ."""
    setting: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.001, "variant": "gray"}
    setting |= {"plans": "mechanism", "stage": "final", "max_steps": 60000} | options
    return heads("mechanism/runs.csv", *names, num_categories=K, **setting)


def probing(K: int, *names: str, **options: Any) -> Pair:
    """Two heads with another decoder, a price on uneven use, or more draws of z."""
    setting: dict[str, Any] = {"decoder": "plain", "even": 0.0, "draws": 1} | options
    setting |= {"plans": "probing", "max_steps": 60000}
    return heads("mechanism/runs.csv", *names, num_categories=K, **setting)


def noise(setting: tuple[str, int], *names: str) -> Pair:
    """Two heads with an estimator and a number of draws."""
    estimator, count = setting
    return heads("without_noise/curves.csv", *names, estimator=estimator, draws=count)


def networks(encoder: str, decoder: str) -> Pair:
    """Softmax and sigmoid with an encoder and a decoder."""
    return heads("architecture/curves.csv", encoder=encoder, decoder=decoder)


def other_data(study: str, K: int, estimator: str, head: str = "sigmoid") -> Pair:
    """Softmax and a head on other data."""
    where = {"num_categories": K, "estimator": estimator}
    return heads(f"{study}/curves.csv", "softmax", head, **where)


def interventions() -> dict[str, list[Pair]]:
    """Softmax and the head beside it at K = 8, 16 and 32, for each row of the table."""

    def pairs(make: Any, *names: str, **options: Any) -> list[Pair]:
        return [make(K, "softmax", *names, **options) for K in (8, 16, 32)]

    sgd = {"optimizer": "sgd", "learning_rate": [0.003, 0.01]}
    return {
        "Adam, rate 0.0005": pairs(mechanism, learning_rate=0.0005),
        "Adam, rate 0.001": pairs(mechanism),
        "Adam, rate 0.002": pairs(mechanism, learning_rate=0.002),
        "plain SGD, best rates": pairs(mechanism, **sgd),
        "one draw of z, again": pairs(probing),
        "eight draws of z": pairs(probing, draws=8),
        "tree in the decoder": pairs(probing, decoder="tree"),
        "copies in the decoder": pairs(probing, decoder="copies"),
        "price on uneven use": pairs(probing, even=1.0),
        **{f"coupling {C}": pairs(mechanism, head) for C, head in COUPLED.items()},
        **{head: pairs(mechanism, head) for head in CHANGED},
    }


# -- output layers ---------------------------------------------------------------------------------

OUTPUTS = "language_model/outputs.csv"
STEPS = {"words": 1000, "pairs": 1000, "docs": 800}
EQUAL_TIME = {"softmax": 427, "adaptive-2": 646, "hybrid-1024": 800}  # steps on "docs"


def output(text: str, name: str, steps: int) -> Runs:
    """Runs of an output layer, at the rate with the best validation of seed 0."""
    runs = select(OUTPUTS, text=text, output=name, steps=steps)
    first = runs[runs["seed"] == 0]
    return runs[runs["rate"] == first.loc[first["val"].idxmin(), "rate"]]


def outputs_of(text: str) -> list[str]:
    """The output layers that learned a text."""
    return list(dict.fromkeys(select(OUTPUTS, text=text)["output"]))
