"""Fisher diagnostics as torchmetrics: right over batches and over ranks by construction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from catnat.fisher import off_diagonal_mass


class FisherOffDiagonalMass(Metric):
    """Off-diagonal mass of the Fisher matrix averaged over everything seen.

    The state is the *sum of matrices*: batches and ranks are added first and the ratio is taken
    last. A mean of ratios would depend on how the data were cut. Over ranks use
    ``update -> compute -> reset``; ``metric(x)`` returns each rank's own batch value.

    Args:
        num_scores: S.
        norm: ``"l1"`` or ``"fro"``, see :func:`catnat.fisher.off_diagonal_mass`.
        kwargs: passed to ``torchmetrics.Metric``.

    >>> metric = FisherOffDiagonalMass(num_scores=2)
    >>> metric.update(torch.tensor([[0.25, -0.25], [-0.25, 0.25]]))
    >>> metric.compute()
    tensor(0.5000)
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    fisher_sum: Tensor
    count: Tensor

    def __init__(self, num_scores: int, norm: str = "l1", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        off_diagonal_mass(torch.zeros(1, 1), norm)  # an unknown norm fails here, not at the end
        self.norm = norm
        zeros = torch.zeros(num_scores, num_scores, dtype=torch.float64)
        self.add_state("fisher_sum", zeros, dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, fisher: Tensor, weight: int = 1) -> None:
        """Add matrices.

        Args:
            fisher: (*, S, S); leading dimensions are summed over.
            weight: how many rows each matrix is a mean of, as with ``head.mean_fisher(scores)``.
        """
        size = self.fisher_sum.shape[-1]
        if fisher.shape[-2:] != (size, size):
            raise ValueError(
                f"expected Fisher matrices of shape (*, {size}, {size}), got {tuple(fisher.shape)}"
            )
        flat = fisher.detach().reshape(-1, size, size)
        self.fisher_sum += flat.sum(0).to(self.fisher_sum.dtype) * weight
        self.count += flat.shape[0] * weight

    def compute(self) -> Tensor:
        """The mass, a scalar in [0, 1]."""
        return off_diagonal_mass(self.fisher_sum, self.norm).float()

    def mean(self) -> Tensor:
        """The mean matrix on this rank so far, (S, S)."""
        return self.fisher_sum / self.count.clamp_min(1)
