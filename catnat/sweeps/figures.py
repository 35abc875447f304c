"""Figures of plans, as PNG and PDF.

catnat figures curves plan.yaml --tag val/elbo         # from the folders of runs
catnat figures bars plan.yaml --metric test/nll        # from rows
catnat figures bars plan.yaml --baseline head=softmax
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from catnat.sweeps.plan import Plan
from catnat.sweeps.runs import read_pairs
from catnat.sweeps.significance import interval
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
    """Draw one figure."""
    kinds = {"curves": curves, "bars": bars}
    if not words or words[0] not in kinds:
        raise ValueError("expected curves PLAN or bars PLAN; each has --help")
    parser = plan_parser(f"figures {words[0]}", __doc__, 1)
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder")
    if words[0] == "curves":
        parser.add_argument("--tag", default="val/elbo", help="default val/elbo")
    else:
        parser.add_argument("--metric", help="default: the first of the plan")
        text = "show by how much cells are better than the one with these values"
        parser.add_argument("--baseline", nargs="+", default=[], metavar="NAME=VALUE", help=text)
    args = parser.parse_args(words[1:])
    with plt.rc_context(_STYLE):
        figure, name = kinds[words[0]](args)
        save(figure, args.out / f"{name}.png", args.out / f"{name}.pdf")
    return 0


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
    others = [name for name in dict.fromkeys(heads) if name not in COLORS]
    place = others.index(head) if head in others else 0
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


def grouped(sweep: Sweep, inside: Collection[str]) -> dict[str, list[Cell]]:
    """The cells of a plan by what they have in common besides some options."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells_of(sweep.plan, sweep.rows(), sweep.only):
        common = {name: x for name, x in cell.options.items() if name not in inside}
        groups.setdefault(words_of(sweep.plan, common), []).append(cell)
    return groups


def head_of(plan: Plan, cell: Cell) -> str:
    """The head of a cell."""
    return str((plan.options | cell.options).get("head", ""))


# -- curves ----------------------------------------------------------------------------------------


def curves(args: argparse.Namespace) -> tuple[Figure, str]:
    """One panel for each cell of a plan, one band for each head."""
    sweep = Sweep(args.plans[0], args)
    plan = sweep.plan
    groups = grouped(sweep, ["head"])
    figure, axes = panels(groups, 2.7, 2.3)
    heads = [head_of(plan, cell) for cells in groups.values() for cell in cells]
    for panel, cells in zip(axes, groups.values(), strict=True):
        for cell in cells:
            seeds = [] if cell.settings is None else plan.final_seeds(sweep.only)
            runs = [plan.run(cell.options, cell.settings or {}, seed, "final") for seed in seeds]
            seen = [read_curve(sweep.folder / run.name, args.tag) for run in runs]
            head = head_of(plan, cell)
            draw_curves(panel, [curve for curve in seen if len(curve[0])], head, color(head, heads))
    if not any(panel.lines for panel in axes):
        raise ValueError(f"no run of {plan.name} under {sweep.folder} has {args.tag}")
    lines = {str(line.get_label()): line for panel in axes for line in panel.lines}
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel("step")
    figure.supylabel(args.tag)
    return figure, "_".join([plan.name, plan.scale, *args.tag.split("/")])


def draw_curves(axes: Axes, curves: list[Curve], label: str, color: str) -> None:
    """The mean of curves and one standard deviation around it."""
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


# -- bars ------------------------------------------------------------------------------------------


def bars(args: argparse.Namespace) -> tuple[Figure, str]:
    """Means with 95 % intervals: one panel for each value of the plan's columns.

    With a baseline, bars are differences from the cell that has these values in the same panel,
    upward where a cell is better, with Welch's interval.
    """
    sweep = Sweep(args.plans[0], args)
    plan = sweep.plan
    groups = grouped(sweep, set(plan.cells()[0]) - set(plan.columns))
    metric = args.metric or next(iter(plan.metrics))
    baseline = read_pairs(args.baseline, "--baseline")
    if not any(len(cell.values(metric)) > 1 for cells in groups.values() for cell in cells):
        raise ValueError(f"no cell of {plan.name} has two runs with {metric}")
    figure, axes = panels(groups, 3.6, 0.18 * max(map(len, groups.values())) + 0.6)
    heads = [head_of(plan, cell) for cells in groups.values() for cell in cells]
    for panel, (title, cells) in zip(axes, groups.items(), strict=True):
        shown = [cell for cell in cells if len(cell.values(metric)) > 1]
        bases = [
            cell
            for cell in shown
            if all(str(cell.options.get(plan.long(n))) == x for n, x in baseline.items())
        ]
        if baseline and len(bases) != 1:
            raise ValueError(f"--baseline: {len(bases)} cells of {title or plan.name} have it")
        base = bases[0].values(metric) if baseline else []
        if baseline:
            shown.remove(bases[0])
        draw_bars(panel, plan, shown, metric, base, heads)
    figure.supxlabel(f"lead in {metric}" if baseline else metric)
    return figure, f"{plan.name}_{plan.scale}_bars_{metric.replace('/', '_')}"


def draw_bars(
    axes: Axes, plan: Plan, cells: list[Cell], metric: str, base: list[float], heads: list[str]
) -> None:
    """A bar for each cell."""
    better = plan.metrics[metric].better if metric in plan.metrics else None
    sign = -1 if base and better == "lower" else 1
    varied = [name for name in plan.cells()[0] if len({str(x[name]) for x in plan.cells()}) > 1]
    labels = []
    for place, cell in enumerate(cells):
        values = cell.values(metric)
        mean = sign * (fmean(values) - (fmean(base) if base else 0))
        low, high = sorted(sign * end for end in interval(values, base))
        fill = color(head_of(plan, cell), heads)
        axes.barh(place, mean, color=fill, xerr=[[mean - low], [high - mean]], capsize=2)
        names = [name for name in varied if name not in plan.columns]
        labels.append(words_of(plan, {name: cell.options[name] for name in names}))
    axes.set_yticks(range(len(cells)), labels)
    axes.invert_yaxis()
    if not base and cells:
        means = [fmean(cell.values(metric)) for cell in cells]
        spread = max(max(means) - min(means), 1e-9)
        axes.set_xlim(left=min(0, min(means)) if min(means) < 2 * spread else min(means) - spread)
