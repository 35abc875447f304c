"""Images for TensorBoard: Fisher matrices, samples and latents of a VAE, edges of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchvision.utils import make_grid

from catnat import CategoricalHead, CatnatHead
from catnat.checks import require_at_least
from catnat.rng import forked_random_state
from catnat.tree import levels

MAX_PICTURE = 2**22  # entries of the largest Fisher matrix that is drawn
# The entries of a Fisher matrix of softmax, sigmoid, and natural with A = 2 pi are at most 1/4.
_LARGEST_ENTRY = 0.25
_BLUE = (0.2, 0.3, 0.6)


def add_image(
    loggers: Iterable[Logger], tag: str, draw: Callable[[], Tensor | None], step: int
) -> None:
    """Give an image to every logger that takes any; if none does, nothing is drawn.

    Args:
        loggers: of the Trainer.
        tag: of the image.
        draw: gives the image (H, W, 1 or 3), bytes or numbers in [0, 1], or None for no image.
        step: of the image.
    """
    takers: list[Any] = [
        logger
        for logger in loggers
        if hasattr(logger, "log_image") or hasattr(getattr(logger, "experiment", None), "add_image")
    ]
    image = draw() if takers else None
    if image is None:
        return
    if image.dtype != torch.uint8:
        image = (image.detach().float().clamp(0, 1) * 255).round().byte()
    pixels = image.cpu().numpy()
    for logger in takers:
        if hasattr(logger, "log_image"):
            logger.log_image(tag, [pixels], step=step)
        else:
            logger.experiment.add_image(tag, pixels, step, dataformats="HWC")


# -- Fisher matrices -------------------------------------------------------------------------------


def is_drawn(count: int, every: int) -> bool:
    """Whether there is a picture at this count: 0, 10, 100, 1000 and so on, and each n-th.

    Args:
        count: of steps or rollouts, from 0.
        every: n; 0 for no pictures at all.
    """
    power_of_ten = count == 0 or (str(count).strip("0") == "1" and count > 1)
    return every > 0 and (power_of_ten or count % every == 0)


def fisher_picture(matrix: Tensor, head: CategoricalHead, title: str) -> Tensor:
    """A Fisher matrix as an image (400, 460, 3) of bytes, with axes, color bar and tree levels.

    The colors go from -1/4 to 1/4, in the logarithm of the magnitude, or further if an entry does.

    Args:
        matrix: (S, S), finite.
        head: the head that it belongs to.
        title: what is written above.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, seldom needed
    from matplotlib.colors import SymLogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    matrix = matrix.detach().float().cpu()
    limit = max(_LARGEST_ENTRY, float(matrix.abs().max()))
    figure = Figure(figsize=(4.6, 4.0), dpi=100)
    axes = figure.add_axes((0.13, 0.13, 0.66, 0.759))
    bar_axes = figure.add_axes((0.82, 0.2, 0.03, 0.62))
    end = len(matrix) + 0.5
    extent = (0.5, end, end, 0.5)  # scores are counted from 1
    norm = SymLogNorm(limit / 1000, linscale=0.3, vmin=-limit, vmax=limit)
    image = axes.imshow(matrix.numpy(), "RdBu_r", norm, extent=extent, interpolation="nearest")
    axes.grid(visible=False)  # lines of a user's style would hide entries
    ticks = [limit * share for share in (-1, -0.1, -0.01, 0, 0.01, 0.1, 1)]
    bar = figure.colorbar(image, bar_axes, ticks=ticks, format="%.3g")
    bar.ax.minorticks_off()
    tree = levels(head.num_categories) if isinstance(head, CatnatHead) else ()
    for (_, level_end), _ in pairwise(tree):
        axes.axhline(level_end - 0.5, color="gray", linewidth=0.8)
        axes.axvline(level_end - 0.5, color="gray", linewidth=0.8)
    axes.set(xlabel="score j", ylabel="score i")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_title(title, fontsize=11)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[..., :3].copy())


