"""Images for TensorBoard: Fisher matrices, samples and latents of a VAE, edges of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import functional as F

from catnat import CategoricalHead, CatnatHead, HeadProbe
from catnat.checks import require_at_least
from catnat.rng import forked_random_state
from catnat.tree import levels

MAX_PICTURE = 2**22  # entries of the largest Fisher matrix that is drawn
# The entries of a Fisher matrix of softmax, sigmoid, and natural with A = 2 pi are at most 1/4.
_USUAL_LIMIT = 0.25
_BLUE = (0.2, 0.3, 0.6)


def add_image(loggers: Iterable[Logger], tag: str, image: Tensor, step: int) -> None:
    """Give an image (H, W, 1 or 3), bytes or numbers in [0, 1], to every logger that takes any."""
    if image.dtype != torch.uint8:
        image = (image.detach().float().clamp(0, 1) * 255).round().byte()
    pixels = image.cpu().numpy()
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_image"):
            experiment.add_image(tag, pixels, step, dataformats="HWC")
        elif hasattr(logger, "log_image"):
            logger.log_image(tag, [pixels], step=step)


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

    S, matrix = len(matrix), matrix.detach().float().cpu()
    limit = max(_USUAL_LIMIT, float(matrix.abs().max()))
    figure = Figure(figsize=(4.6, 4.0), dpi=100)
    axes = figure.add_axes((0.13, 0.13, 0.66, 0.759))
    bar_axes = figure.add_axes((0.82, 0.2, 0.03, 0.62))
    extent = (0.5, S + 0.5, S + 0.5, 0.5)  # scores are counted from 1
    norm = SymLogNorm(limit / 1000, linscale=0.3, vmin=-limit, vmax=limit)
    shown = _thinned(matrix).numpy()
    image = axes.imshow(shown, "RdBu_r", norm, extent=extent, interpolation="nearest")
    axes.grid(visible=False)  # lines of a user's style would hide entries
    ends = [limit / 10**n for n in range(3)]
    ticks = [-each for each in ends] + [0.0] + ends[::-1]
    bar = figure.colorbar(image, bar_axes, ticks=ticks, format="%.3g")
    bar.ax.minorticks_off()
    tree = getattr(head, "head", head)  # the head of a distribution given a mask
    for (_, end), _ in pairwise(
        levels(tree.num_categories) if isinstance(tree, CatnatHead) else ()
    ):
        axes.axhline(end - 0.5, color="gray", linewidth=0.8)
        axes.axvline(end - 0.5, color="gray", linewidth=0.8)
    if S == 1:
        axes.set(xticks=[], yticks=[])
    else:
        axes.set(xlabel="score j", ylabel="score i")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_title(title, fontsize=11)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def _thinned(matrix: Tensor, most: int = 280) -> Tensor:
    """At most this many rows and columns, (S, S) -> (s, s): of each block the largest magnitude."""
    if len(matrix) <= most:
        return matrix
    highest = F.adaptive_max_pool2d(matrix[None], most)[0]
    lowest = -F.adaptive_max_pool2d(-matrix[None], most)[0]
    return torch.where(highest >= -lowest, highest, lowest)


# -- models ----------------------------------------------------------------------------------------


def step_of(trainer: Trainer) -> int:
    """The step under which Lightning writes the metrics of a validation."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def heat_map(matrix: Tensor, cell: int = 12) -> Tensor:
    """A matrix (R, C) as an image (R * cell, C * cell, 3): 0 is black, 1 is white."""
    grey = matrix.detach().float().cpu().clamp(0, 1)
    return grey.repeat_interleave(cell, 0).repeat_interleave(cell, 1)[..., None].expand(-1, -1, 3)


def tile(images: Tensor) -> Tensor:
    """One image of n images side by side: (n, 1 or 3, H, W) -> (H, n W, 3)."""
    from torchvision.utils import make_grid

    grid: Tensor = make_grid(images, nrow=len(images), padding=0)  # (3, H, n W)
    return grid.movedim(0, -1)


