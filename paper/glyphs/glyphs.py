"""Letters of free fonts as data of a VAE: --data glyphs.Glyphs --root FOLDER."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from catnat.datamodules.loader import InMemoryDataModule
from catnat.datamodules.mnist import ImageLoader

torch.backends.cudnn.benchmark = True  # all steps have the same shapes


class Glyphs(InMemoryDataModule):
    """Images (B, 1, 28, 28) in [0, 1] of the file that make_glyphs.py writes; fonts are split.

    Args:
        root: folder of glyphs.npz.
        batch_size: B.
        seed: of the order.
    """

    def __init__(self, root: str = "data", batch_size: int = 100, seed: int = 0) -> None:
        super().__init__(batch_size, seed)
        self.save_hyperparameters()
        self.path = Path(root, "glyphs.npz")

    def setup(self, stage: str | None = None) -> None:
        """Read the images."""
        super().setup(stage)
        if not self.path.is_file():
            raise ValueError(f"there is no {self.path}; paper/glyphs/make_glyphs.py makes it")
        with np.load(self.path) as parts:
            self.images = {part: torch.from_numpy(parts[part]) for part in parts.files}

    def make_loader(self, part: str, device: torch.device, **options: Any) -> ImageLoader:
        """A loader of the images of one part."""
        size = self.batch_size if part == "train" or device.type == "cpu" else 2000
        return ImageLoader(self.images[part].to(device), size, **options)
