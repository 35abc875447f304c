"""MixedHead: any head with a little of the uniform distribution mixed in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax import Array

from catnat.checks import require_within
from catnat.jax.head import CategoricalHead
from catnat.jax.numerics import can_branch_on


@dataclass(frozen=True)
class MixedHead(CategoricalHead):
    """q = (1 - mix) p + mix / n with p of another head, on the n categories that are allowed.

    n is K without a mask. Even a tree's Fisher matrix becomes dense by mixing, and ``log_prob`` and
    ``sample`` take O(K).

    Args:
        inner: the head that gives p.
        mix: the share of the uniform distribution, 0 < mix < 1.
    """

    num_categories: int = field(init=False, repr=False)
    inner: CategoricalHead
    mix: float

    def __post_init__(self) -> None:
        require_within(0, 1, "()", mix=self.mix)
        inner = self.inner
        self._set(mix=float(self.mix), num_categories=inner.num_categories, name=inner.name)

    @property
    def num_scores(self) -> int:
        """S of the inner head."""
        return self.inner.num_scores

    def log_probs(self, scores: Array) -> Array:
        """log((1 - mix) p + mix / n); the floor of the inner head for forbidden categories."""
        log_p, allowed = self.inner.log_probs(scores), self.inner.allowed(scores)
        n = allowed.sum(-1, keepdims=True).astype(log_p.dtype)
        mixed = jnp.logaddexp(log_p + math.log1p(-self.mix), math.log(self.mix) - jnp.log(n))
        return jnp.where(allowed, mixed, log_p)

    def inverse(self, probs: Array) -> Array:
        """Scores for which the inner head gives p = (q - mix / n) / (1 - mix).

        A probability of exactly 0 needs a mask: n is the number of the other probabilities, and
        scores are infinite where the mask decides. What is above 0 and below mix / n is out of
        reach: an error where it can be seen, and NaN elsewhere.
        """
        q = self._checked_probs(probs)
        allowed = ~(q <= 0)  # NaN passes
        share = self.mix / allowed.sum(-1, keepdims=True).astype(q.dtype)
        low = allowed & (q < share * (1 - 32 * float(jnp.finfo(q.dtype).eps)))
        if can_branch_on(low) and bool(low.any()):
            where = tuple(np.argwhere(np.asarray(low))[0])
            raise ValueError(
                f"with mix={self.mix:g} a probability must be 0 or at least "
                f"{float(share[where[:-1]][0]):.4g}, got {float(q[where]):.4g}"
            )
        p = jnp.where(allowed, jnp.maximum(q - share, 0.0), 0.0)
        p = jnp.where(low.any(-1, keepdims=True), jnp.nan, p / p.sum(-1, keepdims=True))
        return self.inner._filled(self.inner.inverse(p), allowed)

    def _masked(self, scores: Array, mask: Array, before: Array) -> Array:
        return self.inner._masked(scores, mask, before)

    def allowed(self, scores: Array) -> Array:
        """The mask back from :meth:`masked` scores, (*, S) -> (*, K) bool."""
        return self.inner.allowed(scores)
