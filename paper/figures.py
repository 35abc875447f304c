"""Draw the pictures of this folder from its rows.

    python paper/figures.py                   # all of them
    python paper/figures.py factors breakout  # some of: factors, longest, breakout

``factors`` also prints its table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import mechanism_claims
import numpy as np
import wider
from matplotlib.axes import Axes
from measures import BOTH, PAPER, SIZES, Pair, factor, log_factors, read, select

COLORS = {"softmax": "#0072B2", "sigmoid": "#009E73", "natural": "#D55E00"}
MARKS = {"8": ("o", "#56B4E9"), "16": ("s", "#E69F00"), "32": ("D", "#000000")}  # by K


def draw_factors(axes: Axes, rows: Mapping[str, Sequence[Pair]], title: str) -> None:
    """A line for each row of the table, a mark for each K."""
    for place, pairs in enumerate(rows.values()):
        for K, height, (softmax, head) in zip(SIZES, (-0.22, 0.0, 0.22), pairs, strict=True):
            if softmax and head:
                middle, low, high = factor(log_factors((softmax, head)))
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


def factors() -> None:
    """Factors by intervention."""
    for claim in mechanism_claims.factors():
        numbers = [str(n) if isinstance(n, int) else f"{n:.1f}" for n in claim.computed]
        print(claim.sentence.format(*numbers).replace("-0.0", "0.0"))
    table = mechanism_claims.factor_table()
    first_head = list(table).index("natural")
    parts = list(table.items())
    figure, panels = plt.subplots(1, 3, figsize=(13, 5.2), layout="constrained")
    draw_factors(panels[0], dict(parts[:first_head]), "sigmoid: settings, then coupling")
    draw_factors(panels[1], dict(parts[first_head:]), "other heads")
    draw_factors(panels[2], wider.factor_table(), "noise, networks, data")
    for K, (shape, color) in MARKS.items():
        panels[0].plot([], [], shape, color=color, ms=4.5, label=f"K = {K}")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(PAPER / "mechanism" / "factors.png", dpi=130)


def longest() -> None:
    """Validation loss over 192,000 steps."""
    columns = [(N, K, data) for N, K in (("10", "8"), ("20", "32")) for data in ("gray", "binary")]
    figure, panels = plt.subplots(1, 4, figsize=(9.5, 2.6), layout="constrained")
    for axes, (N, K, data) in zip(panels, columns, strict=True):
        for head in (*BOTH, "natural"):
            where = f"num_latents={N} num_categories={K} variant={data} head={head}"
            runs = select("vae/longest_curve.csv", where)
            steps = [int(name.removeprefix("val/loss_")) for name in runs[0] if "loss" in name]
            losses = np.array([[float(run[f"val/loss_{step}"]) for step in steps] for run in runs])
            style = "--" if head == "natural" else "-"
            thousands = np.array(steps) / 1000
            axes.plot(thousands, losses.mean(0), style, color=COLORS[head], label=head)
            bounds = losses.min(0), losses.max(0)
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
    metric = "rollout/ep_rew_mean_"
    for run in read("games/breakout_curve.csv"):
        axes = panels[int(run["learning_rate"] != "0.00025")]
        points = {int(name.removeprefix(metric)): run[name] for name in run if metric in name}
        steps = np.array(sorted(points))
        returns = [float(points[step]) for step in steps]
        axes.plot(steps / 1e6, returns, color=COLORS[run["head"]], lw=1)
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
    for picture in sys.argv[1:] or PICTURES:
        PICTURES[picture]()
