"""The catnat heads: a tree of binary splits, whose Fisher matrix is diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from catnat._tree import right_shares, subtree_sums
from catnat.heads import CategoricalHead
from catnat.ops import tree_fisher, tree_log_probs
from catnat.ops.splits import CustomSplit, NaturalSplit, SigmoidSplit, Split


class CatnatHead(CategoricalHead):
    r"""A tree of binary splits: p_k is the product of the splits on the way to leaf k, S = K - 1.

    Class k with bits b_1..b_H has p_k = prod_h a_h^{b_h} (1 - a_h)^{1 - b_h}. The Fisher matrix is
    diagonal: G_ii = P(node i) a'^2 / (a (1 - a)) (the paper's Theorem). K need not be a power of
    two: the tree is then a complete one, see :mod:`catnat._tree`.

    A subclass overrides :meth:`log_split`, which says how a score splits its node; the rest
    follows. The built-in ones bring a :class:`~catnat.ops.splits.Split` instead, which knows more
    closed forms and has fused kernels.

    Args:
        num_categories: K, at least 2.
        center: the paper's C, added to every node's centre.
        uniform_at_zero: give each node a centre such that zero scores mean the uniform
            distribution (without, they do only at K a power of two).
    """

    fisher_is_diagonal = True
    constants32: Tensor | None
    constants64: Tensor | None

    def __init__(
        self,
        num_categories: int,
        center: float = 0.0,
        uniform_at_zero: bool = True,
        *,
        split: Split | None = None,
    ) -> None:
        super().__init__(num_categories)
        self.num_scores = self.num_categories - 1
        if not math.isfinite(center):
            raise ValueError(f"center must be finite, got {center!r}")
        if split is not None and type(self).log_split is not CatnatHead.log_split:
            raise TypeError(
                f"{type(self).__name__} overrides log_split: subclass CatnatHead for it"
            )
        self.split: Split = CustomSplit(self.log_split) if split is None else split
        self.center = float(center)
        self.uniform_at_zero = uniform_at_zero
        self.register_buffer("constants32", None, persistent=False)
        self.register_buffer("constants64", None, persistent=False)
        self._constants_known = False
        if split is not None:  # else once the subclass is complete, with options of its own
            self._set_constants("cpu")

    def log_split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 - a(x)) and log a(x) of centred scores x = s - C, differentiable; a increases."""
        if isinstance(self.split, CustomSplit):
            raise NotImplementedError(f"{type(self).__name__} must override log_split")
        return self.split.log_split(x, None)

    def log_probs(self, scores: Tensor) -> Tensor:
        """Normalized log-probabilities, (*, K-1) -> (*, K)."""
        scores = self._checked(scores)
        return tree_log_probs(scores, self.split, self._constants(scores))

    def node_probs(self, scores: Tensor) -> Tensor:
        """Probability P(node) of passing through each internal node, (*, K-1) -> (*, K-1)."""
        left, right = subtree_sums(self.probs(scores))  # P(node) is the sum of the leaves below
        return left + right

    def information(self, scores: Tensor) -> Tensor:
        """Fisher information a'^2 / (a (1 - a)) of each split alone, (*, S) -> (*, S)."""
        scores = self._checked(scores)
        left, right = self.split.slopes(scores, self._constants(scores))
        return left * right

    def inverse(self, probs: Tensor) -> Tensor:
        """Scores of the splits p(bit 1) : p(bit 0) at every node; 0 at unreachable nodes.

        On the boundary of the simplex the nearest representable score.
        """
        left, right = subtree_sums(self._checked_probs(probs))
        reached = ~(left + right <= 0)  # NaN passes
        scores = self.split.inverse(left, right) + self._centre().to(probs.device)
        return self._settled(torch.where(reached, scores, 0.0).to(probs.dtype), left, right)

    def fisher(self, scores: Tensor) -> Tensor:
        """The diagonal matrix of :meth:`fisher_diagonal`."""
        return torch.diag_embed(self.fisher_diagonal(scores))

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """P(node) a'^2 / (a (1 - a)) (the paper's Theorem), (*, S) -> (*, S) in O(S)."""
        fused = self._fused_fisher(scores)
        if fused is not None:
            return fused[..., :-1]
        return self.node_probs(scores) * self.information(scores)

    def mean_fisher(self, scores: Tensor) -> Tensor:
        """The diagonal matrix of the mean of :meth:`fisher_diagonal`."""
        return torch.diag(self.fisher_diagonal(scores).reshape(-1, self.num_scores).mean(0))

    def diagnostics(self, scores: Tensor) -> Tensor:
        """Mean :meth:`fisher_diagonal` and share of saturated scores, (*, B, S) -> (*, S + 1)."""
        fused = self._fused_fisher(scores)
        return super().diagnostics(scores) if fused is None else fused.mean(-2)

    def _fused_fisher(self, scores: Tensor) -> Tensor | None:
        scores = self._checked(scores)
        return tree_fisher(scores, self.split, self._constants(scores))

    def natural_gradient(self, scores: Tensor, grad: Tensor, damping: float = 1e-8) -> Tensor:
        """Grad / G_ii in O(S); G_ii is taken as at least ``damping`` (unreachable nodes)."""
        return grad / self.fisher_diagonal(scores).clamp_min(damping)

    def _settled(self, scores: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Hook for heads whose rounding must not leave the boundary of the simplex."""
        return scores

    def _centre(self) -> Tensor:
        """The centre C of every node, (S,) in float64."""
        shares = right_shares(self.num_categories)
        if not self.uniform_at_zero:
            return torch.full_like(shares, self.center)
        offset = -self.split.inverse(1 - shares, shares)
        return torch.where(shares == 0.5, 0.0, offset) + self.center

    def _set_constants(self, device: torch.device | str) -> None:
        self._constants_known = True
        centre = self._centre()
        if centre.any():
            self.constants32 = self.split.node_constants(centre, torch.float32).to(device)
            self.constants64 = self.split.node_constants(centre, torch.float64).to(device)

    def _constants(self, scores: Tensor) -> Tensor | None:
        if not self._constants_known:
            self._set_constants(scores.device)
        return self.constants64 if scores.dtype == torch.float64 else self.constants32

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CatnatHead:
        """Follow the model to another device, but keep the constants exact under ``.half()``."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.constants32 is not None:
            self._set_constants(self.constants32.device)
        return self


class SigmoidHead(CatnatHead, name="sigmoid", aliases=("catnat-sigmoid",)):
    r"""catnat with a(s) = 1 / (1 + exp(-(s - C))).

    >>> SigmoidHead(4).probs(torch.zeros(3))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self, num_categories: int, center: float = 0.0, uniform_at_zero: bool = True
    ) -> None:
        super().__init__(num_categories, center, uniform_at_zero, split=SigmoidSplit())


class NaturalHead(CatnatHead, name="natural", aliases=("catnat-natural",)):
    r"""catnat with a(s) = (1 + sin(pi (s - C) / A)) / 2 for |s - C| <= A/2, flat beyond.

    Its Fisher matrix is diag(P(node) (pi/A)^2) (the paper's Corollary).

    Args:
        num_categories: K, at least 2.
        amplitude: A, the width of the region in which the split moves; 2 pi gives the sigmoid's
            slope at 0.
        center: C.
        uniform_at_zero: as in :class:`CatnatHead`.

    >>> NaturalHead(4).fisher(torch.zeros(3))
    tensor([[0.2500, 0.0000, 0.0000],
            [0.0000, 0.1250, 0.0000],
            [0.0000, 0.0000, 0.1250]])
    """

    split: NaturalSplit

    def __init__(
        self,
        num_categories: int,
        amplitude: float = 2 * math.pi,
        center: float = 0.0,
        uniform_at_zero: bool = True,
    ) -> None:
        if not 1e-15 <= amplitude <= 1e15:  # beyond, float32 has no room for the arithmetic
            raise ValueError(f"amplitude must lie in 1e-15..1e15, got {amplitude!r}")
        split = NaturalSplit(float(amplitude))
        super().__init__(num_categories, center, uniform_at_zero, split=split)

    def information(self, scores: Tensor) -> Tensor:
        """(pi/A)^2 up to the edges |s - C| = A/2 and on them, 0 beyond."""
        scores = self._checked(scores)
        distance, _ = self.split.distance(scores, self._constants(scores))
        return torch.where(distance < 0, 0.0, self.split.rate**2 + 0 * distance)

    def saturated(self, scores: Tensor) -> Tensor:
        """Scores on or beyond the edges."""
        scores = self._checked(scores)
        return self.split.distance(scores, self._constants(scores))[0] <= 0

    def _settled(self, scores: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Push scores of impossible bits over the edge where rounding left them just inside."""
        outward = torch.where(left <= 0, torch.inf, -torch.inf).to(scores.dtype)
        stuck = ((left <= 0) ^ (right <= 0)) & ~self.saturated(scores)
        return torch.where(stuck, torch.nextafter(scores, outward), scores)
