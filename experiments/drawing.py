"""Figures for print: one colour for a head everywhere, panels in rows, PNG and PDF."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOURS = {  # told apart by everybody, and in gray
    "softmax": "#0072B2",
    "sparsemax": "#E69F00",
    "sigmoid": "#009E73",
    "natural": "#D55E00",
}
_DASHES = {"natural": (0, (4, 2))}  # where it coincides with sigmoid both are seen
_OTHERS = ("#CC79A7", "#56B4E9", "#000000", "#999999")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "pdf.fonttype": 42,  # text stays text
}
ROOT_NORM = FuncNorm(
    (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * x**2), vmin=-1, vmax=1
)
Curve = tuple[np.ndarray, np.ndarray]  # steps and values


def colour(head: str, heads: Iterable[str] = ()) -> str:
    """The colour of a head; heads defined elsewhere get the rest, in their order."""
    others = [each for each in heads if each not in COLOURS]
    return COLOURS.get(head) or _OTHERS[others.index(head) % len(_OTHERS) if head in others else 0]


def panels(
    count: int, width: float = 2.7, height: float = 2.3, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, four in a row."""
    plt.rcParams.update(_STYLE)
    columns = min(4, count)
    rows = math.ceil(count / columns)
    size = (width * columns + 0.3, height * rows + 0.5)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **options
    )
    for empty in axes.flat[count:]:
        empty.set_visible(False)
    return figure, list(axes.flat[:count])


def save(figure: Figure, out: Path, name: str) -> list[Path]:
    """Write both files."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.png", out / f"{name}.pdf"]
    for path in paths:
        figure.savefig(path, dpi=200)
    plt.close(figure)
    return paths


def draw_band(axes: Axes, curves: list[Curve], colour: str, label: str) -> None:
    """The mean of curves, and one standard deviation around it."""
    last = min(steps[-1] for steps, _ in curves)
    first = max(steps[0] for steps, _ in curves)
    grid = np.linspace(first, last, 200)
    values = np.stack([np.interp(grid, steps, values) for steps, values in curves])
    mean = values.mean(0)
    style = _DASHES.get(label, "-")
    marker = "o" if first == last else ""  # a line of one point could not be seen
    line: dict[str, Any] = {"color": colour, "linewidth": 1.4, "linestyle": style}
    axes.plot(grid, mean, label=label, marker=marker, **line)
    if len(curves) > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(grid, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)


def draw_each(axes: Axes, curves: list[Curve], colour: str, label: str) -> None:
    """A line for each curve."""
    for i, (steps, values) in enumerate(curves):
        grid = np.linspace(steps[0], steps[-1], 200)
        line: dict[str, Any] = {"color": colour, "linestyle": _DASHES.get(label, "-")}
        marker = "o" if len(steps) == 1 else ""
        shown = np.interp(grid, steps, values)
        axes.plot(grid, shown, label="" if i else label, linewidth=1.2, marker=marker, **line)


def thousands(axes: Axes) -> None:
    """Steps as 10k or 2.5M."""
    axes.xaxis.set_major_formatter(lambda x, _: _short(x))
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _short(x: float) -> str:
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if x >= unit:
            return f"{x / unit:g}{name}"
    return f"{x:g}"


def legend_above(figure: Figure, axes: Axes, title: str = "") -> None:
    """One legend for all panels, outside of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, title=title
    )


def mosaic(images: np.ndarray, gap: int = 1) -> np.ndarray:
    """Images (rows, columns, H, W) in [0, 1] as one picture, dark on white."""
    rows, columns, height, width = images.shape
    picture = np.ones((rows * (height + gap) - gap, columns * (width + gap) - gap))
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + gap), column * (width + gap)
            picture[top : top + height, left : left + width] = 1 - images[row, column]
    return picture
