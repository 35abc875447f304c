"""Draw files of curves: the mean of each head's runs, and one standard deviation around it.

python paper/curves.py paper/games/breakout_short_curve.csv paper/mechanism/certainty.csv

A picture has the name of its file, with .png: each metric by step, then two metrics by each other.
If some runs are shorter than others, every run is a line.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

LABELS = {"step": "thousand steps", "val/loss": "validation loss", "val/kl": "KL",
          "rollout/ep_rew_mean": "return, last 100 games"}  # fmt: skip


def draw(path):
    """One picture."""
    curves = defaultdict(lambda: defaultdict(list))  # (head, name): {seed: values}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            for name in ("step", *(name for name in row if "/" in name)):
                scale = 1000 if name == "step" else 1
                curves[row["head"], name][row["seed"]].append(float(row[name]) / scale)
    heads, names = (list(dict.fromkeys(key[place] for key in curves)) for place in (0, 1))
    shown = [("step", name) for name in names[1:]] + [tuple(names[1:])] * (len(names) == 3)
    ragged = len({len(each) for by_seed in curves.values() for each in by_seed.values()}) > 1
    figure, panels = plt.subplots(1, len(shown), figsize=(3.2 * len(shown), 3), squeeze=False,
                                  layout="constrained")  # fmt: skip
    for axes, (across, up) in zip(panels[0], shown, strict=True):
        for head in heads:
            x, y = (list(curves[head, name].values()) for name in (across, up))
            (line,) = axes.plot([], [], label=f"{head}, n = {len(y)}")
            if ragged:
                for each in zip(x, y, strict=True):
                    axes.plot(*each, color=line.get_color(), lw=0.9)
                continue
            x, y = np.array(x), np.array(y)
            axes.plot(x.mean(0), y.mean(0), color=line.get_color())
            if across == "step":
                band = y.mean(0) - y.std(0, ddof=1), y.mean(0) + y.std(0, ddof=1)
                axes.fill_between(x.mean(0), *band, color=line.get_color(), alpha=0.2, lw=0)
        axes.set(xlabel=LABELS[across], ylabel=LABELS[up])
        if across != "step":
            axes.invert_xaxis()
    lines = panels[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", ncols=len(shown), frameon=False, fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        draw(Path(each))
