"""Pictures of a Fisher matrix: when a run draws one, and how."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from torch import Tensor

from catnat import CategoricalHead, CatnatHead
from catnat.tree import levels

MAX_PICTURE = 2**22  # entries of the largest matrix that is drawn
# The entries of a Fisher matrix of softmax, sigmoid, and natural with A = 2 pi are at most 1/4.
_USUAL_LIMIT = 0.25
_DECADES = 3  # of magnitudes that the colours tell apart


def is_drawn(count: int, every: int) -> bool:
    """Whether there is a picture at this count: 0, 10, 100, 1000 and so on, and each n-th.

    Args:
        count: of steps or rollouts, from 0.
        every: n; 0 for no pictures at all.
    """
    power_of_ten = count == 0 or (str(count).strip("0") == "1" and count > 1)
    return every > 0 and (power_of_ten or count % every == 0)


def limit_of(matrix: Tensor) -> float:
    """The end of the colour scale of a run, from the first matrix that it draws."""
    return max(_USUAL_LIMIT, float(matrix.abs().max()))


def fisher_picture(matrix: Tensor, head: CategoricalHead, limit: float, title: str) -> Tensor:
    """A Fisher matrix as an image (H, W, 3) in [0, 1], with axes, colour bar and tree levels.

    Args:
        matrix: (S, S).
        head: the head that it belongs to.
        limit: the colours go from -limit to limit, in the logarithm of the magnitude.
        title: what is written above.
    """
    S = len(matrix)
    figure = Figure(figsize=(4.6, 4), dpi=100, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    norm = SymLogNorm(limit / 10**_DECADES, linscale=0.3, vmin=-limit, vmax=limit)
    values = matrix.detach().float().cpu().numpy()
    drawn = axes.imshow(values, "RdBu_r", norm, extent=(0.5, S + 0.5, S + 0.5, 0.5))
    above = [limit / 10**n for n in range(_DECADES + 1)]
    beyond = np.abs(values).max() > limit * (1 + 1e-6)
    bar = figure.colorbar(drawn, ax=axes, extend="both" if beyond else "neither", shrink=0.9)
    ticks = [-each for each in above] + [0.0] + above[::-1]
    bar.set_ticks(ticks, labels=[f"{each:.3g}" for each in ticks])
    bar.minorticks_off()
    axes.set(xlabel="score j", ylabel="score i", title=title)
    axes.set_xticks(_ticks(S))
    axes.set_yticks(_ticks(S))
    tree = getattr(head, "head", head)  # the head of a distribution given a mask
    if isinstance(tree, CatnatHead):
        _mark_levels(axes, tree.num_categories)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(np.float32) / 255
    return torch.from_numpy(pixels)


def _ticks(S: int) -> list[int]:
    """Numbers of scores to write at an axis: all of a few, else about eight round ones."""
    if S <= 10:
        return list(range(1, S + 1))
    every = next(n for n in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if S / n <= 9)
    return list(range(every, S + 1, every))


def _mark_levels(axes: Axes, num_categories: int) -> None:
    """Lines between the levels of the tree, and the number of each level above the matrix."""
    spans = list(levels(num_categories))
    for (_, end), _ in pairwise(spans):
        for line in (axes.axhline, axes.axvline):
            line(end - 0.5, color="0.55", linewidth=1)
    top = axes.secondary_xaxis("top")
    wide = [n for n, span in enumerate(spans, 1) if span[1] - span[0] >= (num_categories - 1) / 16]
    middles = [(spans[n - 1][0] + spans[n - 1][1] - 1) / 2 for n in wide]
    top.set_xticks(middles, labels=[str(n) for n in wide])
    top.tick_params(length=0)
    top.set_xlabel("level of the tree")
