"""Draw all pictures of the site and of the README, and run the examples.

    python docs/tools/make_pictures.py            # all: the examples take about ten minutes
    python docs/tools/make_pictures.py overview   # one: a name of docs/pictures or of examples
    python docs/tools/make_pictures.py notebooks  # the notebooks alone, which nothing executes

The files are committed, so the build of the site trains nothing. It needs the extra [train],
and jax for one example.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gallery
import matplotlib
import torch
from torch.distributions import kl_divergence

from catnat import make_head
from catnat.fisher import off_diagonal_mass

matplotlib.use("Agg")

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
K = 8
COLORS = {  # those of catnat/sweeps/figures.py
    "softmax": "#0072B2",
    "sparsemax": "#E69F00",
    "sigmoid": "#009E73",
    "natural": "#D55E00",
}


def overview() -> Any:
    """The README's picture: learning curves of VAEs beside the Fisher matrices of two heads."""
    figure, panels = plt.subplots(
        1, 3, figsize=(9.2, 3.1), gridspec_kw={"width_ratios": [2.0, 1, 1]}
    )
    curves = panels[0]
    means = {}
    for head, estimator, temperature, style in (
        ("softmax", "gumbel", "1.0", "--"),
        ("softmax", "gumbel-rao", "0.5", "-"),
        ("sigmoid", "gumbel", "1.0", "--"),
        ("sigmoid", "gumbel-rao", "0.5", "-"),
    ):
        losses = _validation_losses(head, estimator, temperature)  # by step, of all seeds
        steps = torch.tensor(sorted(losses)) / 1000
        values = torch.tensor([losses[step] for step in sorted(losses)])  # (steps, seeds)
        means[head, estimator] = (steps, values.mean(1))
        name = {"gumbel": "Gumbel", "gumbel-rao": "Gumbel-Rao"}[estimator]
        line = {"color": COLORS[head], "linestyle": style, "label": f"{head}, {name}"}
        curves.plot(steps, values.mean(1), **line)
        bounds = values.amin(1), values.amax(1)
        curves.fill_between(steps, *bounds, color=COLORS[head], alpha=0.15, lw=0)
    loss = float(means["softmax", "gumbel"][1][-1])
    steps, losses_by_step = means["sigmoid", "gumbel-rao"]
    after = int((losses_by_step <= loss).nonzero()[0])
    share = (losses_by_step[after - 1] - loss) / (losses_by_step[after - 1] - losses_by_step[after])
    fewer = float(steps[after - 1] + share * (steps[after] - steps[after - 1]))
    arrow = {"arrowstyle": "<->", "color": "#444444", "lw": 1, "shrinkA": 0, "shrinkB": 0}
    curves.annotate("", (fewer, loss), (60, loss), arrowprops=arrow)
    curves.text(
        59, 101.3, f"{60 / fewer:.0f} times fewer steps to the loss of softmax, Gumbel", ha="right"
    )
    curves.set(title="VAE, 10 latents of 8 categories", xlabel="thousand steps", xlim=(0, 61))
    curves.set(ylabel="validation loss (nats)", ylim=(100, None))
    curves.legend(frameon=False, loc="upper right")
    curves.grid(alpha=0.3)
    rng = torch.Generator().manual_seed(3)
    scores = torch.randn(K, generator=rng) + torch.randn(64, K, generator=rng)
    probs = torch.softmax(scores.double(), -1)  # (64, K)
    for axes, name in zip(panels[1:], ("softmax", "sigmoid"), strict=True):
        built_head = make_head(name, K)
        fisher = built_head.mean_fisher(built_head.inverse(probs))
        shown = axes.imshow(fisher / fisher.abs().max(), cmap="RdBu_r", vmin=-0.6, vmax=0.6)
        axes.set(title=f"{name}: Fisher matrix", xticks=[], yticks=[])
        axes.set_xlabel(f"{built_head.num_scores} scores")
    figure.colorbar(shown, ax=panels[1:], shrink=0.85, extend="max", label="entry / largest")
    return figure


