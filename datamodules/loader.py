"""Batches of images held in memory: no workers, no per-image Python, exactly resumable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Variant = Literal["gray", "binary", "stochastic"]

SPLIT, _ORDER, _BINARIZATION = 1, 2, 3  # first number of a seed: what it is for


def mixed_seed(*numbers: int) -> int:
    """One well-mixed seed of some numbers >= 0: torch uses only the low 32 bits of a CPU seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class ImageLoader:
    """Iterates over batches (B, 1, 28, 28) of float images in [0, 1], gathered by index.

    The order of epoch e is a function of (seed, e), and so is the binarization of each of its
    batches. ``state_dict`` says how far the current epoch has come; after ``load_state_dict`` the
    next pass goes on from there. With several ranks, a batch of ``batch_size * world_size`` images
    is dealt out, so that together they see what one process with that batch size would see.

    Without ``shuffle`` (evaluation) the order is that of the images, every pass is the same, and
    the last batch may be smaller; with it, images beyond the last full batch wait for another
    epoch.

    Args:
        images: (n, 28, 28) uint8, on the device where the batches are wanted.
        batch_size: B, of each rank.
        variant: as in :class:`~datamodules.MNISTDataModule`.
        shuffle: a new order in every epoch.
        seed: of order and binarization.
        rank: which share is ours.
        world_size: how many shares there are.
    """

    batch_sampler = None  # Lightning asks for it beside ``sampler``

    def __init__(
        self,
        images: Tensor,
        batch_size: int,
        variant: Variant = "gray",
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0..{world_size - 1}, got {rank}")
        if shuffle and batch_size * world_size > len(images):
            raise ValueError(
                f"a batch of {batch_size} on {world_size} device(s) is more than the "
                f"{len(images)} training images"
            )
        self.images = images
        self.batch_size = batch_size
        self.variant = variant
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._position = 0  # batches of this epoch already given out
        self._resumed = False

    @property
    def sampler(self) -> ImageLoader:
        """Where Lightning looks for ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, or stay where we are within it."""
        if epoch != self.epoch:
            self.epoch, self._position, self._resumed = epoch, 0, False

    def state_dict(self) -> dict[str, int]:
        """Where we are, the same on all ranks."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next pass go on from where the state was taken."""
        self.epoch, self._position, self._resumed = state["epoch"], state["position"], True

    def __len__(self) -> int:
        stride = self.batch_size * self.world_size
        return len(self.images) // stride if self.shuffle else -(-len(self.images) // stride)

    def __iter__(self) -> Iterator[Tensor]:
        # Lightning may make an iterator, load a state or set the epoch, and only then draw:
        # everything is decided at the first draw, because this is a generator.
        if self._resumed and self._position < len(self):
            self._resumed = False
        elif self._position:
            self.epoch, self._position, self._resumed = self.epoch + 1, 0, False
        epoch = self.epoch if self.shuffle else 0
        order = self._order(epoch)
        for batch in range(self._position, len(self)):
            self._position = batch + 1
            yield self._batch(order, epoch, batch)

    def _order(self, epoch: int) -> Tensor:
        device = self.images.device
        if not self.shuffle:
            return torch.arange(len(self.images), device=device)
        generator = torch.Generator().manual_seed(mixed_seed(_ORDER, self.seed, epoch))
        return torch.randperm(len(self.images), generator=generator).to(device)

    def _batch(self, order: Tensor, epoch: int, batch: int) -> Tensor:
        stride = self.batch_size * self.world_size
        index = order[batch * stride : (batch + 1) * stride][self.rank :: self.world_size]
        images = self.images[index][:, None]  # (B, 1, 28, 28)
        if self.variant == "binary":
            return (images > 127).float()
        gray = images.float().div_(255)
        if self.variant == "gray":
            return gray
        seed = mixed_seed(_BINARIZATION, self.seed, epoch, batch, self.rank)
        generator = torch.Generator(self.images.device).manual_seed(seed)
        return torch.bernoulli(gray, generator=generator)
