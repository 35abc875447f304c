"""Softmax and sparsemax: the heads with one score for each category."""

import torch
from torch import Tensor

from catnat.heads.base import CategoricalHead
from catnat.kernels.dispatch import softmax_log_probs, sparsemax_log_probs
from catnat.kernels.reference import centered
from catnat.numerics import LOG_ZERO, safe_log, without_autocast


class SoftmaxHead(CategoricalHead, name="softmax"):
    r"""p_k = exp(s_k) / sum_j exp(s_j), S = K.

    Its Fisher matrix diag(p) - p p^T is dense and singular: adding a constant to all scores does
    not change p.

    >>> SoftmaxHead(3).probs(torch.zeros(3))
    tensor([0.3333, 0.3333, 0.3333])
    """

    def log_probs(self, scores: Tensor) -> Tensor:
        """Normalized log-probabilities, (*, K) -> (*, K); those at the floor get no gradient."""
        return softmax_log_probs(self._checked(scores))

    def inverse(self, probs: Tensor) -> Tensor:
        """log p, floored where p = 0."""
        return safe_log(self._checked_probs(probs)).to(probs.dtype)

    def fisher(self, scores: Tensor) -> Tensor:
        """diag(p) - p p^T (the paper's Proposition)."""
        p = self.probs(scores)
        return self._from_products(p[..., :, None] * p[..., None, :])

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """p (1 - p)."""
        p = self.probs(scores)
        top = p.argmax(-1, keepdim=True)  # 1 - p is inaccurate only for the largest p
        remainder = p.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        return p * (1 - p).scatter(-1, top, remainder)

    def _mean_fisher(self, scores: Tensor) -> Tensor:
        """diag(mean p) - P^T P / B over the B rows P."""
        p = self.probs(scores)  # (*, B, S)
        with without_autocast(p):
            return self._from_products(p.mT @ p / p.shape[-2])

    @staticmethod
    def _from_products(products: Tensor) -> Tensor:
        """G from p p^T or its mean; the diagonal makes every row sum to 0.

        The formula p - p^2 for the diagonal is inaccurate where p is near 1.
        """
        diagonal = torch.eye(products.shape[-1], dtype=torch.bool, device=products.device)
        off = products.masked_fill(diagonal, 0.0)
        return torch.diag_embed(off.sum(-1)) - off

    def _natural_gradient(self, scores: Tensor, grad: Tensor, damping: float) -> Tensor:
        """Computed by the Sherman-Morrison formula in O(K)."""
        p = self.probs(scores)
        if damping == 0:
            possible = ~(p <= 0)
            direction = centered(grad, possible) / torch.where(possible, p, 1.0)
            largest = torch.finfo(p.dtype).max / (4 * self.num_scores)  # their sum stays finite
            direction = direction.clamp(-largest, largest)
            return centered(direction, possible)  # P diag(1/p) P, with P the projection
        w = 1 / (p + damping)
        shift = grad.sum(-1, keepdim=True) / damping - (w * grad).sum(-1, keepdim=True)
        return w * (grad + p * shift / (p * w).sum(-1, keepdim=True))


class SparsemaxHead(CategoricalHead, name="sparsemax"):
    r"""p is the point of the simplex nearest to the scores, S = K; many p_k are exactly 0.

    An impossible category gets no gradient. If log-ratios of probabilities matter, as in PPO, mix
    in a small share of the uniform distribution.

    >>> SparsemaxHead(3).probs(torch.tensor([0.5, 0.3, -2.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """

    def log_probs(self, scores: Tensor) -> Tensor:
        """Normalized log-probabilities, (*, K) -> (*, K)."""
        return sparsemax_log_probs(self._checked(scores))

    def inverse(self, probs: Tensor) -> Tensor:
        """The probabilities; a little below 0 where p = 0, so that p stays 0 after rounding."""
        p = self._checked_probs(probs)
        p = p / p.sum(-1, keepdim=True)
        K = self.num_categories
        eps = torch.finfo(probs.dtype).eps
        # rounding errors of the input and of the projection
        below = -K * (eps + K * torch.finfo(torch.float64).eps)
        return torch.where(p <= 0, below, p).to(probs.dtype)

    def fisher(self, scores: Tensor) -> Tensor:
        """J diag(1/p) J on the support, J = I - 1 1^T / n for a support of size n; 0 elsewhere."""
        q, support, half = self._parts(scores)
        product = half[..., :, None] * support[..., None, :]
        return torch.diag_embed(q) + product + product.mT

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """(1 - 2/n) / p_i + sum_k 1/p_k / n^2 on the support, 0 elsewhere."""
        q, _, half = self._parts(scores)
        return q + 2 * half

    def _mean_fisher(self, scores: Tensor) -> Tensor:
        """Mean of :meth:`fisher` in O(B K^2) time and O(K^2) memory."""
        q, support, half = self._parts(scores)
        with without_autocast(q):
            product = half.mT @ support / q.shape[-2]
        return torch.diag_embed(q.mean(-2)) + product + product.mT

    def saturated(self, scores: Tensor) -> Tensor:
        """Scores of impossible categories, and all of them where one category is certain."""
        possible = ~(self.probs(scores) <= 0)
        return ~possible | (possible.sum(-1, keepdim=True) == 1)

    def _parts(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q = 1/p on the support and 0 elsewhere, u = 1 on the support, and h, (*, K) each.

        They make G = diag(q) - (q u^T + u q^T) / n + u u^T sum(q) / n^2 = diag(q) + h u^T + u h^T.
        """
        log_p = self.log_probs(scores)  # LOG_ZERO, or above -80
        support = (log_p - LOG_ZERO).clamp(0, 1)  # faster on a CPU than a comparison; NaN stays NaN
        q = support * log_p.clamp_min(-80).neg().exp()
        n = support.sum(-1, keepdim=True)
        half = (support * (q.sum(-1, keepdim=True) / (2 * n)) - q) / n
        return q, support, half
