"""The base of data modules whose data stay in memory, on the training device."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from catnat.checks import require_at_least, require_positive
from catnat.datamodules.loader import InMemoryLoader


class InMemoryDataModule(LightningDataModule):
    """Data in three parts, "train", "val" and "test", each with an :class:`InMemoryLoader`.

    Args:
        batch_size: B, of each device.
        seed: of the split, the order, and all other randomness of the data.
    """

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        require_positive(batch_size=batch_size)
        require_at_least(0, seed=seed)
        self.batch_size, self.seed = batch_size, seed
        self._train_loader: InMemoryLoader | None = None
        self._train_state: dict[str, int] | None = None

    @abstractmethod
    def make_loader(self, part: str, device: torch.device, **options: Any) -> InMemoryLoader:
        """A loader of one part that gives out batches on a device."""

    def setup(self, stage: str | None = None) -> None:
        """Forget the loader of an earlier run."""
        self._train_loader = self._train_state = None

    def train_dataloader(self) -> InMemoryLoader:
        """Batches in a new order every epoch."""
        if self._train_loader is None:  # Lightning may ask again: the epochs of one loader go on
            overfit = getattr(self.trainer, "overfit_batches", 0)  # the same few batches each epoch
            loader = self._loader("train", shuffle=not overfit)
            limit = getattr(self.trainer, "limit_train_batches", 1.0)
            loader.max_batches = limit if isinstance(limit, int) else int(limit * len(loader))
            if self._train_state is not None:
                loader.load_state_dict(self._train_state)
            self._train_loader = loader
        return self._train_loader

    def val_dataloader(self) -> InMemoryLoader:
        """The validation part, always in the same order."""
        return self._loader("val")

    def test_dataloader(self) -> InMemoryLoader:
        """The test part, always in the same order."""
        return self._loader("test")

    def state_dict(self) -> dict[str, int]:
        """The state of the training loader; Lightning itself saves it only within an epoch."""
        return {} if self._train_loader is None else self._train_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Make the training loader go on from this state."""
        self._train_state = state_dict

    def _loader(self, part: str, shuffle: bool = False) -> InMemoryLoader:
        device, rank, world_size = torch.device("cpu"), 0, 1
        if self.trainer is not None:
            device = self.trainer.strategy.root_device
            rank, world_size = self.trainer.global_rank, self.trainer.world_size
        return self.make_loader(
            part,
            device,
            shuffle=shuffle,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
