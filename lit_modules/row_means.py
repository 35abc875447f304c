"""Means over everything that all ranks evaluate, however it is cut into batches."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from torch import Tensor


class RowMeans:
    """Means over rows: sums and counts are added over batches and ranks, and divided last.

    A rank may have no rows at all. It takes part in the sum all the same, so the shapes are known
    from the beginning.

    Args:
        device: of what is added.
        shapes: of the value of one row, by name.
    """

    def __init__(self, device: torch.device, **shapes: tuple[int, ...]) -> None:
        shapes = {"count": (), **shapes}
        self._sums = {
            name: torch.zeros(shape, dtype=torch.float64, device=device)
            for name, shape in shapes.items()
        }

    def add(self, count: int, **sums: Tensor) -> None:
        """Add so many rows, of which each value is given as a sum over them."""
        self._sums["count"] += count
        for name, value in sums.items():
            self._sums[name] += value

    def compute(self, trainer: Trainer) -> dict[str, Tensor]:
        """The means over the rows of all ranks, the same on every rank; none if there is no row."""
        flat = torch.cat([each.flatten() for each in self._sums.values()])
        flat = trainer.strategy.reduce(flat, reduce_op="sum")
        parts = flat.split([each.numel() for each in self._sums.values()])
        sums = {
            name: part.view_as(each)
            for (name, each), part in zip(self._sums.items(), parts, strict=True)
        }
        count = sums.pop("count")
        return {name: each / count for name, each in sums.items()} if count else {}
