"""MixedHead: a mixture of any head and the uniform distribution."""

import math

import torch
from torch import Tensor
from torch.func import jacrev
from torch.nn.functional import softplus

from catnat.checks import require_within
from catnat.heads.base import CategoricalHead
from catnat.numerics import can_branch_on, without_autocast


class MixedHead(CategoricalHead):
    r"""q = (1 - mix) p + mix / n over the n allowed categories, with p from the inner head.

    Without a mask all K categories are allowed, and every probability is at least mix / K. Mixing
    makes the Fisher matrix dense, also for a tree, and all methods take O(K):

    .. math:: G = (1 - mix)^2 J^T diag(1 / q) J, \qquad J = dp / ds

    Args:
        inner: head that computes p; its scores are the scores of this head.
        mix: share of the uniform distribution, between 0 and 1.

    >>> from catnat import make_head
    >>> make_head("softmax", 4, mix=0.2).probs(torch.tensor([100.0, 0.0, 0.0, 0.0]))
    tensor([0.8500, 0.0500, 0.0500, 0.0500])
    """

    def __init__(self, inner: CategoricalHead, mix: float) -> None:
        require_within(0, 1, "()", mix=mix)
        super().__init__(inner.num_categories)
        self.inner = inner
        self.mix = float(mix)
        self.num_scores = inner.num_scores
        self.validate_args = inner.validate_args
        self.name = getattr(inner, "name", type(inner).__name__)

    def log_probs(self, scores: Tensor) -> Tensor:
        """log((1 - mix) p + mix / n); the floor of the inner head for forbidden categories."""
        inner = self.inner._finite_log_probs(scores)
        allowed = self.allowed(scores)
        uniform = math.log(self.mix) - allowed.sum(-1, keepdim=True).to(inner.dtype).log()
        # The second derivative of logaddexp is NaN if one term is far below the other.
        share = inner + math.log1p(-self.mix)
        excess = share - uniform
        larger = excess > 0
        gap = torch.where(larger, -excess, excess)  # not -abs: its slope at 0 is 0
        mixed = torch.where(larger, share, uniform) + softplus(gap)
        return torch.where(allowed, mixed, inner)

    def inverse(self, probs: Tensor) -> Tensor:
        """Scores for which the inner head gives p = (q - mix / K) / (1 - mix).

        A probability below mix / K raises a ValueError; it becomes NaN if reading the values would
        wait for a device.
        """
        q = self._checked_probs(probs)
        share = self.mix / self.num_categories
        low = q < share * (1 - 32 * torch.finfo(probs.dtype).eps)  # not where NaN
        if can_branch_on(probs) and bool(low.any()):
            raise ValueError(
                f"with mix={self.mix:g} a probability must be at least {share:.4g}, "
                f"got {q[low][0].item():.4g}"
            )
        p = (q - share).clamp_min(0)
        p = torch.where(low.any(-1, keepdim=True), torch.nan, p / p.sum(-1, keepdim=True))
        return self.inner.inverse(p.to(probs.dtype))

    def fisher(self, scores: Tensor) -> Tensor:
        """(1 - mix)^2 J^T diag(1/q) J, (*, S) -> (*, S, S)."""
        root = self._fisher_root(scores)
        with without_autocast(root):
            return root.mT @ root

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """Diagonal of :meth:`fisher`, (*, S) -> (*, S)."""
        return self._fisher_root(scores).square().sum(-2)

    def saturated(self, scores: Tensor) -> Tensor:
        """Saturated scores of the inner head: mixing gives them no gradient."""
        return self.inner.saturated(scores)

    def allowed(self, scores: Tensor) -> Tensor:
        """Recover the mask from :meth:`masked` scores, (*, S) -> (*, K) bool."""
        return self.inner.allowed(scores)

    def _masked(self, scores: Tensor, mask: Tensor, before: Tensor | None) -> Tensor:
        return self.inner._masked(scores, mask, before)

    def _fisher_root(self, scores: Tensor) -> Tensor:
        """R with R^T R = G: the gradients of q_k in the scores over sqrt(q_k), (*, K, S)."""
        scores = self._checked(scores)
        q = self.probs(scores)

        def probs_of_all_rows(scores: Tensor) -> Tensor:
            return self.inner.probs(scores).reshape(-1, self.num_categories).sum(0)

        # Rows are independent, so the derivative of the sum over rows is that of each row.
        jacobian = jacrev(probs_of_all_rows)(scores)  # (K, *, S)
        scale = (1 - self.mix) * torch.where(q <= 0, torch.inf, q).rsqrt()
        return scale[..., None] * jacobian.movedim(0, -2)

    def extra_repr(self) -> str:
        """Sizes and options shown by ``print(head)``."""
        return f"{super().extra_repr()}, mix={self.mix:g}"
