"""Diagnostics as torchmetrics that are exact over batches and ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from catnat.compiling import not_compiled
from catnat.fisher import off_diagonal_mass
from catnat.losses import energy_score

_BINS = 10  # of edge probabilities, in the calibration error


class FisherOffDiagonalMass(Metric):
    """Off-diagonal mass of the mean of all added Fisher matrices.

    Add exact matrices, or two independent estimates of each matrix, as returned by
    :func:`catnat.fisher.paired_mean_fishers`. With two estimates, the result is the empirical mass,
    ``fim/off_diagonal_mass`` of the monitors, without a noise floor.

    The state is the *sum of matrices*. The ratio is computed after the sum over batches and ranks,
    because a mean of ratios would depend on how the data are split. On several ranks, use
    ``update -> compute -> reset``; ``metric(x)`` returns the value of the batch on each rank.

    Args:
        num_scores: number of scores (S).
        norm: ``"fro"`` or ``"l1"``, see :func:`catnat.fisher.off_diagonal_mass`.
        kwargs: arguments of ``torchmetrics.Metric``.

    >>> metric = FisherOffDiagonalMass(num_scores=2)
    >>> metric.update(torch.tensor([[0.25, -0.25], [-0.25, 0.25]]))
    >>> metric.compute()
    tensor(0.7071)
    """

    full_state_update = False

    fisher_sum: Tensor
    other_sum: Tensor

    def __init__(self, num_scores: int, norm: str = "fro", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        off_diagonal_mass(torch.zeros(1, 1), norm)  # an unknown norm fails here, not at the end
        self.norm = norm
        zeros = torch.zeros(num_scores, num_scores, dtype=torch.float64)
        self.add_state("fisher_sum", zeros, dist_reduce_fx="sum")
        self.add_state("other_sum", zeros.clone(), dist_reduce_fx="sum")

    def update(self, fisher: Tensor, weight: int = 1, other: Tensor | None = None) -> None:
        """Add matrices.

        Args:
            fisher: matrices (*, S, S), summed over the leading dimensions.
            weight: number of rows in the mean that each matrix is, as in
                ``head.mean_fisher(scores)``.
            other: second, independent estimates of the matrices, (*, S, S); None for exact
                matrices. Do not mix exact matrices and estimates.
        """
        if other is not None and self.norm != "fro":
            raise ValueError(f"two estimates need norm 'fro', got {self.norm!r}")
        size = self.fisher_sum.shape[-1]
        for total, added in (
            (self.fisher_sum, fisher),
            (self.other_sum, fisher if other is None else other),
        ):
            if added.shape[-2:] != (size, size):
                shape = tuple(added.shape)
                raise ValueError(
                    f"expected Fisher matrices of shape (*, {size}, {size}), got {shape}"
                )
            flat = added.detach().reshape(-1, size, size)
            total += flat.sum(0).to(total.dtype) * weight

    def compute(self) -> Tensor:
        """The mass, a scalar in [0, 1]."""
        if self.norm != "fro":
            return off_diagonal_mass(self.fisher_sum, self.norm).float()
        return off_diagonal_mass(self.fisher_sum, other=self.other_sum).float()


class RowMeans(Metric):
    """Means of several values over all rows of all batches and ranks.

    Sums and numbers of rows are added over batches and ranks before the division. A rank may have
    no rows.

    Args:
        shapes: shape of the value of one row, by name.
        kwargs: arguments of ``torchmetrics.Metric``.

    >>> means = RowMeans({"loss": ()})
    >>> means.update(2, loss=torch.tensor(3.0))
    >>> means.update(1, loss=torch.tensor(6.0))
    >>> means.compute()
    {'loss': tensor(3., dtype=torch.float64)}
    """

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
        """Add rows.

        Args:
            rows: number of rows.
            sums: sum of each value over these rows, by name.
        """
        if rows and set(sums) != set(self.names):
            raise ValueError(f"expected sums of {self.names}, got {tuple(sums)}")
        self.count += rows
        for name, value in sums.items():
            getattr(self, f"sum_of_{name}").add_(value.detach())

    @not_compiled  # torchmetrics counts the updates
    def add_rows(self, **rows: Tensor) -> None:
        """Add the values of B rows, (B, *) each."""
        count = len(next(iter(rows.values())))
        self.update(count, **{name: values.double().sum(0) for name, values in rows.items()})

    def reset(self) -> None:
        """Remove all rows. The empty state is valid, so ``compute`` can follow immediately."""
        super().reset()
        self.update(0)

    def compute(self) -> dict[str, Tensor]:
        """The means in float64, equal on all ranks; an empty dictionary without rows."""
        if not self.count:
            return {}
        return {name: getattr(self, f"sum_of_{name}") / self.count for name in self.names}


def prediction_errors(samples: Tensor, target: Tensor) -> dict[str, Tensor]:
    r"""Errors of M predictions per row, (M, B, \*) and (B, \*) -> (B,) each.

    - ``energy_score``: :func:`~catnat.losses.energy_score` with all predictions of a row as one
      vector.
    - ``pp_mae``: absolute error of the median of the samples (the lower median for even M).
    - ``pp_mse``: squared error of the mean of the samples.

    >>> prediction_errors(torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([[3.0]]))
    {'energy_score': tensor([1.]), 'pp_mae': tensor([3.]), 'pp_mse': tensor([4.])}
    """
    samples = samples.flatten(2)
    target = target.flatten(1)
    # torch.median has no deterministic implementation on CUDA. Sorting puts NaN last.
    ranked = samples.sort(0).values
    median = torch.where(ranked[-1].isnan(), torch.nan, ranked[(len(ranked) - 1) // 2])
    return {
        "energy_score": energy_score(samples, target),
        "pp_mae": (median - target).abs().mean(1),
        "pp_mse": (samples.mean(0) - target).square().mean(1),
    }


def prediction_means(**kwargs: Any) -> RowMeans:
    """An empty :class:`RowMeans` for :func:`prediction_errors`."""
    return RowMeans(dict.fromkeys(("energy_score", "pp_mae", "pp_mse"), ()), **kwargs)


def edge_errors(theta: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Errors of edge probabilities θ compared with the true θ*, (*) and (*) -> scalars.

    - ``theta_mae``: mean absolute error.
    - ``dead_edges``: number of true edges (θ* > 0) with θ = 0. Such edges are never sampled and get
      no gradient.
    - ``calibration``: expected calibration error. Edges are sorted into ten equal bins of θ. The
      absolute difference between the mean θ and the mean θ* of a bin is averaged over all edges. It
      is at most ``theta_mae``, because errors of different sign cancel within a bin.

    >>> edge_errors(torch.tensor([0.71, 0.79, 0.1]), torch.tensor([0.75, 0.75, 0.4]))
    {'calibration': tensor(0.1000), 'dead_edges': tensor(0.), 'theta_mae': tensor(0.1267)}
    """
    theta = theta.detach().flatten()
    truth = truth.flatten()
    # NaN goes to the first bin and makes the difference of this bin NaN.
    bins = (theta.double() * _BINS).nan_to_num(0.0).clamp(0, _BINS - 1).long()
    difference = theta.new_zeros(_BINS, dtype=torch.float64)
    difference.index_add_(0, bins, theta.double() - truth.double())
    return {
        "calibration": (difference.abs().sum() / len(theta)).float(),
        "dead_edges": ((theta == 0) & (truth > 0)).sum().float(),
        "theta_mae": (theta - truth).abs().sum() / len(theta),
    }
