"""Draw learning curves of a plan's runs, with mean and spread over seeds, as PNG and PDF.

catnat figures plan.yaml --tag val/elbo         # from the event files in the folders of runs
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from catnat.sweeps.significance import SIGNIFICANT
from catnat.sweeps.sweep import Sweep
from catnat.sweeps.tables import cells_of
from catnat.sweeps.words import plan_parser

COLORS = {  # of heads, by their names; distinguishable by everybody, and in gray
    "softmax": "#0072B2",
    "sparsemax": "#E69F00",
    "sigmoid": "#009E73",
    "natural": "#D55E00",
}
Curve = np.ndarray  # steps and values, (2, n)
Panel = dict[str, list[Curve]]  # by label


def main(words: list[str]) -> int:
    """Draw one panel for each cell of a plan, with the mean curve of each head."""
    parser = plan_parser("figures", __doc__)
    parser.add_argument("--tag", default="val/elbo", help="tag of the curves (default: val/elbo)")
    out = "folder of the pictures (default: figures)"
    parser.add_argument("--out", type=Path, default=Path("figures"), help=out)
    args = parser.parse_args(words)
    for sweep in [Sweep.load(name, args) for name in args.plans]:
        plan = sweep.plan
        panels: dict[str, Panel] = {}
        for cell in cells_of(plan, sweep.rows()):
            options = dict(cell.options)
            head = str(options.pop("head", ""))
            title = ", ".join(
                value if isinstance(value, str) else f"{plan.short(name)} = {value}"
                for name, value in options.items()
            )
            curves = [read_curve(sweep.folder_of(run), args.tag) for run in cell.runs]
            panels.setdefault(title, {})[head] = curves
        name = "_".join([*plan.label.split(", scale "), *args.tag.split("/")])
        draw(panels, args.tag, args.out / f"{name}.png", args.out / f"{name}.pdf")
    return 0


Band = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # (runs, n) to two curves


def deviation(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One standard deviation around the mean."""
    spread = values.std(0, ddof=1)
    return values.mean(0) - spread, values.mean(0) + spread


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Student's 95 % interval of the mean."""
    half = stats.t.ppf(1 - SIGNIFICANT / 2, len(values) - 1) * stats.sem(values)
    return values.mean(0) - half, values.mean(0) + half


def draw(panels: dict[str, Panel], tag: str, *paths: Path, band: Band = deviation) -> None:
    """Draw panels with titles, four in a row, to files, and print the names of the files."""
    colors = dict(COLORS)  # and those of further labels
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context({"axes.grid": True, "pdf.fonttype": 42}):  # text stays text
        figure = Figure(figsize=(3 * columns + 0.3, 2.5 * rows + 0.5), layout="constrained")
        lines: dict[str, Any] = {}
        for number, (title, panel) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, columns, number, title=title)
            for label, curves in panel.items():
                color = colors.setdefault(label, f"C{len(colors)}")
                draw_curves(axes, curves, label, color, band)
            lines |= {str(line.get_label()): line for line in axes.lines}
        if not lines:
            raise ValueError(f"no run has curves of {tag}")
        figure.legend(lines.values(), lines, loc="outside upper center", ncols=columns)
        figure.supxlabel("step")
        figure.supylabel(tag)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=200)
            print(path)


def draw_curves(
    axes: Axes, curves: list[Curve], label: str, color: str, band: Band = deviation
) -> None:
    """Draw the mean of those curves that have points, with a band around it."""
    curves = [curve for curve in curves if curve.size]
    if not curves:
        return
    first = max(steps[0] for steps, _ in curves)
    last = min(steps[-1] for steps, _ in curves)
    grid = np.linspace(first, last, 200)
    values = np.stack([np.interp(grid, *curve) for curve in curves])
    mean = values.mean(0)
    dashes = "--" if label == "natural" else "-"  # shows sigmoid where both coincide
    marker = "o" if first == last else ""
    axes.plot(grid, mean, label=label, marker=marker, color=color, linestyle=dashes)
    if len(curves) > 1:
        axes.fill_between(grid, *band(values), color=color, alpha=0.2)


def read_curve(folder: Path, tag: str) -> Curve:
    """Steps and values of a scalar in the event files of a run; empty without any."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    values = {}
    for path in sorted(folder.glob("**/events.out.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == tag and value.HasField("simple_value"):
                    values[event.step] = value.simple_value
    return np.array(sorted(values.items()), float).reshape(-1, 2).T
