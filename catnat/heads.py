"""Categorical heads: strategies that turn scores into a categorical distribution.

A head is an ``nn.Module`` whose ``forward`` maps scores (*, S) to a
:class:`~catnat.distributions.HeadCategorical` over K categories. Four are built in; a new one is
one class::

    class MyHead(CategoricalHead, name="mine"): ...

Softmax and sparsemax are here, the catnat heads in :mod:`catnat.tree_heads`.
"""

from __future__ import annotations

import inspect
import operator
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catnat.checks import require_at_least, require_choice
from catnat.distributions import HeadCategorical
from catnat.numerics import (
    at_least_float32,
    exp_of_log_probs,
    is_plain,
    largest_score,
    safe_log,
)
from catnat.ops import sparsemax_log_probs

_REGISTRY: dict[str, type[CategoricalHead]] = {}
_ALIASES: dict[str, str] = {}


def head_names() -> tuple[str, ...]:
    """Names of all registered heads, in order of definition.

    >>> from catnat import head_names
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

    >>> from catnat import make_head
    >>> make_head("softmax", 8)
    SoftmaxHead(num_categories=8, num_scores=8)
    """
    if isinstance(head, CategoricalHead):
        if options:
            raise ValueError(f"options {sorted(options)} given with a finished head {head!r}")
        if head.num_categories != num_categories:
            raise ValueError(
                f"head has {head.num_categories} categories, {num_categories} are needed"
            )
        return head
    name = _ALIASES.get(head, head)
    require_choice(head_names(), head=name)
    cls = _REGISTRY[name]
    parameters = inspect.signature(cls).parameters
    known = list(parameters)[1:]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = sorted(set(options) - set(known))
    if unknown and not open_ended:
        choices = ", ".join(known) or "none"
        raise ValueError(f"head {head!r} has no option {unknown[0]!r}; its options: {choices}")
    return cls(num_categories, **options)


def _centred(x: Tensor, inside: Tensor) -> Tensor:
    """x minus its mean over the places inside, and 0 at the others."""
    x = torch.where(inside, x, 0.0)
    mean = x.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True)
    return torch.where(inside, x - mean, 0.0)


