"""The heads by name, softmax and sparsemax. :mod:`catnat.jax.tree_heads` has the catnat heads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from catnat.checks import require_choice
from catnat.jax.head import CategoricalHead
from catnat.jax.mixed_head import MixedHead
from catnat.jax.numerics import LOG_ZERO, largest_score, safe_log
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
        return jnp.where(out == -jnp.inf, LOG_ZERO, jnp.where(out < lowest, lowest, out))

    def inverse(self, probs: Array) -> Array:
        """log p, floored where p = 0."""
        out: Array = safe_log(self._checked_probs(probs))
        return out

    def fisher(self, scores: Array) -> Array:
        """diag(p) - p p^T (the paper's Proposition); the diagonal makes every row sum to 0."""
        p = self.probs(scores)[..., None]
        off = jnp.where(jnp.eye(self.num_scores, dtype=bool), 0.0, p * p.mT)
        out: Array = off.sum(-1)[..., None] * jnp.eye(self.num_scores, dtype=p.dtype) - off
        return out

    def fisher_diagonal(self, scores: Array) -> Array:
        """p (1 - p)."""
        p = self.probs(scores)
        return p * (1 - p)


@dataclass(frozen=True)
class SparsemaxHead(CategoricalHead):
    r"""p = the point of the simplex nearest to the scores, S = K; sets many p_k to exactly 0.

    An impossible category gets no gradient. Where log-ratios of probabilities matter (PPO), mix
    in a little of the uniform distribution. A probability is a difference of scores, and has their
    accuracy: in float32 about 1e-7, however small it is.
    """

    name: str = field(init=False, repr=False, default="sparsemax")

    def log_probs(self, scores: Array) -> Array:
        """Normalized log-probabilities, (*, K) -> (*, K)."""
        out: Array = safe_log(self.probs(scores))
        return out

    def probs(self, scores: Array) -> Array:
        """Probabilities, (*, K) -> (*, K); exactly 0 outside the support."""
        out: Array = _project(self._checked(scores))
        return out

    def inverse(self, probs: Array) -> Array:
        """The probabilities; a little below 0 where p = 0, so that p stays 0 after rounding."""
        p = self._checked_probs(probs)
        p = p / p.sum(-1, keepdims=True)
        K, eps = self.num_categories, float(jnp.finfo(p.dtype).eps)
        return jnp.where(p <= 0, -K * eps * (1 + K * eps), p)


@jax.custom_jvp
def _project(scores: Array) -> Array:
    """p_k = max(s_k - tau, 0) with tau such that the p_k sum to 1 (Martins and Astudillo, 2016)."""
    z = scores - scores.max(-1, keepdims=True)
    ranked = -jnp.sort(-z, -1)
    excess = jnp.cumsum(ranked, -1) - 1
    n = (ranked * jnp.arange(1, z.shape[-1] + 1) > excess).sum(-1, keepdims=True)
    tau = jnp.take_along_axis(excess, jnp.maximum(n, 1) - 1, -1) / jnp.maximum(n, 1)
    p = jnp.where(z > tau, z - tau, 0.0)
    broken = jnp.isnan(z).any(-1, keepdims=True)
    return jnp.where(broken, jnp.nan, p / p.sum(-1, keepdims=True))


@_project.defjvp
def _project_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """On the support a tangent minus its mean, 0 elsewhere."""
    p, tangent = _project(*primals), tangents[0]
    support = ~(p <= 0)
    n = support.sum(-1, keepdims=True).astype(p.dtype)
    mean = jnp.where(support, tangent, 0.0).sum(-1, keepdims=True) / n
    return p, jnp.where(support, tangent - mean + 0 * p, 0.0)  # NaN stays NaN


_HEADS: dict[str, type[CategoricalHead]] = {
    "softmax": SoftmaxHead,
    "sparsemax": SparsemaxHead,
    "sigmoid": SigmoidHead,
    "natural": NaturalHead,
}
_ALIASES = {"catnat-sigmoid": "sigmoid", "catnat-natural": "natural"}
