"""CategoricalHead: the base class of the heads in JAX."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from catnat.checks import checked_categories
from catnat.jax.distribution import Categorical
from catnat.jax.numerics import at_least_float32, pick, uniform


@dataclass(frozen=True)
class CategoricalHead(ABC):
    """Maps S scores to a distribution over K categories.

    A head holds only its options. It is immutable and hashable, so that it can be a static argument
    of ``jax.jit``; as part of a pytree it has no leaves.

    Args:
        num_categories: number of categories (K), at least 2.

    Shapes:
        scores (*, S); probabilities (*, K); Fisher matrices (*, S, S).
    """

    name: ClassVar[str]
    num_categories: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_static(cls)

    def __post_init__(self) -> None:
        vars(self).update(num_categories=checked_categories(self.num_categories))

    @property
    def num_scores(self) -> int:
        """Number of scores (S): K, or K - 1 for the catnat heads."""
        return self.num_categories

    @abstractmethod
    def log_probs(self, scores: Array) -> Array:
        """Normalized log-probabilities, (*, S) -> (*, K): finite for every finite score."""

    def __call__(self, scores: Array, mask: Array | None = None) -> Categorical:
        """Distribution of these scores over the allowed categories."""
        scores = self._checked(scores) if mask is None else self.masked(scores, mask)
        return Categorical(scores, self)

    def probs(self, scores: Array) -> Array:
        """Probabilities, (*, S) -> (*, K); exactly 0 where a category is impossible."""
        return jnp.exp(self.log_probs(scores))

    def fisher(self, scores: Array) -> Array:
        """Exact Fisher information matrix in the scores, (*, S) -> (*, S, S).

        J^T diag(1/p) J with the Jacobian J of the probabilities.
        """
        scores = self._checked(scores)
        jacobian = jnp.vectorize(jax.jacrev(self.probs), signature="(s)->(k,s)")(scores)
        p = self.probs(scores)
        weight = 1 / jnp.where(p <= 0, jnp.inf, p)[..., None]
        return jnp.einsum("...ki,...kj->...ij", jacobian, weight * jacobian, precision="highest")

    def fisher_diagonal(self, scores: Array) -> Array:
        """Diagonal of :meth:`fisher`, (*, S) -> (*, S)."""
        return self.fisher(scores).diagonal(axis1=-2, axis2=-1)

    def log_prob(self, scores: Array, value: Array) -> Array:
        """Log-probability of the categories ``value``, whose shape broadcasts with the batch shape.

        The result is NaN for a value that is not a category.
        """
        value, is_category = checked_value(value, self.num_categories)
        log_prob = pick(self.log_probs(scores), value[..., None])[..., 0]
        return jnp.where(is_category, log_prob, jnp.nan)

    def sample(self, key: Array, scores: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Categories drawn at random, (*sample_shape, *) in int32; -1 where the scores are NaN.

        Each category draws an exponential time with mean 1 / p, and the shortest time wins.
        """
        log_probs = self.log_probs(scores)
        u = uniform(key, (*sample_shape, *log_probs.shape), log_probs.dtype)
        times = jnp.log(-jnp.log1p(-u)) - log_probs
        first = jnp.where(jnp.exp(log_probs) <= 0, jnp.inf, times).argmin(-1).astype(jnp.int32)
        return jnp.where(jnp.isnan(log_probs).any(-1), -1, first)

    def masked(self, scores: Array, mask: Array) -> Array:
        """Scores that make forbidden categories impossible, (*, S) -> (*, S).

        All other methods accept the result as scores. A forbidden category has probability exactly
        0 and is never drawn; scores that no longer matter get no gradient. Masked scores can be
        masked again: both masks then apply.

        Args:
            scores: (*, S).
            mask: (*, K) bool, True where a category is allowed; its batch shape broadcasts with
                that of the scores. A row that allows no category becomes NaN.
        """
        scores = self._checked(scores)
        mask = _array("mask", mask, self.num_categories)
        if mask.dtype != jnp.bool_:
            raise TypeError(f"mask must be an array of bool, True = allowed, got {mask.dtype}")
        before = self.allowed(scores)
        mask = mask & before
        filled = self._masked(scores, mask, before)
        return jnp.where(mask.any(-1, keepdims=True), filled, jnp.nan)

    def _masked(self, scores: Array, mask: Array, before: Array) -> Array:
        """Scores under this mask, a subset of their earlier mask ``before``."""
        return jnp.where(mask, scores, -jnp.inf)

    def allowed(self, scores: Array) -> Array:
        """Recover the mask from :meth:`masked` scores, (*, S) -> (*, K) bool."""
        return self._checked(scores) != -jnp.inf

    def _checked(self, scores: Array) -> Array:
        """Scores in float32 or float64, after checking their shape."""
        return at_least_float32(_array("scores", scores, self.num_scores))


def checked_value(value: Array, num_categories: int) -> tuple[Array, Array]:
    """Categories as int32, with 0 in place of invalid ones, and whether they are valid."""
    value = jnp.asarray(value)
    is_category = (value >= 0) & (value < num_categories)
    return jnp.where(is_category, value, 0).astype(jnp.int32), is_category


def _array(name: str, x: Any, size: int) -> Array:
    """``x`` as a JAX array with ``size`` numbers in the last dimension."""
    out = jnp.asarray(x)
    if out.shape[-1:] != (size,):
        raise ValueError(f"{name} must have {size} in the last dimension, got shape {out.shape}")
    return out
