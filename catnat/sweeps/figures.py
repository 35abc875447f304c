"""Learning curves of a plan's runs, mean and spread over seeds, as PNG and PDF.

catnat figures plan.yaml --tag val/elbo         # from the event files in the folders of runs
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from catnat.sweeps.sweep import Sweep, plan_parser
from catnat.sweeps.tables import Cell, cells_of, words_of

COLORS = {  # of the heads, everywhere; distinguishable by everybody, and in gray
    "softmax": "#0072B2",
    "sparsemax": "#E69F00",
    "sigmoid": "#009E73",
    "natural": "#D55E00",
}
_OTHER_COLORS = ("#CC79A7", "#56B4E9", "#000000", "#999999")
_STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "pdf.fonttype": 42,  # text stays text
}
Curve = tuple[np.ndarray, np.ndarray]  # steps and values


def main(words: list[str]) -> int:
    """Draw one panel for each cell of a plan, with the mean curve of each head."""
    parser = plan_parser("figures", __doc__, 1)
    parser.add_argument("--tag", default="val/elbo", help="default val/elbo")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder")
    args = parser.parse_args(words)
    sweep = Sweep(args.plans[0], args)
    plan = sweep.plan
    name = "_".join([*plan.label.split(", scale "), *args.tag.split("/")])
    with plt.rc_context(_STYLE):
        figure = draw(sweep, args.tag)
        save(figure, args.out / f"{name}.png", args.out / f"{name}.pdf")
    return 0


def draw(sweep: Sweep, tag: str) -> Figure:
    """The curves of the final runs of a plan."""
    plan = sweep.plan
    groups: dict[str, list[Cell]] = {}
    for cell in cells_of(plan, sweep.rows()):
        common = {name: x for name, x in cell.options.items() if name != "head"}
        groups.setdefault(words_of(plan, common), []).append(cell)
    figure, axes = panels(groups, 2.7, 2.3)
    heads = [str(cell.options.get("head", "")) for cells in groups.values() for cell in cells]
    for panel, cells in zip(axes, groups.values(), strict=True):
        for cell in cells:
            seeds = [] if cell.settings is None else plan.final_seeds
            runs = [plan.run(cell.options, cell.settings or {}, seed, "final") for seed in seeds]
            curves = [read_curve(sweep.folder / run.name, tag) for run in runs]
            head = str(cell.options.get("head", ""))
            draw_curves(panel, curves, head, color(head, heads))
    if not any(panel.lines for panel in axes):
        raise ValueError(f"no run of {plan.name} under {sweep.folder} has {tag}")
    lines = {str(line.get_label()): line for panel in axes for line in panel.lines}
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel("step")
    figure.supylabel(tag)
    return figure


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure to files, and print their names."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)
        print(path)
    plt.close(figure)


def color(head: str, heads: Iterable[str] = ()) -> str:
    """The color of a head; ``sigmoid-x`` has that of sigmoid, other heads get what is left."""
    head = next((name for name in COLORS if head.startswith(f"{name}-")), head)
    other_heads = [name for name in dict.fromkeys(heads) if name not in COLORS]
    place = other_heads.index(head) if head in other_heads else 0
    return COLORS.get(head) or _OTHER_COLORS[place % len(_OTHER_COLORS)]


def panels(titles: Collection[str], width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, four in a row."""
    columns = min(4, len(titles))
    rows = math.ceil(len(titles) / columns)
    size = (width * columns + 0.3, height * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for panel in axes.flat[len(titles) :]:
        panel.set_visible(False)
    used = list(axes.flat[: len(titles)])
    for panel, title in zip(used, titles, strict=True):
        panel.set_title(title)
    return figure, used


def draw_curves(axes: Axes, curves: list[Curve], label: str, color: str) -> None:
    """The mean of those curves that have points, and one standard deviation around it."""
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return
    first = max(steps[0] for steps, _ in curves)
    last = min(steps[-1] for steps, _ in curves)
    grid = np.linspace(first, last, 200)
    values = np.stack([np.interp(grid, *curve) for curve in curves])
    mean = values.mean(0)
    dashes = (0, (4, 2)) if label == "natural" else "-"  # shows sigmoid where both coincide
    marker = "o" if first == last else ""
    axes.plot(grid, mean, label=label, linewidth=1.4, marker=marker, color=color, linestyle=dashes)
    if len(curves) > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(grid, mean - spread, mean + spread, color=color, alpha=0.2)


def read_curve(folder: Path, tag: str) -> Curve:
    """Steps and values of a scalar in the event files of a run; empty without any."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    values: dict[int, float] = {}
    for path in sorted(folder.glob("**/events.out.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == tag and value.HasField("simple_value"):
                    values[event.step] = value.simple_value
    steps = sorted(values)
    return np.array(steps, float), np.array([values[step] for step in steps])
