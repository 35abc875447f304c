"""Images for TensorBoard: reconstructions, prior samples and latents of a VAE, edges of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.tensorboard.writer import SummaryWriter

from catnat import HeadProbe
from catnat.callbacks.dashboard import kind_of, write_image
from catnat.checks import require_at_least
from catnat.noise import forked_random_state

_BLUE = (0.2, 0.3, 0.6)


def add_image(loggers: Iterable[Logger], tag: str, image: Tensor, step: int) -> None:
    """Give an image (H, W, 1 or 3), bytes or numbers in [0, 1], to every logger that takes any."""
    if image.dtype != torch.uint8:
        image = (image.detach().float().clamp(0, 1) * 255).round().byte()
    pixels = image.cpu().numpy()
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if isinstance(experiment, SummaryWriter):
            write_image(experiment, tag, pixels, step)
        elif hasattr(experiment, "add_image"):
            experiment.add_image(tag, pixels, step, dataformats="HWC")
        elif hasattr(logger, "log_image"):
            logger.log_image(tag, [pixels], step=step)


def step_of(trainer: Trainer) -> int:
    """The step under which Lightning writes the metrics of a validation."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def heat_map(matrix: Tensor, cell: int = 12) -> Tensor:
    """A matrix (R, C) as an image (R * cell, C * cell, 3): 0 is black, 1 is white."""
    grey = matrix.detach().float().cpu().clamp(0, 1)
    return grey.repeat_interleave(cell, 0).repeat_interleave(cell, 1)[..., None].expand(-1, -1, 3)


def tile(images: Tensor, columns: int) -> Tensor:
    """One image of n images, row by row: (n, C, H, W) -> (n / columns * H, columns * W, 1 or 3).

    C = 3 channels are colours; for any other C the mean of the channels is shown. (n, H, W) works
    as C = 1.
    """
    images = images.unsqueeze(1) if images.ndim == 3 else images
    if images.shape[1] != 3:
        images = images.mean(1, keepdim=True)
    channels, height, width = images.shape[1:]
    grid = images.reshape(-1, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    return grid.reshape(-1, columns * width, channels)


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
        self._failed: set[str] = set()  # methods of the model that raised an error

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach before the first call of a model that may be compiled."""
        self._attach(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach for a validation outside of training."""
        if self._probe is None:
            self._attach(pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the previous validation, and scores that the heads saw in training."""
        self._usage, self._inputs = {}, None
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
            self._draw_images(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks."""
        if self._probe is not None:
            self._probe.detach()
            self._probe = None

    def _attach(self, model: LightningModule) -> None:
        try:
            self._probe = HeadProbe(model).attach()
        except ValueError:  # the model has no head
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

    def _draw_images(self, trainer: Trainer, model: Any) -> None:
        pictures = {
            "reconstruct": ("images/reconstructions", self._reconstructions),
            "sample_prior": ("images/prior", self._prior_samples),
        }
        for method, (tag, draw) in pictures.items():
            if not hasattr(model, method) or method in self._failed:
                continue
            try:
                picture = draw(model)
            except Exception as error:  # a method of the user's own must not end the run
                self._failed.add(method)
                name = f"{type(model).__name__}.{method}"
                rank_zero_warn(f"no {tag}: {name} failed with {type(error).__name__}: {error}")
            else:
                if picture is not None:
                    add_image(trainer.loggers, tag, picture, step_of(trainer))

    def _reconstructions(self, model: Any) -> Tensor | None:
        if self._inputs is None:
            return None
        images: Tensor = model.reconstruct(self._inputs)
        inputs = self._inputs.reshape(images.shape).to(images.dtype)
        return tile(torch.cat([inputs, images]), images.shape[0])

    def _prior_samples(self, model: Any) -> Tensor:
        return tile(model.sample_prior(self.num_images), self.num_images)


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
    return GraphFigures() if kind_of(model) == "graph" else VAEFigures()
