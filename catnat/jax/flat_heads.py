"""Softmax, sparsemax and mixtures with the uniform distribution; heads by name."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from catnat.checks import require_choice, require_within
from catnat.jax.head import CategoricalHead
from catnat.jax.numerics import LOG_ZERO, largest_score, safe_log
from catnat.jax.tree_heads import NaturalHead, SigmoidHead


def head_names() -> tuple[str, ...]:
    """Names of all heads.

    >>> head_names()
    ('softmax', 'sparsemax', 'sigmoid', 'natural')
    """
    return tuple(_HEADS)


def make_head(name: str, num_categories: int, mix: float = 0.0, **options: Any) -> CategoricalHead:
    """Build a head by name.

    Args:
        name: a name from :func:`head_names`, or ``"catnat-sigmoid"``, ``"catnat-natural"``.
        num_categories: number of categories (K), at least 2.
        mix: share of the uniform distribution, 0 <= mix < 1; see
            :class:`~catnat.jax.flat_heads.MixedHead`.
        options: options of the named head, such as ``tail`` for natural.

    >>> make_head("softmax", 8)
    SoftmaxHead(num_categories=8)
    """
    full_name = _ALIASES.get(name, name)
    require_choice(head_names(), head=full_name)
    head = _HEADS[full_name](num_categories, **options)
    return MixedHead(head, mix) if mix else head


@dataclass(frozen=True)
class SoftmaxHead(CategoricalHead):
    r"""p_k = exp(s_k) / sum_j exp(s_j), S = K.

    Its Fisher matrix diag(p) - p p^T is dense and singular: adding a constant to all scores does
    not change p.
    """

    name = "softmax"

    def log_probs(self, scores: Array) -> Array:
        """Normalized log-probabilities, (*, K) -> (*, K)."""
        out = jax.nn.log_softmax(self._checked(scores), -1)
        lowest = -largest_score(out.dtype)
        return jnp.where(out == -jnp.inf, LOG_ZERO, jnp.where(out < lowest, lowest, out))


@dataclass(frozen=True)
class SparsemaxHead(CategoricalHead):
    r"""p is the point of the simplex nearest to the scores, S = K; many p_k are exactly 0.

    An impossible category gets no gradient. If log-ratios of probabilities matter, as in PPO, mix
    in a small share of the uniform distribution.
    """

    name = "sparsemax"

    def log_probs(self, scores: Array) -> Array:
        """Normalized log-probabilities, (*, K) -> (*, K)."""
        return safe_log(self.probs(scores))

    def probs(self, scores: Array) -> Array:
        """Probabilities, (*, K) -> (*, K); exactly 0 outside the support."""
        return _project(self._checked(scores))


@jax.custom_jvp
def _project(scores: Array) -> Array:
    """p_k = max(s_k - tau, 0) with tau such that the p_k sum to 1 (Martins and Astudillo, 2016).

    It is always computed in float64, so that probabilities just above 0 are accurate.
    """
    with jax.enable_x64(True):
        z = scores.astype(jnp.float64)
        z = jnp.maximum(z - z.max(-1, keepdims=True), -2.0)  # lower scores never matter
        ranked = jnp.sort(z, -1, descending=True)
        excess = jnp.cumsum(ranked, -1) - 1
        rank = jnp.arange(1, scores.shape[-1] + 1)
        size = (rank * ranked > excess).sum(-1, keepdims=True)
        tau = jnp.take_along_axis(excess, size - 1, -1) / size
        return jnp.maximum(z - tau, 0).astype(scores.dtype)


@_project.defjvp
def _project_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The tangent minus its mean on the support; 0 elsewhere."""
    p = _project(*primals)
    tangent = tangents[0]
    support = ~(p <= 0)
    mean = tangent.mean(-1, keepdims=True, where=support)
    return p, jnp.where(support, tangent - mean + 0 * p, 0.0)  # NaN stays NaN


@dataclass(frozen=True)
class MixedHead(CategoricalHead):
    """q = (1 - mix) p + mix / n over the n allowed categories, with p from the inner head.

    Without a mask n is K. Mixing makes the Fisher matrix dense, also for a tree, and ``log_prob``
    and ``sample`` take O(K).

    Args:
        inner: head that computes p.
        mix: share of the uniform distribution, 0 < mix < 1.
    """

    num_categories: int = field(init=False, repr=False)
    inner: CategoricalHead
    mix: float

    def __post_init__(self) -> None:
        require_within(0, 1, "()", mix=self.mix)
        vars(self).update(num_categories=self.inner.num_categories, name=self.inner.name)

    @property
    def num_scores(self) -> int:
        """S of the inner head."""
        return self.inner.num_scores

    def log_probs(self, scores: Array) -> Array:
        """log((1 - mix) p + mix / n); the floor of the inner head for forbidden categories."""
        log_p = self.inner.log_probs(scores)
        allowed = self.inner.allowed(scores)
        n = allowed.sum(-1, keepdims=True).astype(log_p.dtype)
        mixed = jnp.logaddexp(log_p + math.log1p(-self.mix), math.log(self.mix) - jnp.log(n))
        return jnp.where(allowed, mixed, log_p)

    def _masked(self, scores: Array, mask: Array, before: Array) -> Array:
        return self.inner._masked(scores, mask, before)

    def allowed(self, scores: Array) -> Array:
        """Recover the mask from :meth:`masked` scores, (*, S) -> (*, K) bool."""
        return self.inner.allowed(scores)


_HEADS = {cls.name: cls for cls in (SoftmaxHead, SparsemaxHead, SigmoidHead, NaturalHead)}
_ALIASES = {"catnat-sigmoid": "sigmoid", "catnat-natural": "natural"}