class VAEFigures(Callback):
    """Writes images of a VAE at each validation.

    ``images/reconstructions``: inputs above, reconstructions below; ``images/prior``: decoded
    draws from the prior; ``latents/usage``: the mean probability of each category (columns) of
    each latent (rows) over the validation set, black = never, white = always. Images are
    (C, H, W), with three channels in colour.

    A model without ``reconstruct``, ``sample_prior`` or a head gets fewer images, and so does one
    whose method raises an error, with a warning.

    Args:
        num_images: how many reconstructions and prior samples.
    """

    def __init__(self, num_images: int = 10) -> None:
        require_at_least(1, num_images=num_images)
        self.num_images = num_images
        self._probe: HeadProbe | None = None
        self._usage: dict[str, Tensor] = {}
        self._inputs: Tensor | None = None
        self._failed: set[str] = set()  # tags whose image could not be drawn

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach before the first call of a model that may be compiled."""
        has_head = any(isinstance(each, CategoricalHead) for each in pl_module.modules())
        self._probe = HeadProbe(pl_module).attach() if has_head else None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the previous validation, and scores that the heads saw in training."""
        self._usage, self._inputs = {}, None
        if self._probe is None:  # a validation outside of training
            self.on_fit_start(trainer, pl_module)
        if self._probe is not None:
            self._probe.scores = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the first inputs and add up how often each category is used."""
        if trainer.sanity_checking:
            return
        if batch_idx == 0:
            first = batch[0] if isinstance(batch, (tuple, list)) else batch
            self._inputs = first[: self.num_images] if isinstance(first, Tensor) else None
        if self._probe is None:
            return
        scores_by_name, self._probe.scores = self._probe.scores, {}  # the next batch may call none
        for name, scores in scores_by_name.items():
            head = self._probe.heads[name]
            probs = head.probs(scores.reshape(scores.shape[0], -1, head.num_scores))
            self._usage[name] = self._usage.get(name, 0) + probs.float().sum(0)  # (N, K)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the images; random draws come from a forked state and do not affect training."""
        if trainer.sanity_checking or not trainer.loggers:
            return
        self._draw_usage(trainer)
        if not trainer.is_global_zero:
            return
        # Equal draws each time: images differ by the model alone.
        with forked_random_state(pl_module.device, seed=0), torch.no_grad():
            if hasattr(pl_module, "reconstruct") and self._inputs is not None:
                self._draw(trainer, "images/reconstructions", pl_module, self._reconstructions)
            if hasattr(pl_module, "sample_prior"):
                self._draw(trainer, "images/prior", pl_module, self._prior_samples)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks."""
        if self._probe is not None:
            self._probe.detach()
            self._probe = None

    def _draw_usage(self, trainer: Trainer) -> None:
        # Every rank must take part in the sum, also a rank that had no batch. Rank 0 knows the
        # shapes: if any rank had a batch, rank 0 had one.
        shapes = {name: tuple(each.shape) for name, each in self._usage.items()}
        for name, shape in trainer.strategy.broadcast(shapes).items():
            nothing = torch.zeros(shape, device=trainer.strategy.root_device)
            summed = trainer.strategy.reduce(self._usage.get(name, nothing), reduce_op="sum")
            assert isinstance(summed, Tensor)
            share = summed / summed.sum(-1, keepdim=True)
            tag = "latents/usage" if len(shapes) < 2 else f"latents/{name}/usage"
            add_image(trainer.loggers, tag, heat_map(share), step_of(trainer))

    def _draw(
        self, trainer: Trainer, tag: str, model: Any, picture: Callable[[Any], Tensor]
    ) -> None:
        """Write an image; one that fails is not tried again."""
        if tag not in self._failed:
            try:
                add_image(trainer.loggers, tag, picture(model), step_of(trainer))
            except Exception as error:  # a method of the user's own must not end the run
                self._failed.add(tag)
                what = f"{type(model).__name__} failed with {type(error).__name__}: {error}"
                rank_zero_warn(f"no {tag}: {what}")

    def _reconstructions(self, model: Any) -> Tensor:
        assert self._inputs is not None
        images: Tensor = model.reconstruct(self._inputs)
        inputs = self._inputs.reshape(images.shape).to(images.dtype)
        return torch.cat([tile(inputs), tile(images)])

    def _prior_samples(self, model: Any) -> Tensor:
        return tile(model.sample_prior(self.num_images))


class GraphFigures(Callback):
    """Writes an image of the edge probabilities at each validation.

    The tag is ``graph/theta``; black is 0, white is 1. The learned probabilities are on the left,
    the true ones on the right if the data module has them as ``edge_probs``. The row is the node
    where an edge begins, the column the node where it ends. A model without a ``theta``, (N, N),
    gets no image.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the image."""
        theta = getattr(pl_module, "theta", None)
        if trainer.sanity_checking or not trainer.is_global_zero or theta is None:
            return
        pictures = [heat_map(theta)]
        truth = getattr(getattr(trainer, "datamodule", None), "edge_probs", None)
        if truth is not None:
            gap = torch.tensor(_BLUE).expand(len(pictures[0]), 12, 3)
            pictures += [gap, heat_map(truth)]
        add_image(trainer.loggers, "graph/theta", torch.cat(pictures, 1), step_of(trainer))


def figures_for(model: LightningModule) -> Callback:
    """The callback that writes images of this model."""
    # hasattr would compute theta, which may not be possible before the first batch.
    has_theta = isinstance(getattr(type(model), "theta", None), property)
    return GraphFigures() if has_theta else VAEFigures()
