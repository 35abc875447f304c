"""Gradient descent on a three-class distribution with every head, over the loss landscapes.

Plain gradient descent on the cross-entropy to a uniform target. Every head starts from the same
three distributions and takes steps of the same size: ``python experiments/figures.py landscapes``.

The default learning rate is a large one, which shows who oscillates. The order depends on it: at
1 nothing oscillates and softmax needs the fewest steps, because at a uniform target its curvature
is the same in all directions. The last panel shows the number of steps over learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from catnat import CategoricalHead, make_head

K = 3
TARGET = torch.full((K,), 1 / K, dtype=torch.float64)
STARTS = torch.tensor(
    [[0.85, 0.10, 0.05], [0.05, 0.85, 0.10], [0.10, 0.05, 0.85]], dtype=torch.float64
)
TOLERANCE = 1e-6
RATES = (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)  # of the last panel
MOST_STEPS = 300  # at each of them
LOWEST_LOSS = math.log(K)  # the entropy of the target
LEVELS = [LOWEST_LOSS + 3 * (i / 15) ** 2 for i in range(16)]  # colours of the cross-entropy
NORM = BoundaryNorm(LEVELS, 256, extend="max")
COLOURS = "YlGnBu"
PATH_COLOURS = ("black", "#c51b7d", "#b35806")


@dataclass
class Fit:
    """What gradient descent did with one head."""

    head: CategoricalHead
    path: Tensor  # (T + 1, starts, S), the scores after 0, 1, ..., T steps
    divergence: Tensor  # (T + 1, starts), KL(target || head) along the path

    @property
    def steps_needed(self) -> int | None:
        """Steps until every start is within the tolerance, None if one never is."""
        close = (self.divergence < TOLERANCE).all(dim=1).nonzero()
        return int(close[0]) if len(close) else None


def cross_entropy(head: CategoricalHead, scores: Tensor) -> Tensor:
    """Cross-entropy from the target to the head's distribution, (*, S) -> (*)."""
    return -(head.log_probs(scores) * TARGET).sum(-1)


def starting_scores(head: CategoricalHead) -> Tensor:
    """Scores of the starting distributions, (starts, S), without a part along (1, 1, 1)."""
    scores = head.inverse(STARTS)
    return scores - scores.mean(-1, keepdim=True) if head.num_scores == K else scores


def descend(head: CategoricalHead, learning_rate: float, steps: int) -> Fit:
    """Run gradient descent from all starts at once."""
    scores = starting_scores(head)
    path, losses = [], []
    for _ in range(steps + 1):
        scores = scores.detach().requires_grad_()
        loss = cross_entropy(head, scores)
        (gradient,) = torch.autograd.grad(loss.sum(), scores)
        path.append(scores.detach())
        losses.append(loss.detach())
        scores = scores - learning_rate * gradient
    return Fit(head, torch.stack(path), (torch.stack(losses) - LOWEST_LOSS).clamp_min(0))


def plane(num_scores: int) -> Tensor:
    """Two orthonormal directions, (2, S): of two scores all, of three those across (1, 1, 1)."""
    if num_scores == K - 1:
        return torch.eye(K - 1, dtype=torch.float64)
    directions = torch.tensor([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]], dtype=torch.float64)
    lengths: Tensor = directions.norm(dim=1, keepdim=True)
    return directions / lengths


def draw_landscape(axes: Axes, name: str, fit: Fit) -> None:
    """The loss over the plane of the scores, with the paths of gradient descent."""
    basis = plane(fit.head.num_scores)
    paths = (fit.path @ basis.T).movedim(1, 0)  # (starts, T + 1, 2)
    reach = 1.35 * float(paths[:, 0].abs().max())
    ticks = torch.linspace(-reach, reach, 201, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(ticks, ticks, indexing="xy"), dim=-1)
    loss = cross_entropy(fit.head, grid @ basis)
    axes.contourf(ticks, ticks, loss, LEVELS, norm=NORM, cmap=COLOURS, extend="max")
    axes.contour(ticks, ticks, loss, LEVELS[1:], colors="white", linewidths=0.4, alpha=0.6)
    for path, colour in zip(paths, PATH_COLOURS, strict=True):
        axes.plot(*path.T, "o-", color=colour, linewidth=1.2, markersize=2.8, zorder=3)
        axes.plot(*path[0], "o", color="white", mec=colour, mew=1.4, markersize=6.5, zorder=4)
    axes.plot(
        *(fit.head.inverse(TARGET) @ basis.T), "*", ms=13, color="white", mec="black", zorder=5
    )
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axes.locator_params(nbins=5)
    needed = fit.steps_needed
    axes.set_title(f"{name}: " + ("not reached" if needed is None else f"{needed} steps"))
    two = fit.head.num_scores == K - 1
    axes.set_xlabel("$s_1$" if two else r"$(s_1 - s_2)\,/\,\sqrt{2}$")
    axes.set_ylabel("$s_2$" if two else r"$(2 s_3 - s_1 - s_2)\,/\,\sqrt{6}$", labelpad=1)


def draw_steps_over_rates(axes: Axes, names: Iterable[str], learning_rate: float) -> None:
    """Steps that each head needs at each learning rate; a gap where a start never arrives."""
    for name in names:
        fits = [descend(make_head(name, K), rate, MOST_STEPS) for rate in RATES]
        needed = [math.nan if fit.steps_needed is None else fit.steps_needed for fit in fits]
        axes.plot(RATES, needed, "o-", markersize=4, label=name)
    axes.axvline(learning_rate, color="gray", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="steps to KL < 1e-6")
    axes.set_xticks(RATES[::2], [f"{rate:g}" for rate in RATES[::2]])
    axes.minorticks_off()
    axes.set_title("steps over learning rates")
    axes.legend(fontsize=8)


def draw_figure(fits: dict[str, Fit], learning_rate: float) -> Figure:
    """One panel for each head, all on the same colour scale, and one for the steps over rates."""
    columns = min(5, len(fits) + 1)
    rows = math.ceil((len(fits) + 1) / columns)
    figure, panels = plt.subplots(
        rows,
        columns,
        figsize=(3.2 * columns + 0.6, 3.4 * rows),
        squeeze=False,
        layout=ConstrainedLayoutEngine(wspace=0.09),
    )
    *landscapes, last = panels.flat[: len(fits) + 1]
    for axes in panels.flat[len(fits) + 1 :]:
        axes.set_visible(False)
    for axes, (name, fit) in zip(landscapes, fits.items(), strict=True):
        draw_landscape(axes, name, fit)
    draw_steps_over_rates(last, fits, learning_rate)
    bar = figure.colorbar(ScalarMappable(NORM, COLOURS), ax=panels, ticks=LEVELS[::3], pad=0.015)
    bar.set_label("cross-entropy (nats)")
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter("{x:.1f}")
    figure.suptitle(f"Gradient descent to a uniform target, learning rate {learning_rate:g}")
    return figure
