"""Categorical heads: strategies that turn scores into a categorical distribution.

A head is an ``nn.Module`` whose ``forward`` maps scores (*, S) to a
:class:`~catnat.distributions.HeadCategorical` over K categories. Four are built in; a new one is
one class::

    class MyHead(CategoricalHead, name="mine"): ...
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from catnat._numerics import compute_dtype, safe_log, transforms_active
from catnat._tree import path_sums, right_shares, subtree_sums
from catnat.distributions import HeadCategorical
from catnat.ops import sparsemax_log_probs, tree_log_probs
from catnat.ops.splits import CustomSplit, NaturalSplit, SigmoidSplit, Split

_REGISTRY: dict[str, type[CategoricalHead]] = {}
_ALIASES: dict[str, str] = {}


def head_names() -> tuple[str, ...]:
    """Names of all registered heads, in order of definition.

    >>> head_names()[:4]
    ('softmax', 'sparsemax', 'sigmoid', 'natural')
    """
    return tuple(_REGISTRY)


def make_head(head: str | CategoricalHead, num_categories: int, **options: Any) -> CategoricalHead:
    """Build a head by name, or check that a given one fits.

    Args:
        head: a name from :func:`head_names`, an alias such as ``"catnat-natural"``, or a head.
        num_categories: K >= 2.
        options: options of that head, such as ``amplitude`` for natural.

    >>> make_head("natural", 8)
    NaturalHead(num_categories=8, num_scores=7)
    """
    if isinstance(head, CategoricalHead):
        if options:
            raise ValueError(f"options {sorted(options)} given with a finished head {head!r}")
        if head.num_categories != num_categories:
            raise ValueError(
                f"head has {head.num_categories} categories, {num_categories} are needed"
            )
        return head
    cls = _REGISTRY.get(_ALIASES.get(head, head))
    if cls is None:
        raise ValueError(f"unknown head {head!r}; choose from {', '.join(head_names())}")
    known = list(inspect.signature(cls).parameters)[1:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        choices = ", ".join(known) or "none"
        raise ValueError(f"head {head!r} has no option {unknown[0]!r}; its options: {choices}")
    return cls(num_categories, **options)


class CategoricalHead(nn.Module, ABC):
    """Maps S scores to a distribution over K categories.

    Subclasses implement :meth:`log_probs`, :meth:`inverse` and :meth:`fisher`; the rest follows,
    and is overridden where a closed form is cheaper.

    Args:
        num_categories: K, at least 2. The number of scores S is set to K; a subclass that needs
            another sets ``self.num_scores`` afterwards.

    Shapes:
        scores (*, S); probabilities (*, K); Fisher matrices (*, S, S).
    """

    name: ClassVar[str]
    num_categories: int
    num_scores: int

    def __init_subclass__(
        cls, name: str | None = None, aliases: tuple[str, ...] = (), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if name is None:
            return
        known = _REGISTRY.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(f"head name {name!r} is taken by {known.__qualname__}")
        cls.name = name
        _REGISTRY[name] = cls
        _ALIASES.update(dict.fromkeys(aliases, name))

    def __init__(self, num_categories: int) -> None:
        super().__init__()
        if isinstance(num_categories, bool) or not isinstance(num_categories, int):
            raise ValueError(f"num_categories must be an integer, got {num_categories!r}")
        if num_categories < 2:
            raise ValueError(f"num_categories must be at least 2, got {num_categories}")
        self.num_categories = num_categories
        self.num_scores = num_categories

    @abstractmethod
    def log_probs(self, scores: Tensor) -> Tensor:
        """Normalized log-probabilities, (*, S) -> (*, K): finite for every finite score."""

    @abstractmethod
    def inverse(self, probs: Tensor) -> Tensor:
        """Scores that give these probabilities, (*, K) -> (*, S)."""

    @abstractmethod
    def fisher(self, scores: Tensor) -> Tensor:
        """Exact Fisher information matrix in the scores, (*, S) -> (*, S, S)."""

    def probs(self, scores: Tensor) -> Tensor:
        """Probabilities, (*, S) -> (*, K); exactly 0 where a category is impossible."""
        return self.log_probs(scores).exp()

    def forward(self, scores: Tensor) -> HeadCategorical:
        """The distribution these scores stand for."""
        return HeadCategorical(self.log_probs(scores))

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """Diagonal of :meth:`fisher`, (*, S) -> (*, S)."""
        return self.fisher(scores).diagonal(dim1=-2, dim2=-1)

    def mean_fisher(self, scores: Tensor) -> Tensor:
        """:meth:`fisher` averaged over all leading dimensions, (*, S) -> (S, S)."""
        return self.fisher(scores.reshape(-1, self.num_scores)).mean(0)

    def natural_gradient(self, scores: Tensor, grad: Tensor, damping: float = 1e-8) -> Tensor:
        """G^+ grad: the gradient in the metric of :meth:`fisher`, (*, S) -> (*, S).

        Eigenvalues of G up to ``damping`` times the largest count as zero.
        """
        inverse: Tensor = torch.linalg.pinv(self.fisher(scores), rtol=damping, hermitian=True)
        return (inverse @ grad.to(inverse.dtype)[..., None])[..., 0]

    def saturated(self, scores: Tensor) -> Tensor:
        """Scores in a flat region, where they get no gradient, (*, S) -> (*, S) bool."""
        return torch.zeros_like(scores, dtype=torch.bool)

    def extra_repr(self) -> str:
        """What ``print(head)`` shows."""
        return f"num_categories={self.num_categories}, num_scores={self.num_scores}"

    def _checked(self, scores: Tensor) -> Tensor:
        """Scores in the dtype they are computed in, after checking shape and dtype."""
        if not scores.dim() or scores.shape[-1] != self.num_scores:
            raise ValueError(
                f"{type(self).__name__} over {self.num_categories} categories takes "
                f"{self.num_scores} scores in the last dimension, got shape {tuple(scores.shape)}"
            )
        if not scores.is_floating_point():
            raise ValueError(f"scores must be floating point, got {scores.dtype}")
        return scores.to(compute_dtype(scores.dtype))

    def _checked_probs(self, probs: Tensor) -> Tensor:
        """Probabilities in float64, after checking their shape."""
        if not probs.dim() or probs.shape[-1] != self.num_categories:
            raise ValueError(
                f"expected {self.num_categories} probabilities in the last dimension, "
                f"got shape {tuple(probs.shape)}"
            )
        return probs.double()


class SoftmaxHead(CategoricalHead, name="softmax"):
    r"""p_k = exp(s_k) / sum_j exp(s_j), S = K.

    Its Fisher matrix diag(p) - p p^T is dense and singular: shifting all scores changes nothing.

    >>> SoftmaxHead(3).probs(torch.zeros(3))
    tensor([0.3333, 0.3333, 0.3333])
    """

    def log_probs(self, scores: Tensor) -> Tensor:
        """Normalized log-probabilities, (*, K) -> (*, K)."""
        out = torch.log_softmax(self._checked(scores), -1)
        lowest = torch.finfo(out.dtype).min  # -inf where scores lie further apart than that
        if torch.compiler.is_compiling() or transforms_active():
            return out.clamp_min(lowest)
        out.data.clamp_min_(lowest)  # .data: the gradient needs exp(out) only, which is 0 anyway
        return out

    def inverse(self, probs: Tensor) -> Tensor:
        """log p, floored where p = 0."""
        return safe_log(self._checked_probs(probs)).to(probs.dtype)

    def fisher(self, scores: Tensor) -> Tensor:
        """diag(p) - p p^T (the paper's Proposition)."""
        p = self.probs(scores)
        return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """p (1 - p)."""
        p = self.probs(scores)
        return p * (1 - p)

    def mean_fisher(self, scores: Tensor) -> Tensor:
        """diag(mean p) - P^T P / B over the B rows P."""
        p = self.probs(scores).flatten(0, -2) if scores.dim() > 1 else self.probs(scores)[None]
        return torch.diag(p.mean(0)) - p.t() @ p / p.shape[0]

    def natural_gradient(self, scores: Tensor, grad: Tensor, damping: float = 1e-8) -> Tensor:
        """G^+ grad in O(K): (grad - mean grad) / p, minus its own mean."""
        direction = grad - grad.mean(-1, keepdim=True)  # gradients of probabilities sum to 0
        direction = direction / self.probs(scores).clamp_min(damping)
        return direction - direction.mean(-1, keepdim=True)


class SparsemaxHead(CategoricalHead, name="sparsemax"):
    r"""p = the point of the simplex nearest to the scores, S = K; sets many p_k to exactly 0.

    An impossible category gets no gradient. Where log-ratios of probabilities matter (PPO), mix
    in a little of the uniform distribution.

    >>> SparsemaxHead(3).probs(torch.tensor([0.5, 0.3, -2.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """

    def log_probs(self, scores: Tensor) -> Tensor:
        """Normalized log-probabilities, (*, K) -> (*, K)."""
        return sparsemax_log_probs(self._checked(scores))

    def inverse(self, probs: Tensor) -> Tensor:
        """The probabilities themselves: the simplex projects onto itself."""
        return self._checked_probs(probs).to(probs.dtype)

    def fisher(self, scores: Tensor) -> Tensor:
        """J diag(1/p) J on the support, J = I - 1 1^T / n for a support of size n; 0 elsewhere."""
        q, support, n = self._support(scores)
        total = q.sum(-1)[..., None, None] / n[..., None].square()
        cross = q[..., :, None] * support[..., None, :] / n[..., None]
        both = support[..., :, None] * support[..., None, :]
        return torch.diag_embed(q) - cross - cross.transpose(-1, -2) + total * both

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """(1 - 2/n) / p_i + sum_k 1/p_k / n^2 on the support, 0 elsewhere."""
        q, support, n = self._support(scores)
        return q * (1 - 2 / n) + support * q.sum(-1, keepdim=True) / n.square()

    def mean_fisher(self, scores: Tensor) -> Tensor:
        """:meth:`fisher` averaged over all leading dimensions, in O(B K^2) time, O(K^2) memory."""
        q, support, n = self._support(scores.reshape(-1, self.num_scores))
        cross = (q / n).t() @ support
        both = (support * (q.sum(-1, keepdim=True) / n.square())).t() @ support
        return torch.diag(q.mean(0)) + (both - cross - cross.t()) / q.shape[0]

    def natural_gradient(self, scores: Tensor, grad: Tensor, damping: float = 1e-8) -> Tensor:
        """G^+ grad in O(K): p (grad - p . grad) on the support."""
        p = self.probs(scores)
        _, support, n = self._support(scores)
        grad = support * (grad - (support * grad).sum(-1, keepdim=True) / n)
        return p * (grad - (p * grad).sum(-1, keepdim=True))

    def saturated(self, scores: Tensor) -> Tensor:
        """Scores of impossible categories."""
        return self.probs(scores) == 0

    def _support(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """1/p on the support and 0 elsewhere, the support as 0/1, and its size (*, 1)."""
        p = self.probs(scores)
        support = (p > 0).to(p.dtype)
        return support / torch.where(p > 0, p, 1.0), support, support.sum(-1, keepdim=True)


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
        self.num_scores = num_categories - 1
        if not math.isfinite(center):
            raise ValueError(f"center must be finite, got {center!r}")
        self.split: Split = CustomSplit(self.log_split) if split is None else split
        self.center = float(center)
        self.uniform_at_zero = uniform_at_zero
        self.register_buffer("constants32", None, persistent=False)
        self.register_buffer("constants64", None, persistent=False)
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
        scores = self._checked(scores)
        return path_sums(*self.split.log_split(scores, self._constants(scores)))[0].exp()

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
        reached = left + right > 0
        scores = self.split.inverse(left, right) + self._centre().to(probs.device)
        return self._settled(torch.where(reached, scores, 0.0).to(probs.dtype), left, right)

    def fisher(self, scores: Tensor) -> Tensor:
        """The diagonal matrix of :meth:`fisher_diagonal`."""
        return torch.diag_embed(self.fisher_diagonal(scores))

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """P(node) a'^2 / (a (1 - a)) (the paper's Theorem), (*, S) -> (*, S) in O(S)."""
        return self.node_probs(scores) * self.information(scores)

    def mean_fisher(self, scores: Tensor) -> Tensor:
        """The diagonal matrix of the mean of :meth:`fisher_diagonal`."""
        return torch.diag(self.fisher_diagonal(scores).reshape(-1, self.num_scores).mean(0))

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
        centre = self._centre()
        if centre.any():
            self.constants32 = self.split.node_constants(centre, torch.float32).to(device)
            self.constants64 = self.split.node_constants(centre, torch.float64).to(device)

    def _constants(self, scores: Tensor) -> Tensor | None:
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
        if not (math.isfinite(amplitude) and amplitude > 0):
            raise ValueError(f"amplitude must be positive and finite, got {amplitude!r}")
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