def _validation_losses(head: str, estimator: str, temperature: str) -> dict[int, list[float]]:
    """Losses of five seeds by step: gray MNIST, 10 latents of 8 categories."""
    losses: dict[int, list[float]] = {}
    setting = {"head": head, "estimator": estimator, "temperature": temperature}
    with (ROOT / "paper" / "estimators_main" / "curves.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if setting.items() <= row.items():
                losses.setdefault(int(row["step"]), []).append(float(row["val/loss"]))
    return losses


def _two_categories(name: str, **options: float) -> tuple[Any, Any, Any]:
    """Scores of one binary choice, the probability of its second outcome, and its information."""
    head = make_head(name, 2, **options)
    s = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    scores = s[:, None] if head.num_scores == 1 else torch.stack([0 * s, s], 1)
    return s, head.probs(scores)[:, 1], head.fisher_diagonal(scores)[:, -1]


def paths() -> Any:
    """Errors of estimates of KL divergence and entropy from one sample, over the categories."""
    sizes = [2**power for power in range(3, 16, 2)]
    kl_errors: dict[str, list[float]] = {"log q - log p": [], "r - 1 - log r": [], "path": []}
    entropy_errors: dict[str, list[float]] = {"-log q": [], "path": []}
    generator = torch.Generator().manual_seed(0)
    for K in sizes:
        head = make_head("sigmoid", K)
        scores = torch.randn(K - 1, generator=generator, dtype=torch.float64).expand(1000, -1)
        moved = scores + 0.1 * torch.randn(K - 1, generator=generator, dtype=torch.float64)
        q = head(scores)
        p = head(moved)
        c = head.sample(scores, generator=generator)
        log_ratio = p.log_prob(c) - q.log_prob(c)
        kl = kl_divergence(head(scores[:1]), head(moved[:1]))
        kl_estimates = (-log_ratio, log_ratio.exp() - 1 - log_ratio, q.path_kl(p, c))
        for errors, estimates in zip(kl_errors.values(), kl_estimates, strict=True):
            errors.append(_root_mean_square(estimates - kl))
        entropy = head(scores[:1]).entropy()
        entropy_estimates = (-q.log_prob(c), q.path_entropy(c))
        for errors, estimates in zip(entropy_errors.values(), entropy_estimates, strict=True):
            errors.append(_root_mean_square(estimates - entropy))
    figure, panels = plt.subplots(1, 2, figsize=(6, 2.8))
    colors = {"path": COLORS["sigmoid"], "r - 1 - log r": "#999999"}
    titles = {"KL divergence": kl_errors, "entropy": entropy_errors}
    for axes, (title, lines) in zip(panels, titles.items(), strict=True):
        for label, errors in lines.items():
            axes.plot(sizes, errors, "o-", label=label, color=colors.get(label, "#000000"), ms=3)
        axes.set(title=title, xlabel="categories K", xscale="log", yscale="log")
        axes.set_ylabel("error of one sample (nats)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure


def _root_mean_square(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt())


def _curve(name: str) -> Any:
    """a(s) of a binary choice, and the Fisher information of its score."""
    s, a, information = _two_categories(name)
    figure, (left, right) = plt.subplots(1, 2, figsize=(6, 2.4))
    left.plot(s, a, color=COLORS[name])
    left.set(title="probability", xlabel="score $s$", ylabel="$a(s)$", ylim=(-0.05, 1.05))
    right.plot(s, information, color=COLORS[name])
    top = 0.3 if float(information.max()) < 0.3 else 2.0
    right.set(title="Fisher information", xlabel="score $s$", ylim=(-0.02 * top, top))
    right.set_ylabel("$a'^2 / (a (1 - a))$")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def curves() -> Any:
    """a(s) and its information, all heads in one picture."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(6, 2.8))
    for name, color in COLORS.items():
        s, a, information = _two_categories(name)
        line = {"color": color, "label": name, "zorder": 3, "linestyle": "-"}
        if name == "softmax":  # with two categories it is the sigmoid
            line |= {"zorder": 4, "linestyle": (0, (3, 3))}
        left.plot(s, a, **line)
        right.plot(s, information, **line)
    left.set(title="probability, two categories", xlabel="score $s$")
    right.set(title="Fisher information of the score", xlabel="score $s$", ylim=(-0.03, 1.1))
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def tail() -> Any:
    """Natural without a tail and with two: a(s), the rare side's logarithm, and information."""
    figure, panels = plt.subplots(1, 3, figsize=(9, 2.7))
    for tail, color in ((0, COLORS["natural"]), (0.005, "C4"), (0.05, "C9")):
        s, a, information = _two_categories("natural", tail=tail)
        line = {"color": color, "label": f"tail {tail}" if tail else "no tail"}
        for axes, values in zip(panels, (a, a, information), strict=True):
            axes.plot(s, values, **line)
    panels[0].set(title="probability $a(s)$")
    panels[0].legend(frameon=False)
    panels[1].set(title="the rare side", yscale="log", ylim=(1e-5, 1), xlim=(-5, 0))
    panels[2].set(title="Fisher information", ylim=(-0.01, 0.3))
    for axes in panels:
        axes.set_xlabel("score $s$")
        axes.grid(alpha=0.3)
    return figure


def _matrices(names: tuple[str, ...]) -> Any:
    """The Fisher matrix of each head at one and the same distribution over K categories."""
    noise = torch.Generator().manual_seed(3)
    probs = torch.softmax(torch.randn(K, generator=noise, dtype=torch.float64), 0)
    figure, panels = plt.subplots(
        1, len(names), figsize=(2.6 * len(names) + 0.7, 2.7), squeeze=False
    )
    for axes, name in zip(panels[0], names, strict=True):
        head = make_head(name, K)
        fisher = head.fisher(head.inverse(probs))
        mass = float(off_diagonal_mass(fisher))
        shown = axes.imshow(fisher / fisher.abs().max(), cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set(title=f"{name}: off-diagonal {mass:.2f}", xticks=[], yticks=[])
        axes.set_xlabel(f"{head.num_scores} scores")
    figure.colorbar(shown, ax=panels, shrink=0.85, label="entry / largest entry")
    return figure


def tree() -> Any:
    """A tree over four categories, with the probabilities of the branches."""
    figure, axes = plt.subplots(figsize=(6, 2.3))
    nodes = {(3, 2): "$s_1$", (1, 1): "$s_2$", (5, 1): "$s_3$"}
    leaves = {(0, 0): "$p_0$", (2, 0): "$p_1$", (4, 0): "$p_2$", (6, 0): "$p_3$"}
    for (x, y), (left, right), i in (
        ((3, 2), ((1, 1), (5, 1)), 1),
        ((1, 1), ((0, 0), (2, 0)), 2),
        ((5, 1), ((4, 0), (6, 0)), 3),
    ):
        for (to_x, to_y), text, side in ((left, "1 - a(s_{%d})", -1), (right, "a(s_{%d})", 1)):
            axes.plot([x, to_x], [y, to_y], color="gray", zorder=1)
            at_x, at_y = (x + to_x) / 2 + 0.15 * side, (y + to_y) / 2 + 0.12
            text = f"${text % i}$"
            axes.text(at_x, at_y, text, ha="right" if side < 0 else "left", fontsize=8)
    for (x, y), text in {**nodes, **leaves}.items():
        color = "#e8eaf6" if (x, y) in nodes else "white"
        axes.text(x, y, text, ha="center", va="center", bbox={"fc": color, "boxstyle": "round"})
    axes.set(xlim=(-0.8, 6.8), ylim=(-0.3, 2.3))
    axes.axis("off")
    return figure


DRAWINGS: dict[str, Callable[[], Any]] = {
    "overview": overview,
    "tree": tree,
    "curves": curves,
    "tail": tail,
    "paths": paths,
    "fisher": lambda: _matrices(tuple(COLORS)),
    **{f"{name}_curve": partial(_curve, name) for name in COLORS},
    **{f"{name}_fisher": partial(_matrices, (name,)) for name in COLORS},
}


def main(names: list[str]) -> None:
    """Draw the named pictures and run the named examples; all of them without names."""
    style: dict[Any, Any] = {
        "figure.dpi": 130,
        "figure.constrained_layout.use": True,
        "font.size": 9,
    }
    scripts = {script.stem: script for script in gallery.scripts()}
    unknown = set(names) - {*DRAWINGS, *scripts, "notebooks"}
    if unknown:
        choices = ", ".join([*DRAWINGS, *scripts, "notebooks"])
        raise SystemExit(f"there is no {', '.join(sorted(unknown))}; choose from {choices}")
    with plt.rc_context(style):
        for name, drawing in DRAWINGS.items():
            if not names or name in names:
                figure = drawing()
                figure.savefig(PICTURES / f"{name}.png", bbox_inches="tight")
                plt.close(figure)
    for name, script in scripts.items():
        if not names or name in names:
            print(f"examples/{script.name}", flush=True)
            run_example(script)
        if not names or name in names or "notebooks" in names:
            gallery.write_notebook(script)


def run_example(script: Path) -> None:
    """Keep the picture and the printed lines of an example in docs/gallery."""
    folder = gallery.OUTPUTS
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(script), "--out", f"{script.stem}.png"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=scratch, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        picture = Path(scratch, f"{script.stem}.png")
        shutil.copy(picture, folder)
    (folder / f"{script.stem}.txt").write_text(done.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
