"""What data modules have in common whose data stay in memory, on the training device."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from catnat.datamodules.loader import InMemoryLoader


class InMemoryDataModule(LightningDataModule):
    """Three parts, "train", "val" and "test", each given out by an :class:`InMemoryLoader`.

    Args:
        batch_size: B, of each device.
        seed: of whatever is random.
    """

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.batch_size, self.seed = batch_size, seed
        self.steps_per_batch: int | None = None  # for models that take several steps per call
        self._train_loader: InMemoryLoader | None = None
        self._train_state: dict[str, int] | None = None

    @abstractmethod
    def make_loader(self, part: str, device: torch.device, **options: Any) -> InMemoryLoader:
        """A loader of one part that gives out batches on a device."""

    def setup(self, stage: str | None = None) -> None:
        """Begin anew."""
        self._train_loader = self._train_state = None

    def train_dataloader(self) -> InMemoryLoader:
        """Batches in a new order every epoch."""
        if self._train_loader is None:  # else Lightning reloads it, and the epochs go on
            overfit = getattr(self.trainer, "overfit_batches", 0)  # always the same few batches
            loader = self._loader("train", not overfit, self.steps_per_batch)
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
        """Where the training data are; Lightning restores its loaders' states only mid-epoch."""
        return {} if self._train_loader is None else self._train_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self._train_state = state_dict

    def _loader(
        self, part: str, shuffle: bool = False, steps_per_batch: int | None = None
    ) -> InMemoryLoader:
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
            steps_per_batch=steps_per_batch,
        )
