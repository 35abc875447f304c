"""Figures of plans, as PNG and PDF.

    catnat figures curves plan.yaml --tag val/elbo         # from the folders of runs
    catnat figures bars plan.yaml --metric test/nll        # from rows
    catnat figures bars plan.yaml --baseline head=softmax

``--out`` is the folder they are written to (default: figures).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from catnat.sweeps.plan import Plan
from catnat.sweeps.runs import Run
from catnat.sweeps.significance import interval
from catnat.sweeps.sweep import Sweep, add_plan_options, read_only
from catnat.sweeps.tables import Cell, cells_of

COLORS = {  # of the heads, everywhere; distinguishable by everybody, and in gray
    "softmax": "#0072B2",
    "sparsemax": "#E69F00",
    "sigmoid": "#009E73",
    "natural": "#D55E00",
}
_OTHERS = ("#CC79A7", "#56B4E9", "#000000", "#999999")
_DASHES = {"natural": (0, (4, 2))}  # where it coincides with sigmoid both are seen
_STYLE: dict[Any, Any] = {
    **{"font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "legend.fontsize": 8.5},
    **{"xtick.labelsize": 8, "ytick.labelsize": 8, "axes.axisbelow": True, "axes.grid": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#dddddd"},
    "pdf.fonttype": 42,  # text stays text
}
_LABELS = {
    "val/elbo": "validation ELBO (nats)",
    "test/nll": "test NLL (nats)",
    "fim/off_diagonal_mass": "off-diagonal Fisher mass",
    "fim/saturated": "share of saturated scores",
    "rollout/ep_rew_mean": "return, last 100 games",
}


def main(argv: list[str] | None = None) -> int:
    """Draw one figure."""
    args = build_parser().parse_args(argv)
    with plt.rc_context(_STYLE):
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            figure, name = args.draw(args)
        except (OSError, ValueError) as error:
            print(f"catnat figures: {error}", file=sys.stderr)
            return 2
        for path in (args.out / f"{name}.png", args.out / f"{name}.pdf"):
            figure.savefig(path, dpi=200)
            print(path)
        plt.close(figure)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """One command for each kind of figure."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("catnat figures", description=description, allow_abbrev=False)
    kinds = parser.add_subparsers(required=True, metavar="FIGURE")
    for name, draw, text in (
        ("curves", curves, "a scalar over training, mean and spread over seeds"),
        ("bars", bars, "means with 95 %% intervals"),
    ):
        kind = kinds.add_parser(name, help=text)
        add_plan_options(kind, 1)
        kind.add_argument("--out", type=Path, default=Path("figures"), help="folder")
        kind.set_defaults(draw=draw)
        if draw is curves:
            kind.add_argument("--tag", default="val/elbo", help="default val/elbo")
        else:
            kind.add_argument("--metric", help="default: the first of the plan")
            text = "show by how much cells are better than that with these values"
            kind.add_argument("--baseline", nargs="+", metavar="NAME=VALUE", help=text)
    return parser


def color(head: str, heads: Iterable[str] = ()) -> str:
    """The color of a head; ``sigmoid-x`` has that of sigmoid, other heads get what is left."""
    head = next((name for name in COLORS if head.startswith(f"{name}-")), head)
    others = [each for each in dict.fromkeys(heads) if each not in COLORS]
    return COLORS.get(head) or _OTHERS[others.index(head) % len(_OTHERS) if head in others else 0]