# -- models ----------------------------------------------------------------------------------------


def heat_map(matrix: Tensor, cell: int = 12) -> Tensor:
    """A matrix (R, C) as an image (R * cell, C * cell, 3): 0 is black, 1 is white."""
    grey = matrix.detach().float().cpu().clamp(0, 1)
    return grey.repeat_interleave(cell, 0).repeat_interleave(cell, 1)[..., None].expand(-1, -1, 3)


def tile(images: Tensor, columns: int) -> Tensor:
    """One image of n images side by side: (n, 1 or 3, H, W) -> (rows H, columns W, 3)."""
    grid: Tensor = make_grid(images, columns, padding=0)  # (3, rows H, columns W)
    return grid.movedim(0, -1)


class Figures(Callback):
    """Writes images of a model at each validation: those for which it has what they show.

    - ``images/reconstructions``: the first inputs above, what ``reconstruct`` gives for them below;
    - ``images/prior``: what ``sample_prior`` gives, decoded draws from the prior;
    - ``latents/usage``: the mean probability of each category (columns) of each latent (rows) in
      the validation set, the attribute ``usage``, (N, K): black = never, white = always;
    - ``graph/theta``: the edge probabilities ``theta``, (N, N), black = 0, white = 1; the true ones
      to the right if the data module has them as ``edge_probs``. The row is the node where an edge
      begins, the column the node where it ends.

    Images are (C, H, W), with three channels in color. An image that cannot be drawn costs one
    warning, and is not tried again.

    Args:
        num_images: how many reconstructions and prior samples.
    """

    def __init__(self, num_images: int = 10) -> None:
        require_at_least(1, num_images=num_images)
        self.num_images = num_images
        self._inputs: Tensor | None = None
        self._failed: set[str] = set()  # tags whose image could not be drawn

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the first inputs."""
        if batch_idx == 0:
            first = batch[0] if isinstance(batch, (tuple, list)) else batch
            self._inputs = first[: self.num_images] if isinstance(first, Tensor) else None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the images; random draws come from a forked state and do not affect training."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        figures: dict[str, Callable[[Any], Tensor | None]] = {
            "images/reconstructions": self._reconstructions,
            "images/prior": self._prior_samples,
            "latents/usage": _usage,
            "graph/theta": _theta,
        }
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning writes metrics
        # Equal draws each time: images differ by the model alone.
        with forked_random_state(pl_module.device, seed=0), torch.no_grad():
            for tag, figure in figures.items():
                if tag in self._failed:
                    continue
                try:
                    add_image(trainer.loggers, tag, partial(figure, pl_module), step)
                except Exception as error:  # a method of the user's own must not end the run
                    self._failed.add(tag)
                    what = f"{type(pl_module).__name__} failed with {type(error).__name__}: {error}"
                    rank_zero_warn(f"no {tag}: {what}")

    def _reconstructions(self, model: Any) -> Tensor | None:
        if self._inputs is None or not hasattr(model, "reconstruct"):
            return None
        images: Tensor = model.reconstruct(self._inputs)
        inputs = self._inputs.reshape(images.shape).to(images.dtype)
        return tile(torch.cat([inputs, images]), len(inputs))

    def _prior_samples(self, model: Any) -> Tensor | None:
        if not hasattr(model, "sample_prior"):
            return None
        return tile(model.sample_prior(self.num_images), self.num_images)


def _usage(model: Any) -> Tensor | None:
    usage = getattr(model, "usage", None)
    return None if usage is None else heat_map(usage)


def _theta(model: Any) -> Tensor | None:
    theta = getattr(model, "theta", None)
    if theta is None:
        return None
    pictures = [heat_map(theta)]
    truth = getattr(getattr(model.trainer, "datamodule", None), "edge_probs", None)
    if truth is not None:
        gap = torch.tensor(_BLUE).expand(len(pictures[0]), 12, 3)
        pictures += [gap, heat_map(truth)]
    return torch.cat(pictures, 1)