def _identity(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


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
    fisher_is_diagonal: ClassVar[bool] = False
    num_categories: int
    num_scores: int
    validate_args: bool | None = None  # of the distributions; None leaves it to them

    if TYPE_CHECKING:  # torch declares that calling a module returns Any

        def __call__(self, scores: Tensor) -> HeadCategorical:
            """The distribution these scores stand for."""

    def __init_subclass__(
        cls, name: str | None = None, aliases: tuple[str, ...] = (), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if name is None:
            return
        for each in (name, *aliases):
            known = _REGISTRY.get(_ALIASES.get(each, each))
            if known is not None and _identity(known) != _identity(cls):  # a cell may run twice
                raise ValueError(f"head name {each!r} is taken by {_identity(known)}")
        cls.name = name
        _REGISTRY[name] = cls
        _ALIASES.update(dict.fromkeys(aliases, name))

    def __init__(self, num_categories: int) -> None:
        super().__init__()
        if isinstance(num_categories, bool) or not hasattr(num_categories, "__index__"):
            raise ValueError(f"num_categories must be an integer, got {num_categories!r}")
        require_at_least(2, num_categories=num_categories)
        self.num_categories = self.num_scores = operator.index(num_categories)  # NumPy's, too

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
        return exp_of_log_probs(self.log_probs(scores))

    def forward(self, scores: Tensor) -> HeadCategorical:
        """The distribution these scores stand for."""
        return HeadCategorical(self.log_probs(scores), self.validate_args, normalized=True)

    def fisher_diagonal(self, scores: Tensor) -> Tensor:
        """Diagonal of :meth:`fisher`, (*, S) -> (*, S)."""
        return self.fisher(scores).diagonal(dim1=-2, dim2=-1)

    def mean_fisher(self, scores: Tensor) -> Tensor:
        """:meth:`fisher` averaged over all leading dimensions, (*, S) -> (S, S)."""
        return self.fisher(scores.reshape(-1, self.num_scores)).mean(0)

    def diagnostics(self, scores: Tensor) -> Tensor:
        """Mean Fisher matrix over B rows and share of saturated scores, in one float32 vector.

        (*, B, S) -> (*, S^2 + 1), or (*, S + 1) where only the diagonal needs to be told
        (``fisher_is_diagonal``). For watching a run at every step: cheap, no waiting for a device,
        and many steps at once.
        """
        saturated = self.saturated(scores).float().mean((-2, -1))
        steps = scores.reshape(-1, *scores.shape[-2:])
        fisher = torch.stack([self.mean_fisher(each) for each in steps]).float()
        fisher = fisher.diagonal(dim1=1, dim2=2) if self.fisher_is_diagonal else fisher.flatten(1)
        return torch.cat((fisher.reshape(*saturated.shape, -1), saturated[..., None]), -1)

    def natural_gradient(self, scores: Tensor, grad: Tensor, damping: float = 0.0) -> Tensor:
        """(G + damping I)^-1 grad: the gradient in the metric of :meth:`fisher`, (*, S) -> (*, S).

        Without damping G^+ grad, with the pseudo-inverse of G. Half precision is computed, and
        returned, in float32.
        """
        require_at_least(0, damping=damping)
        with torch.autocast(scores.device.type, enabled=False):
            scores = self._checked(scores)
            return self._natural_gradient(scores, grad.to(scores.dtype), damping)

    def _natural_gradient(self, scores: Tensor, grad: Tensor, damping: float) -> Tensor:
        fisher = self.fisher(scores)
        eye = torch.eye(self.num_scores, dtype=fisher.dtype, device=fisher.device)
        inverse: Tensor = torch.linalg.pinv(fisher + damping * eye, hermitian=True)
        return (inverse @ grad[..., None])[..., 0]

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
        wide = at_least_float32(scores)
        if wide.dtype != scores.dtype and wide.requires_grad and is_plain(scores):
            largest = torch.finfo(scores.dtype).max  # steep gradients must not overflow on return
            wide.register_hook(lambda grad: grad.clamp(-largest, largest))
        return wide

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
        return out.clamp_min(-largest_score(out.dtype))

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
        top = p.argmax(-1, keepdim=True)  # 1 - p cancels there, and only there
        others = p.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        return p * (1 - p).scatter(-1, top, others)

    def mean_fisher(self, scores: Tensor) -> Tensor:
        """diag(mean p) - P^T P / B over the B rows P."""
        return self._mean_fisher(scores.reshape(-1, self.num_scores))

    def diagnostics(self, scores: Tensor) -> Tensor:
        """:meth:`mean_fisher` of B rows; no score is saturated: (*, B, S) -> (*, S^2 + 1)."""
        return F.pad(self._mean_fisher(scores).flatten(-2), (0, 1)).float()

    def _mean_fisher(self, scores: Tensor) -> Tensor:
        p = self.probs(scores)  # (*, B, S)
        with torch.autocast(p.device.type, enabled=False):
            return self._from_products(p.mT @ p / p.shape[-2])

    @staticmethod
    def _from_products(products: Tensor) -> Tensor:
        """G from p p^T or its mean; rows of G sum to 0, and p - p^2 would cancel."""
        diagonal = torch.eye(products.shape[-1], dtype=torch.bool, device=products.device)
        off = products.masked_fill(diagonal, 0.0)
        return torch.diag_embed(off.sum(-1)) - off

    def _natural_gradient(self, scores: Tensor, grad: Tensor, damping: float) -> Tensor:
        """By Sherman and Morrison's formula, in O(K)."""
        p = self.probs(scores)
        if damping == 0:
            possible = ~(p <= 0)
            direction = _centred(grad, possible) / torch.where(possible, p, 1.0)
            return _centred(direction, possible)  # P diag(1/p) P, with P the projection
        w = 1 / (p + damping)
        shift = grad.sum(-1, keepdim=True) / damping - (w * grad).sum(-1, keepdim=True)
        return w * (grad + p * shift / (p * w).sum(-1, keepdim=True))


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
        """The probabilities themselves; a little below 0 where p = 0, to stay there in rounding."""
        p = self._checked_probs(probs)
        p = p / p.sum(-1, keepdim=True)
        K, eps = self.num_categories, torch.finfo(probs.dtype).eps
        below = -K * (eps + K * torch.finfo(torch.float64).eps)  # of the input, of the projection
        return torch.where(p <= 0, below, p).to(probs.dtype)

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
        return self._mean_fisher(*self._support(scores.reshape(-1, self.num_scores)))

    def diagnostics(self, scores: Tensor) -> Tensor:
        """:meth:`mean_fisher` and the share of :meth:`saturated` scores, from one projection."""
        q, support, n = self._support(scores)
        still = (self.num_scores - n * (n > 1)).mean(-2) / self.num_scores
        return torch.cat((self._mean_fisher(q, support, n).flatten(-2), still), -1).float()

    @staticmethod
    def _mean_fisher(q: Tensor, support: Tensor, n: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            cross = (q / n).mT @ support
            both = (support * (q.sum(-1, keepdim=True) / n.square())).mT @ support
        return torch.diag_embed(q.mean(-2)) + (both - cross - cross.mT) / q.shape[-2]

    def _natural_gradient(self, scores: Tensor, grad: Tensor, damping: float) -> Tensor:
        """In O(K): G maps onto the vectors that sum to 0 over the support, and is 0 elsewhere."""
        p = self.probs(scores)
        possible = ~(p <= 0)
        inside = _centred(grad, possible)
        w = p / (1 + damping * p)
        mean = (w * inside).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)
        moved = w * torch.where(possible, inside - mean, 0.0)
        return moved if damping == 0 else moved + (grad - inside) / damping

    def saturated(self, scores: Tensor) -> Tensor:
        """Scores of impossible categories, and all of them where one category is certain."""
        possible = ~(self.probs(scores) <= 0)
        return ~possible | (possible.sum(-1, keepdim=True) == 1)

    def _support(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """1/p on the support and 0 elsewhere, the support as 0/1, and its size (*, 1)."""
        p = self.probs(scores)
        support = (~(p <= 0)).to(p.dtype)  # NaN is in it
        return support / (p + (1 - support)), support, support.sum(-1, keepdim=True)


import catnat.tree_heads  # noqa: E402, F401 - so that the catnat heads are registered, too