def panels(count: int, width: float = 2.7, height: float = 2.3) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, four in a row."""
    columns = min(4, count)
    rows = math.ceil(count / columns)
    size = (width * columns + 0.3, height * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for empty in axes.flat[count:]:
        empty.set_visible(False)
    return figure, list(axes.flat[:count])


# -- rows and runs ---------------------------------------------------------------------------------


def _grouped(
    args: argparse.Namespace, inside: Iterable[str]
) -> tuple[Sweep, dict[str, list[Cell]]]:
    """The cells of a plan by what they have in common, without some options."""
    sweep = Sweep(args.plans[0], args)
    hidden, groups = set(inside), dict[str, list[Cell]]()
    for cell in cells_of(sweep.plan, sweep.rows(), sweep.only):
        shown = {name: x for name, x in cell.options.items() if name not in hidden}
        groups.setdefault(_words(sweep.plan, shown), []).append(cell)
    return sweep, groups


def _words(plan: Plan, options: dict[str, Any]) -> str:
    pairs = options.items()
    return ", ".join(x if isinstance(x, str) else f"{plan.short(n)} = {x}" for n, x in pairs)


def curves(args: argparse.Namespace) -> tuple[Figure, str]:
    """One panel for each cell of a plan, one band for each head."""
    sweep, groups = _grouped(args, ["head"])
    plan = sweep.plan
    figure, axes = panels(len(groups))
    heads = [_head(plan, cell) for cells in groups.values() for cell in cells]
    drawn = 0
    for panel, (title, cells) in zip(axes, groups.items(), strict=True):
        for cell in cells:
            if cell.settings is None:
                continue
            seeds = plan.final_seeds(sweep.only)
            made = [plan.run(cell.options, cell.settings, seed, "final") for seed in seeds]
            found = [read_curve(sweep.folder, run, args.tag) for run in made]
            known = [each for each in found if len(each[0])]
            if known:
                draw_curves(panel, known, _head(plan, cell), heads)
            drawn += len(known)
        panel.set_title(title)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}")
        panel.xaxis.set_major_locator(MaxNLocator(4))
    if not drawn:
        raise ValueError(f"no run of {plan.name} under {sweep.folder} has {args.tag}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=max(1, len(labels)), frameon=False
    )
    figure.supxlabel("step", fontsize=9)
    figure.supylabel(_LABELS.get(args.tag, args.tag), fontsize=9)
    return figure, "_".join(filter(None, (plan.name, plan.scale, *args.tag.split("/"))))


def draw_curves(
    axes: Axes, curves: list[tuple[np.ndarray, np.ndarray]], head: str, heads: list[str]
) -> None:
    """The mean of curves and one standard deviation around it."""
    style: dict[str, Any] = {"color": color(head, heads), "linestyle": _DASHES.get(head, "-")}
    first, last = max(s[0] for s, _ in curves), min(s[-1] for s, _ in curves)
    grid = np.linspace(first, last, 200)
    values = np.stack([np.interp(grid, *curve) for curve in curves])
    mean, marker = values.mean(0), "o" if first == last else ""
    axes.plot(grid, mean, label=head, linewidth=1.4, marker=marker, **style)
    if len(curves) > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(grid, mean - spread, mean + spread, color=style["color"], alpha=0.2)


def read_curve(folder: Path, run: Run, tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a scalar in the event files of a run; empty without any."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[int, float] = {}
    for path in sorted((folder / run.name).glob("**/events.out.*")):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        if tag in events.Tags()["scalars"]:
            points |= {each.step: each.value for each in events.Scalars(tag)}
    steps = sorted(points)
    return np.array(steps, float), np.array([points[step] for step in steps])


def bars(args: argparse.Namespace) -> tuple[Figure, str]:
    """Means with 95 % intervals: one panel for each value of the plan's columns.

    With a baseline, bars are differences from the cell that has these values in the same panel,
    upward where a cell is better, with Welch's interval.
    """
    plan = Sweep(args.plans[0], args).plan
    names = [name for key in plan.grid for name in key.split()]
    _, groups = _grouped(args, [name for name in names if name not in plan.columns])
    metric = args.metric or next(iter(plan.metrics))
    wanted = read_only(args.baseline) if args.baseline else {}
    longest = max(map(len, groups.values()), default=1)
    figure, axes = panels(len(groups), 3.6, 0.18 * longest + 0.6)
    heads = [_head(plan, cell) for cells in groups.values() for cell in cells]
    drawn = 0
    for panel, (title, cells) in zip(axes, groups.items(), strict=True):
        shown = [cell for cell in cells if len(cell.values(metric)) > 1]
        base: list[float] = []
        if wanted:
            found = [cell for cell in shown if _has(plan, cell, wanted)]
            if len(found) != 1:
                raise ValueError(f"--baseline: {len(found)} cells of {title or plan.name} have it")
            base = found[0].values(metric)
            shown = [cell for cell in shown if cell is not found[0]]
        draw_bars(panel, plan, shown, metric, base, heads)
        panel.set_title(title)
        drawn += len(shown)
    if not drawn:
        raise ValueError(f"no cell of {plan.name} has two runs with {metric}")
    figure.supxlabel(f"lead in {metric}" if wanted else _LABELS.get(metric, metric), fontsize=9)
    return figure, f"{plan.name}_{plan.scale}_bars_{metric.replace('/', '_')}"


def draw_bars(
    axes: Axes, plan: Plan, cells: list[Cell], metric: str, base: list[float], heads: list[str]
) -> None:
    """A bar for each cell."""
    better = plan.metrics[metric].better if metric in plan.metrics else None
    sign = -1 if base and better == "lower" else 1
    labels = []
    constant = [n for n in plan.cells()[0] if len({str(c[n]) for c in plan.cells()}) == 1]
    for place, cell in enumerate(cells):
        values = cell.values(metric)
        mean = statistics.fmean(values) - (statistics.fmean(base) if base else 0)
        low, high = sorted(sign * each for each in interval(values, base))
        head = _head(plan, cell)
        error = [[sign * mean - low], [high - sign * mean]]
        axes.barh(place, sign * mean, color=color(head, heads), xerr=error, capsize=2)
        hidden = [*plan.columns, *constant]
        labels.append(_words(plan, {n: x for n, x in cell.options.items() if n not in hidden}))
    axes.set_yticks(range(len(cells)), labels)
    axes.invert_yaxis()
    if not base and cells:
        means = [statistics.fmean(cell.values(metric)) for cell in cells]
        spread = max(max(means) - min(means), 1e-9)
        axes.set_xlim(left=min(0, min(means)) if min(means) < 2 * spread else min(means) - spread)


def _head(plan: Plan, cell: Cell) -> str:
    return str(cell.options.get("head", plan.options.get("head", "")))


def _has(plan: Plan, cell: Cell, wanted: dict[str, list[str]]) -> bool:
    return all(str(cell.options.get(plan.long(n))) in values for n, values in wanted.items())


if __name__ == "__main__":
    sys.exit(main())
