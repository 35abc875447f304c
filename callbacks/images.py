"""Images for TensorBoard: Fisher matrices, samples and latents of a VAE, edges of a graph."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from catnat.fisher import off_diagonal_mass
from catnat.heads.base import CategoricalHead
from catnat.heads.nodes import levels
from catnat.heads.tree import CatnatHead
from catnat.lightning_compat import logged_step
from catnat.rng import forked_random_state

MAX_PICTURE = 2**22  # entries of the largest Fisher matrix that is drawn
# The entries of a Fisher matrix of softmax, sigmoid, and natural with A = 2 pi are at most 1/4.
_LARGEST_ENTRY = 0.25
_BLUE = (0.2, 0.3, 0.6)
_CELL = 12  # pixels of a matrix's entry

Draw = Callable[[], Tensor | None]  # gives an image, or None for no image


def add_image(loggers: Iterable[Logger], tag: str, draw: Draw, step: int) -> None:
    """Log an image to every logger that supports images; without one, nothing is drawn.

    Args:
        loggers: loggers of the Trainer.
        tag: tag of the image.
        draw: gives the image, (H, W, 1 or 3), bytes or numbers in [0, 1].
        step: step of the image.
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
        image = (image.float().clamp(0, 1) * 255).round().byte()
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
        count: number of steps or rollouts so far.
        every: n; 0 for no pictures at all.
    """
    power_of_ten = count != 1 and str(count).rstrip("0") in ("", "1")
    return every > 0 and (power_of_ten or count % every == 0)


def fisher_picture(matrix: Tensor, head: CategoricalHead, title: str) -> Tensor:
    """A Fisher matrix as an image (400, 460, 3) of bytes, with axes, color bar and tree levels.

    The name of the head and the off-diagonal mass of the matrix are above it. Colors have a
    logarithmic scale from -1/4 to 1/4, or to the largest entry.

    Args:
        matrix: (S, S), finite.
        head: the head that it belongs to.
        title: text above the picture, after the name of the head.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, seldom needed
    from matplotlib.colors import SymLogNorm
    from matplotlib.figure import Figure

    limit = max(_LARGEST_ENTRY, float(matrix.abs().max()))
    figure = Figure(figsize=(4.6, 4.0), dpi=100)
    # A layout that Matplotlib computes would take most of the time of a picture.
    figure.subplots_adjust(left=0.13, right=0.91, bottom=0.11, top=0.88)
    mass = float(off_diagonal_mass(matrix))
    title = f"{head.name}, {title}\noff-diagonal mass {mass:.3f}"
    axes = figure.add_subplot(xlabel="score j", ylabel="score i")
    axes.set_title(title, fontsize="medium")
    end = len(matrix) + 0.5
    extent = (0.5, end, end, 0.5)  # scores are counted from 1
    norm = SymLogNorm(limit / 1000, linscale=0.3, vmin=-limit, vmax=limit)
    image = axes.imshow(matrix.numpy(), "RdBu_r", norm, extent=extent, interpolation="nearest")
    axes.grid(visible=False)  # lines of a user's style would hide entries
    axes.locator_params(nbins=8, integer=True, min_n_ticks=1)
    ticks = [limit * share for share in (-1, -0.1, -0.01, 0, 0.01, 0.1, 1)]
    bar = figure.colorbar(image, ticks=ticks, format="%.3g", shrink=0.8)
    bar.ax.minorticks_off()
    bar.set_label("entry $G_{ij}$")
    if isinstance(head, CatnatHead):
        for level_start, _ in list(levels(head.num_categories))[1:]:
            axes.axhline(level_start - 0.5, color="gray", linewidth=0.8)
            axes.axvline(level_start - 0.5, color="gray", linewidth=0.8)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[..., :3].copy())


# -- models ----------------------------------------------------------------------------------------


def heat_map(matrix: Tensor) -> Tensor:
    """A matrix (R, C) as an image (12 R, 12 C, 3): 0 is black, 1 is white."""
    return torch.kron(matrix.cpu(), torch.ones(_CELL, _CELL))[..., None].expand(-1, -1, 3)


def side_by_side(images: Tensor) -> Tensor:
    """One image of n images: (n, 1 or 3, H, W) -> (H, n W, 1 or 3)."""
    return torch.cat([*images.movedim(1, -1)], 1)


class Figures(Callback):
    """Writes images of a model at each validation: each image that the model supports.

    - ``images/reconstructions``: the first inputs above, and the outputs of ``reconstruct`` below.
    - ``images/prior``: the outputs of ``sample_prior``, which decodes samples from the prior.
    - ``latents/usage``: the attribute ``usage``, (N, K): the mean probability of each category
      (columns) of each latent (rows) in the validation set. Black is never, white is always.
    - ``graph/theta``: the edge probabilities ``theta``, (N, N). Black is 0, white is 1. The true
      probabilities are on the right if the data module has an attribute ``edge_probs``. The row is
      the node where an edge begins, and the column is the node where it ends.

    Images have shape (C, H, W), with three channels if they are in color. If an image cannot be
    drawn, the callback warns and continues.
    """

    num_images = 10  # reconstructions and prior samples
    _batch: Any = None  # the first of the latest validation

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Keep the first batch."""
        if batch_idx == 0:
            self._batch = batch

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the images; random draws come from a forked state and do not affect training."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        figures: dict[str, tuple[str, Callable[[Any], Tensor]]] = {
            "images/reconstructions": ("reconstruct", self._reconstructions),
            "images/prior": ("sample_prior", lambda draws: side_by_side(draws(self.num_images))),
            "latents/usage": ("usage", heat_map),
            "graph/theta": ("theta", partial(_edges, trainer)),
        }
        step = logged_step(trainer)
        # Equal draws each time: images differ by the model alone.
        with forked_random_state(pl_module.device, seed=0), torch.no_grad():
            for tag, (shown, draw) in figures.items():
                try:
                    if (value := getattr(pl_module, shown, None)) is not None:
                        add_image(trainer.loggers, tag, partial(draw, value), step)
                except Exception as error:  # a method of the user's own must not end the run
                    rank_zero_warn(
                        f"no {tag}: {type(pl_module).__name__} failed with "
                        f"{type(error).__name__}: {error}"
                    )

    def _reconstructions(self, reconstruct: Callable[[Tensor], Tensor]) -> Tensor:
        images = self._batch[0] if isinstance(self._batch, (tuple, list)) else self._batch
        inputs = images[: self.num_images]
        outputs = reconstruct(inputs)
        inputs = inputs.reshape(outputs.shape).to(outputs.dtype)
        return torch.cat([side_by_side(inputs), side_by_side(outputs)])


def _edges(trainer: Any, theta: Tensor) -> Tensor:
    pictures = [heat_map(theta)]
    truth = getattr(getattr(trainer, "datamodule", None), "edge_probs", None)
    if truth is not None:
        gap = torch.tensor(_BLUE).expand(len(pictures[0]), _CELL, 3)
        pictures += [gap, heat_map(truth)]
    return torch.cat(pictures, 1)
