"""The figures of the paper and of its tables' runs, each as PNG and PDF.

::

python experiments/figures.py landscapes
python experiments/figures.py fisher
python experiments/figures.py curves vae_adam --tag val/elbo
python experiments/figures.py mass vae_adam          # off-diagonal Fisher mass over training
python experiments/figures.py samples vae_adam       # inputs, reconstructions, draws
python experiments/figures.py theta gsl              # edges found against true ones

Figures of a table lie beside its runs, unless --out says otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from catnat import head_names, make_head
from catnat.fisher import off_diagonal_mass
from experiments import drawing, landscapes, plan, runs
from experiments.command_line import Parser, add_table_options, load
from experiments.layout import title
from experiments.plan import Experiment
from experiments.summary import Row, rows
from experiments.tables import NoRunsError, largest_scale, output_folder
from experiments.train_interface import load_run


def main(argv: list[str] | None = None) -> int:
    """Draw one figure."""
    parser = build_parser()
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    with parser.one_line_errors():
        for path in args.draw(args):
            print(path)
    return 0


def build_parser() -> Parser:
    """One command for each kind of figure."""
    parser = Parser("figures.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    kinds = parser.add_subparsers(required=True, parser_class=Parser, metavar="FIGURE")
    landscape = kinds.add_parser("landscapes", help="loss landscapes, gradient-descent paths")
    landscape.add_argument("--learning_rate", type=float, default=5.0)
    landscape.add_argument("--steps", type=int, default=200)
    landscape.add_argument("--default_root_dir", type=Path, default=Path("runs/landscapes"))
    landscape.set_defaults(draw=draw_landscapes)
    matrices = kinds.add_parser("fisher", help="Fisher matrices of the heads")
    matrices.add_argument("--num_categories", type=int, default=16)
    matrices.add_argument("--out", type=Path, default=Path("runs/fisher"))
    matrices.set_defaults(draw=fisher)
    for name, draw, text in (
        ("curves", curves, "a scalar over training, mean and spread over seeds"),
        ("mass", curves, "off-diagonal Fisher mass over training"),
        ("samples", samples, "inputs, reconstructions and draws of each head"),
        ("theta", theta, "edge probabilities found, against the true ones"),
    ):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("table", help=", ".join(plan.names()))
        add_table_options(kind, "the largest with runs")
        kind.add_argument("--out", type=Path, help="folder (default: that of the runs)")
        if draw is curves:
            tag = "fim/off_diagonal_mass_fro" if name == "mass" else "val/elbo"
            kind.add_argument("--tag", default=tag, help=f"default {tag}")
            each = "a line for each run, instead of mean and spread"
            kind.add_argument("--each", action="store_true", help=each)
        kind.set_defaults(draw=draw)
    return parser


def draw_landscapes(args: argparse.Namespace) -> list[Path]:
    """The loss over the scores of three classes, with paths; steps needed go to metrics.json."""
    if args.steps < 1 or not 0 < args.learning_rate < math.inf:
        raise ValueError(
            "--steps must be at least 1 and --learning_rate above 0, "
            f"got {args.steps} and {args.learning_rate:g}"
        )
    fits = {
        name: landscapes.descend(make_head(name, landscapes.K), args.learning_rate, args.steps)
        for name in head_names()
    }
    figure = landscapes.draw_figure(fits, args.learning_rate)
    paths = drawing.save(figure, args.default_root_dir, "landscapes")
    needed = {name: fit.steps_needed for name, fit in fits.items()}
    numbers = {f"steps/{n}": float(math.inf if s is None else s) for n, s in needed.items()}
    (args.default_root_dir / "metrics.json").write_text(json.dumps(numbers, indent=1) + "\n")
    return paths


def fisher(args: argparse.Namespace) -> list[Path]:
    """Fisher matrices of all heads at one and the same distribution, scaled to a maximum of 1.

    Colours go with the square root, or small entries, which are most of softmax's, could not be
    seen.
    """
    K = args.num_categories
    probs = torch.softmax(torch.randn(K, dtype=torch.float64), 0)
    names = head_names()
    figure, panels = drawing.panels(len(names), 2.3, 2.3)
    for axes, name in zip(panels, names, strict=True):
        head = make_head(name, K)
        matrix = head.fisher(head.inverse(probs))
        mass = float(off_diagonal_mass(matrix, norm="fro"))
        shown = (matrix / matrix.abs().max()).numpy()
        picture = axes.imshow(shown, cmap="RdBu_r", norm=drawing.ROOT_NORM)
        axes.set_title(f"{name}\noff-diagonal mass {mass:.2f}")
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(True)
    ticks = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1]
    bar = figure.colorbar(picture, ax=panels, shrink=0.8, pad=0.015, ticks=ticks)
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.set_label("share of the largest entry")
    figure.suptitle(f"Fisher matrices in the scores, at one distribution of {K} categories")
    return drawing.save(figure, args.out, "fisher")


def curves(args: argparse.Namespace) -> list[Path]:
    """One panel for each cell of a table, one band for each head, or one line for each run."""
    experiment, groups = _groups(args)
    # Shares and returns are compared between panels; losses of different data sets are not.
    same_scale = not args.tag.startswith("val/")
    figure, panels = drawing.panels(len(groups), sharex=True, sharey=same_scale)
    heads = [row.cell["head"] for row in next(iter(groups.values()))]
    drawn: list[int] = []  # seeds of each line
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        for row in group:
            known = _known(row, args.tag, False) or _known(row, args.tag, True)
            if known:
                head = row.cell["head"]
                draw = drawing.draw_each if args.each else drawing.draw_band
                draw(axes, known, drawing.colour(head, heads), head)
                drawn.append(len(known))
        axes.set_title(name)
        drawing.thousands(axes)
    if not drawn:
        raise NoRunsError(f"no run of {experiment.name} has {args.tag} in its event files")
    drawing.legend_above(figure, panels[0], _caption(drawn, args.each))
    figure.supxlabel("step", fontsize=9)  # of the optimizer, or of all environments together
    figure.supylabel(_LABELS.get(args.tag, args.tag), fontsize=9)
    kind = args.tag.replace("/", "_")
    return drawing.save(figure, output_folder(experiment, args.out), f"{experiment.name}_{kind}")


def _caption(seeds: list[int], each: bool) -> str:
    """What lines and bands are."""
    least, most = min(seeds), max(seeds)
    many = str(most) if least == most else f"{least} to {most}"
    if each and most > 1:
        return f"one line a run, n = {many}"
    return f"mean ± standard deviation over n = {many} runs" if most > 1 else "n = 1 run"


def _finished(row: Row) -> tuple[plan.Run, Path]:
    """The first of its runs that ended well, and the folder of that run."""
    run = next(run for run in row.runs if runs.metrics(run) is not None)
    folder = runs.version(run)
    assert folder is not None
    return run, folder


def _seeds(drawn: list[plan.Run]) -> str:
    """Which seeds a picture shows that has one run of each head."""
    return "seed " + ", ".join(sorted({str(run.seed) for run in drawn}))


def samples(args: argparse.Namespace) -> list[Path]:
    """Inputs, their reconstructions and draws from the prior, for each head of the first cell."""
    experiment, groups = _groups(args)
    name, group = next(iter(groups.items()))
    found = [(row, *_finished(row)) for row in group if row.finished]
    if not found:
        raise NoRunsError(f"no run of {experiment.name} with {name} is finished")
    figure, panels = drawing.panels(len(found), 2.6, 1.95)
    for axes, (row, _, folder) in zip(panels, found, strict=True):
        model, data = load_run(folder)
        inputs = next(iter(data.test_dataloader()))[:10]
        made = torch.cat([inputs, model.reconstruct(inputs), model.sample_prior(60)])
        images = made.reshape(8, 10, *made.shape[-2:]).numpy()
        picture = drawing.mosaic(images)
        axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        size = picture.shape[0] / 8
        axes.axhline(2 * size - 0.5, color="black", linewidth=0.8)
        axes.set_yticks([size / 2, 1.5 * size, 5 * size], ["input", "rec.", "prior"])
        axes.tick_params(length=0)
        axes.set(xticks=[], title=row.cell["head"])
        axes.spines[:].set_visible(False)
        axes.grid(False)
    for axes in panels[1:]:
        axes.set_yticklabels([])
    figure.suptitle(f"{name}, {_seeds([run for _, run, _ in found])}", fontsize=9)
    return drawing.save(figure, output_folder(experiment, args.out), f"{experiment.name}_samples")


def theta(args: argparse.Namespace) -> list[Path]:
    """Each possible edge as a point: its probability as found over the true one."""
    experiment, groups = _groups(args)
    heads = [row.cell["head"] for row in next(iter(groups.values()))]
    figure, panels = drawing.panels(len(heads), 2.4, 2.6, sharex=True, sharey=True)
    shift = np.random.default_rng(0)
    shown: list[plan.Run] = []
    for axes, head in zip(panels, heads, strict=True):
        drawn = [row for group in groups.values() for row in group if row.cell["head"] == head]
        for row in drawn:
            folder = runs.version(row.runs[0]) if row.runs else None
            if folder is None:
                continue
            model, data = load_run(folder)
            true = data.edge_probs.flatten().numpy()
            found = model.theta.detach().flatten().numpy()
            x = true + shift.uniform(-0.02, 0.02, true.shape)
            colour = drawing.colour(head, heads)
            axes.scatter(x, found, s=5, color=colour, alpha=0.45, linewidths=0)
            shown.append(row.runs[0])
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.7, zorder=1.5)
        axes.set(title=head, aspect="equal", xlim=(-0.06, 1.02), ylim=(-0.04, 1.04))
    if not shown:
        raise NoRunsError(f"no run of {experiment.name} is finished in {experiment.folder}")
    figure.suptitle(_seeds(shown), fontsize=9)
    figure.supxlabel("true probability of an edge (points shifted a little)", fontsize=9)
    figure.supylabel("probability found", fontsize=9)
    return drawing.save(figure, output_folder(experiment, args.out), f"{experiment.name}_theta")


_LABELS = {
    "val/elbo": "validation ELBO (nats)",
    "val/loss": "validation loss",
    "fim/off_diagonal_mass_fro": "off-diagonal Fisher mass",
    "fim/saturated": "share of saturated scores",
    "rollout/ep_rew_mean": "return, last 100 games",
}


def _groups(args: argparse.Namespace) -> tuple[Experiment, dict[str, list[Row]]]:
    """The rows of a table that differ in the head alone, by what they have in common."""
    scale = args.scale or largest_scale(args.table, args.runs)
    experiment = load(args.table, args, scale)
    groups: dict[str, list[Row]] = {}
    for row in rows(experiment):
        groups.setdefault(_common(experiment, row), []).append(row)
    return experiment, groups


def _common(experiment: Experiment, row: Row) -> str:
    return title(experiment, row.cell, (option for option in row.cell if option != "head"))


def _known(row: Row, tag: str, unfinished: bool) -> list[Any]:
    found = [_curve(run, tag, unfinished) for run in row.runs]
    return [curve for curve in found if curve is not None]


def _curve(run: plan.Run, tag: str, unfinished: bool) -> Any:
    given = runs.curves(run, [tag], unfinished=unfinished)
    points = sorted((each["step"], each["value"]) for each in given)
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    return np.array(steps, float), np.array(values, float)


if __name__ == "__main__":
    sys.exit(main())
