"""Draw the pictures of this folder from its rows.

python paper/figures.py                   # all of them
python paper/figures.py factors breakout  # some of: factors, longest, breakout
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from measures import PAPER, curves, factor, log_factors, read, select
from studies import (
    ESTIMATORS,
    HEADS,
    INTERVENTIONS,
    LONGEST,
    NETWORKS,
    OTHER_DATA,
    SETTINGS,
    long_convolutional,
    mechanism,
    networks,
    noise,
    other_data,
)

COLORS = {"softmax": "#0072B2", "sigmoid": "#009E73", "natural": "#D55E00"}
MARKS = {8: ("o", "#56B4E9"), 16: ("s", "#E69F00"), 32: ("D", "#000000")}  # by K
Logs = Sequence[float]  # logarithms of factors, by seed


def draw_factors(axes: Axes, rows: Mapping[str, Sequence[Logs]], title: str) -> None:
    """A line for each row of the table, a mark for each K that was run."""
    for place, logs_by_size in enumerate(rows.values()):
        for K, height, logs in zip(MARKS, (-0.22, 0.0, 0.22), logs_by_size, strict=True):
            if len(logs):
                middle, low, high = factor(logs)
                shape, color = MARKS[K]
                axes.plot([low, high], [place + height] * 2, color=color, lw=1.3)
                axes.plot(middle, place + height, shape, color=color, ms=4.5)
    axes.axvline(1, color="#888888", lw=1)
    axes.axvline(3, color="#888888", lw=1, ls=":")
    axes.set(xscale="log", xlim=(0.25, 7), title=title, xlabel="times fewer steps than softmax")
    axes.set_xticks([0.25, 0.5, 1, 2, 3, 4, 6], ["0.25", "0.5", "1", "2", "3", "4", "6"])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", color="#eeeeee", lw=6)
    axes.set_axisbelow(True)


def other_studies() -> dict[str, list[Logs]]:
    """Sigmoid with less noise, in other networks and on other data, at K = 8, 16 and 32."""
    rows: dict[str, list[Logs]] = {}
    for estimator, count in SETTINGS:
        logs = log_factors(*noise(estimator, count), 10000)
        rows[f"{estimator}, draws: {count}"] = [logs, [], []]
    for encoder, decoder in NETWORKS:
        for steps in (20000, 60000):
            if len((runs := networks(encoder, decoder, steps))[0]):
                rows[f"{encoder} to {decoder}, {steps:,}"] = [[], log_factors(*runs), []]
    rows["conv to conv, 60,000"] = [[], long_convolutional(), []]
    for (study, _, _, K, steps), estimator in product(OTHER_DATA, ESTIMATORS):
        logs = log_factors(*other_data(study, K, estimator), steps)
        if len(logs):
            rows.setdefault(f"{study}, {estimator}", [[], [], []])[list(MARKS).index(K)] = logs
    return rows


def factors() -> None:
    """Factors by intervention."""
    table = {
        words: [log_factors(*mechanism(num_categories=K, **options)) for K in MARKS]
        for words, options in INTERVENTIONS.items()
    }
    first_head = list(table).index("natural")
    parts = list(table.items())
    figure, panels = plt.subplots(1, 3, figsize=(13, 5.2), layout="constrained")
    draw_factors(panels[0], dict(parts[:first_head]), "sigmoid: settings, then coupling")
    draw_factors(panels[1], dict(parts[first_head:]), "other heads")
    draw_factors(panels[2], other_studies(), "noise, networks, data")
    for K, (shape, color) in MARKS.items():
        panels[0].plot([], [], shape, color=color, ms=4.5, label=f"K = {K}")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(PAPER / "mechanism" / "factors.png", dpi=130)


def longest() -> None:
    """Validation loss over 192,000 steps."""
    figure, panels = plt.subplots(1, 4, figsize=(9.5, 2.6), layout="constrained")
    for axes, (data, N, K) in zip(panels, LONGEST, strict=True):
        for head in HEADS:
            cell = {"variant": data, "num_latents": N, "num_categories": K}
            losses = curves(select("vae/longest_curve.csv", head=head, **cell))
            thousands = losses.columns / 1000
            style = "--" if head == "natural" else "-"
            axes.plot(thousands, losses.mean(), style, color=COLORS[head], label=head)
            bounds = losses.min(), losses.max()
            axes.fill_between(thousands, *bounds, color=COLORS[head], alpha=0.2, lw=0)
        axes.set(title=f"({N}, {K}) {data}", xlabel="thousand steps")
    panels[0].set_ylabel("validation loss (nats)")
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(PAPER / "vae" / "longest.png", dpi=130)


def breakout() -> None:
    """Returns of PPO in training, a line for each run."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
    titles = ("CleanRL's settings (rate 0.00025)", "best of a short search")
    runs = read("games/breakout_curve.csv")
    for (_, run), (_, returns) in zip(
        runs.iterrows(), curves(runs, "rollout/ep_rew_mean").iterrows(), strict=True
    ):
        axes = panels[int(run["learning_rate"] != 0.00025)]
        points = returns.dropna()
        axes.plot(points.index / 1e6, points, color=COLORS[run["head"]], lw=1)
    for axes, title, rates in zip(panels, titles, (("", ""), (", 0.002", ", 0.001")), strict=True):
        axes.set(title=title, xlabel="million steps")
        for head, rate in zip(("softmax", "natural"), rates, strict=True):
            axes.plot([], [], color=COLORS[head], label=f"{head}{rate}")
        axes.legend(frameon=False)
    panels[0].set_ylabel("return, last 100 games")
    figure.savefig(PAPER / "games" / "breakout.png", dpi=130)


PICTURES: dict[str, Callable[[], None]] = {
    "factors": factors,
    "longest": longest,
    "breakout": breakout,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help=", ".join(PICTURES))
    pictures = parser.parse_args().pictures or [*PICTURES]
    if unknown := [picture for picture in pictures if picture not in PICTURES]:
        parser.error(f"unknown picture {unknown[0]!r}; choose from {', '.join(PICTURES)}")
    for picture in pictures:
        PICTURES[picture]()
