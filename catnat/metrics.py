"""Diagnostics as torchmetrics, which add up correctly over batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanAbsoluteError, Metric, MetricCollection

from catnat.fisher import off_diagonal_mass
from catnat.losses import energy_score


class FisherOffDiagonalMass(Metric):
    """Off-diagonal mass of the mean of all Fisher matrices that were added.

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


class RowMeans(Metric):
    """Means of several values over all rows of all batches and ranks.

    Sums and the number of rows are added over batches and ranks, and divided last. A rank may have
    no rows at all.

    Args:
        shapes: shape of the value of one row, by name.
        kwargs: passed to ``torchmetrics.Metric``.

    >>> means = RowMeans({"loss": ()})
    >>> means.update(2, loss=torch.tensor(3.0))
    >>> means.update(1, loss=torch.tensor(6.0))
    >>> means.compute()
    {'loss': tensor(3., dtype=torch.float64)}
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    count: Tensor

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.names = tuple(shapes)
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name, shape in shapes.items():
            zeros = torch.zeros(shape, dtype=torch.float64)
            self.add_state(f"sum_of_{name}", zeros, dist_reduce_fx="sum")

    def update(self, rows: int, **sums: Tensor) -> None:
        """Add so many rows, with each value summed over these rows."""
        self.count += rows
        for name, value in sums.items():
            getattr(self, f"sum_of_{name}").add_(value.detach())

    def reset(self) -> None:
        """Forget all rows. No row is a result too, so ``compute`` may follow at once."""
        super().reset()
        self.update(0)

    def compute(self) -> dict[str, Tensor]:
        """The means in float64, the same on every rank; an empty dictionary if there is no row."""
        if not self.count:
            return {}
        return {name: getattr(self, f"sum_of_{name}") / self.count for name in self.names}


# -- what is predicted with M sampled graphs ---------------------------------------------------


class _MeanOverRows(Metric):
    """Mean of a value per row of the batch, over all rows of all batches and ranks."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def values(self, samples: Tensor, target: Tensor) -> Tensor:
        """The value of each row, (M, B, *) and (B, *) -> (B,)."""
        raise NotImplementedError

    def update(self, samples: Tensor, target: Tensor) -> None:
        """Add a batch: M predictions (M, B, *) of a target (B, *)."""
        values = self.values(samples.flatten(2), target.flatten(1))
        self.total += values.double().sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        """The mean, a scalar."""
        return (self.total / self.count).float()


class EnergyScore(_MeanOverRows):
    """Mean :func:`~catnat.losses.energy_score`; all predictions of a row are one vector.

    >>> metric = EnergyScore()
    >>> metric.update(torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([[3.0]]))
    >>> metric.compute()
    tensor(1.)
    """

    def values(self, samples: Tensor, target: Tensor) -> Tensor:
        """(M, B, D) and (B, D) -> (B,)."""
        return energy_score(samples, target)


class PointMAE(_MeanOverRows):
    """Mean absolute error of the median of the samples (for even M the lower middle one).

    >>> metric = PointMAE()
    >>> metric.update(torch.tensor([[[0.0]], [[1.0]], [[9.0]]]), torch.tensor([[3.0]]))
    >>> metric.compute()
    tensor(2.)
    """

    def values(self, samples: Tensor, target: Tensor) -> Tensor:
        """(M, B, D) and (B, D) -> (B,)."""
        # Sorting short rows that lie together in memory is many times faster than columns.
        median = samples.movedim(0, -1).contiguous().median(-1).values
        return (median - target).abs().mean(1)


class PointMSE(_MeanOverRows):
    """Mean squared error of the mean of the samples.

    >>> metric = PointMSE()
    >>> metric.update(torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([[3.0]]))
    >>> metric.compute()
    tensor(4.)
    """

    def values(self, samples: Tensor, target: Tensor) -> Tensor:
        """(M, B, D) and (B, D) -> (B,)."""
        return (samples.mean(0) - target).square().mean(1)


def prediction_metrics(**kwargs: Any) -> MetricCollection:
    """energy_score, pp_mae and pp_mse, updated with samples (M, B, *) and a target (B, *).

    Args:
        kwargs: passed to every ``torchmetrics.Metric``.
    """
    metrics: dict[str, Metric | MetricCollection] = {
        "energy_score": EnergyScore(**kwargs),
        "pp_mae": PointMAE(**kwargs),
        "pp_mse": PointMSE(**kwargs),
    }
    return MetricCollection(metrics, compute_groups=False)


# -- edge probabilities θ against the true θ* --------------------------------------------------


class DeadEdges(Metric):
    """How many true edges (θ* > 0) have θ = 0: never sampled, and without a gradient.

    >>> metric = DeadEdges()
    >>> metric.update(torch.tensor([0.0, 0.0, 0.7]), torch.tensor([0.0, 0.75, 0.75]))
    >>> metric.compute()
    tensor(1.)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    dead: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("dead", torch.zeros(()), dist_reduce_fx="max")  # θ is equal on all ranks

    def update(self, theta: Tensor, truth: Tensor) -> None:
        """Replace the count by that of θ and θ*, (*) each."""
        self.dead = ((theta == 0) & (truth > 0)).sum().float()

    def compute(self) -> Tensor:
        """The number."""
        return self.dead


class EdgeCalibrationError(Metric):
    """Expected calibration error of θ: the mean θ against the mean θ*, for edges of similar θ.

    Edges are sorted into equal bins of θ. For each bin the mean θ is compared with the mean θ*, and
    the absolute differences are averaged over all edges. The result is at most the mean absolute
    error of θ: within a bin, errors of different sign cancel.

    Args:
        num_bins: how many bins of [0, 1].
        kwargs: passed to ``torchmetrics.Metric``.

    >>> metric = EdgeCalibrationError()
    >>> metric.update(torch.tensor([0.71, 0.79, 0.1]), torch.tensor([0.75, 0.75, 0.4]))
    >>> metric.compute()
    tensor(0.1000)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    difference: Tensor
    count: Tensor

    def __init__(self, num_bins: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_bins = num_bins
        zeros = torch.zeros(num_bins, dtype=torch.float64)
        self.add_state("difference", zeros, dist_reduce_fx="sum")
        self.add_state("count", zeros.clone(), dist_reduce_fx="sum")

    def update(self, theta: Tensor, truth: Tensor) -> None:
        """Add edges, (*) and (*)."""
        theta, truth = theta.detach().double().flatten(), truth.double().flatten()
        # A NaN is put into the first bin, and makes the difference of this bin NaN.
        bins = (theta * self.num_bins).nan_to_num(0.0).clamp(0, self.num_bins - 1).long()
        self.difference.index_add_(0, bins, theta - truth)
        self.count.index_add_(0, bins, torch.ones_like(theta))

    def compute(self) -> Tensor:
        """The error, a scalar."""
        return (self.difference.abs().sum() / self.count.sum()).float()


def edge_metrics() -> MetricCollection:
    """theta_mae, dead_edges and calibration, updated with θ (N, N) and θ* (N, N)."""
    metrics: dict[str, Metric | MetricCollection] = {
        "theta_mae": MeanAbsoluteError(),
        "dead_edges": DeadEdges(),
        "calibration": EdgeCalibrationError(),
    }
    return MetricCollection(metrics, compute_groups=False)
