"""Frames of Atari games as data of a VAE, and its networks: --data frames.Frames --root FOLDER."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from catnat.datamodules.loader import InMemoryDataModule
from catnat.datamodules.mnist import ImageLoader
from catnat.lit_modules import DiscreteVAE

CHANNELS = (8, 16, 32, 64)  # at 32 x 32, 16 x 16, 8 x 8 and 4 x 4 pixels
FEATURES = CHANNELS[-1] * 4 * 4

torch.backends.cudnn.benchmark = True  # all steps have the same shapes


class Frames(InMemoryDataModule):
    """Images (B, 1, 64, 64) in [0, 1] of the file that make_frames.py writes; games are split.

    Args:
        root: folder of frames.npz.
        batch_size: B.
        seed: of the order.
    """

    def __init__(self, root: str = "data", batch_size: int = 100, seed: int = 0) -> None:
        super().__init__(batch_size, seed)
        self.save_hyperparameters()
        self.path = Path(root, "frames.npz")

    def setup(self, stage: str | None = None) -> None:
        """Read the images."""
        super().setup(stage)
        if not self.path.is_file():
            raise ValueError(f"there is no {self.path}; paper/frames/make_frames.py makes it")
        with np.load(self.path) as parts:
            self.images = {part: torch.from_numpy(parts[part]) for part in parts.files}

    def make_loader(self, part: str, device: torch.device, **options: Any) -> ImageLoader:
        """A loader of the images of one part."""
        size = self.batch_size if part == "train" or device.type == "cpu" else 500
        return ImageLoader(self.images[part].to(device), size, **options)


class FrameVAE(DiscreteVAE):
    """As DiscreteVAE, for images of 64 x 64: four strided convolutions each way, no batch norm."""

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """Encoder (B, 1, 64, 64) -> (B, num_scores), decoder (B, num_inputs) -> pixel logits."""
        down: list[nn.Module] = []
        for before, after in pairwise((1, *CHANNELS)):
            down += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.SiLU()]
        up: list[nn.Module] = []
        for before, after in pairwise((*reversed(CHANNELS), 1)):
            up += [nn.SiLU(), nn.ConvTranspose2d(before, after, 4, stride=2, padding=1)]
        encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(FEATURES, num_scores))
        unflatten = nn.Unflatten(1, (CHANNELS[-1], 4, 4))
        decoder = nn.Sequential(nn.Linear(num_inputs, FEATURES), unflatten, *up)
        return encoder, decoder
