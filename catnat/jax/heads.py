"""The heads by name, softmax and sparsemax. :mod:`catnat.jax.tree_heads` has the catnat heads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from catnat.checks import require_choice, require_within
from catnat.jax.categorical_head import CategoricalHead
from catnat.jax.mixed_head import MixedHead
from catnat.jax.numerics import largest_score, safe_log
from catnat.jax.sparsemax import sparsemax_probs
from catnat.jax.tree_heads import NaturalHead, SigmoidHead


def head_names() -> tuple[str, ...]:
    """Names of all heads.

    >>> head_names()
    ('softmax', 'sparsemax', 'sigmoid', 'natural')
    """
    return tuple(_HEADS)


def make_head(name: str, num_categories: int, mix: float = 0.0, **options: Any) -> CategoricalHead:
    """Build a head by its name.

    Args:
        name: a name from :func:`head_names`, or ``"catnat-sigmoid"``, ``"catnat-natural"``.
        num_categories: K >= 2.
        mix: share of the uniform distribution, 0 <= mix < 1; see
            :class:`~catnat.jax.mixed_head.MixedHead`.
        options: options of the named head, such as ``tail`` for natural.

    >>> make_head("softmax", 8)
    SoftmaxHead(num_categories=8)
    """
    known = _ALIASES.get(name, name)
    require_choice(head_names(), head=known)
    cls = _HEADS[known]
    choices = [*[each.name for each in fields(cls) if each.init][1:], "mix"]
    unknown = sorted(set(options) - set(choices))
    if unknown:
        raise ValueError(
            f"head {name!r} has no option {unknown[0]!r}; its options: {', '.join(choices)}"
        )
    require_within(0, 1, "[)", mix=mix)
    head = cls(num_categories, **options)
    return MixedHead(head, mix) if mix else head


@dataclass(frozen=True)
class SoftmaxHead(CategoricalHead):
    r"""p_k = exp(s_k) / sum_j exp(s_j), S = K.

    Its Fisher matrix diag(p) - p p^T is dense and singular: shifting all scores changes nothing.
    """

    name: str = field(init=False, repr=False, default="softmax")

    def log_probs(self, scores: Array) -> Array:
        """Normalized log-probabilities, (*, K) -> (*, K)."""
        out = jax.nn.log_softmax(self._checked(scores), -1)
        lowest = -largest_score(out.dtype)
        return jnp.where(out < lowest, lowest, out)

    def inverse(self, probs: Array) -> Array:
        """log p, floored where p = 0."""
        return safe_log(self._checked_probs(probs))

    def fisher(self, scores: Array) -> Array:
        """diag(p) - p p^T (the paper's Proposition); the diagonal makes every row sum to 0."""
        p = self.probs(scores)
        diagonal = jnp.eye(self.num_scores, dtype=bool)
        off = jnp.where(diagonal, 0.0, p[..., :, None] * p[..., None, :])
        return jnp.where(diagonal, off.sum(-1)[..., None], -off)

    def fisher_diagonal(self, scores: Array) -> Array:
        """p (1 - p)."""
        p = self.probs(scores)
        top = jnp.arange(self.num_scores) == p.argmax(-1, keepdims=True)
        others = jnp.where(top, 0.0, p).sum(-1, keepdims=True)
        return p * jnp.where(top, others, 1 - p)  # 1 - p loses accuracy for the largest p only


@dataclass(frozen=True)
class SparsemaxHead(CategoricalHead):
    r"""p = the point of the simplex nearest to the scores, S = K; sets many p_k to exactly 0.

    An impossible category gets no gradient. Where log-ratios of probabilities matter (PPO), mix
    in a little of the uniform distribution.
    """

    name: str = field(init=False, repr=False, default="sparsemax")

    def log_probs(self, scores: Array) -> Array:
        """Normalized log-probabilities, (*, K) -> (*, K)."""
        return safe_log(self.probs(scores))

    def probs(self, scores: Array) -> Array:
        """Probabilities, (*, K) -> (*, K); exactly 0 outside the support."""
        return sparsemax_probs(self._checked(scores))

    def inverse(self, probs: Array) -> Array:
        """The probabilities; a little below 0 where p = 0, so that p stays 0 after rounding."""
        p = self._checked_probs(probs)
        p = p / p.sum(-1, keepdims=True)
        K, eps = self.num_categories, float(jnp.finfo(p.dtype).eps)
        return jnp.where(p <= 0, -K * eps * (1 + K * eps), p)

    def fisher(self, scores: Array) -> Array:
        """J diag(1/p) J on the support, J = I - 1 1^T / n for a support of size n; 0 elsewhere."""
        q, support, n = self._support(scores)
        total = q.sum(-1)[..., None, None] / n[..., None] ** 2
        cross = q[..., :, None] * support[..., None, :] / n[..., None]
        both = support[..., :, None] * support[..., None, :]
        diagonal = q[..., None] * jnp.eye(self.num_scores, dtype=q.dtype)
        return diagonal - cross - cross.swapaxes(-1, -2) + total * both

    def fisher_diagonal(self, scores: Array) -> Array:
        """(1 - 2/n) / p_i + sum_k 1/p_k / n^2 on the support, 0 elsewhere."""
        q, support, n = self._support(scores)
        return q * (1 - 2 / n) + support * q.sum(-1, keepdims=True) / n**2

    def _support(self, scores: Array) -> tuple[Array, Array, Array]:
        """1/p on the support and 0 elsewhere, the support as 0/1, and its size (*, 1)."""
        p = self.probs(scores)
        support = (~(p <= 0)).astype(p.dtype)  # 1 for NaN
        return support / (p + (1 - support)), support, support.sum(-1, keepdims=True)


_HEADS: dict[str, type[CategoricalHead]] = {
    "softmax": SoftmaxHead,
    "sparsemax": SparsemaxHead,
    "sigmoid": SigmoidHead,
    "natural": NaturalHead,
}
_ALIASES = {"catnat-sigmoid": "sigmoid", "catnat-natural": "natural"}
