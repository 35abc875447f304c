"""Data of this project: pictures of bars, drawn when they are asked for."""

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader


class BarsDataModule(LightningDataModule):
    """Pictures (1, 28, 28) in which each row and each column is lit with probability 1/8."""

    def __init__(self, size: int = 2000, batch_size: int = 100) -> None:
        super().__init__()
        self.size, self.batch_size = size, batch_size

    def setup(self, stage: str | None = None) -> None:
        """Draw all pictures, always the same."""
        noise = torch.Generator().manual_seed(0)
        lit = torch.rand(3 * self.size, 2, 28, generator=noise) < 1 / 8
        pictures = (lit[:, 0, :, None] | lit[:, 1, None, :]).float().unsqueeze(1)
        self.train, self.val, self.test = pictures.split(self.size)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled batches (B, 1, 28, 28)."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Batches to select by."""
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Batches to report."""
        return DataLoader(self.test, batch_size=self.batch_size)
