"""The distribution a head returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from catnat.jax.categorical_head import CategoricalHead


@partial(jax.tree_util.register_dataclass, data_fields=["scores"], meta_fields=["head"])
@dataclass(frozen=True)
class Categorical:
    """A categorical distribution with the interface of distrax, made by calling a head.

    It is a pytree with the scores as its only leaf, so that functions under ``jax.jit`` and
    ``jax.vmap`` take and return it. Nothing is computed before it is asked for: with a catnat head
    ``log_prob`` and ``sample`` take O(log K) operations.

    Args:
        scores: (*, S); infinite ones stand for a mask, see ``CategoricalHead.masked``.
        head: the head that turns the scores into probabilities.

    >>> from catnat.jax import make_head
    >>> make_head("natural", 4)(jnp.zeros(3)).entropy().round(4)
    Array(1.3863, dtype=float32)
    """

    scores: Array
    head: CategoricalHead

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.scores.shape[:-1]

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Empty: a sample is an index."""
        return ()

    @property
    def num_categories(self) -> int:
        """K."""
        return self.head.num_categories

    @property
    def logits(self) -> Array:
        """Normalized log-probabilities, (*, K): finite, at a floor for impossible categories."""
        return self.head.log_probs(self.scores)

    @property
    def probs(self) -> Array:
        """Probabilities, (*, K): exactly 0 for impossible categories."""
        return self.head.probs(self.scores)

    def log_prob(self, value: Array) -> Array:
        """Log-probability of the categories ``value``, (*)."""
        return self.head.log_prob(self.scores, value)

    def prob(self, value: Array) -> Array:
        """Probability of the categories ``value``, (*)."""
        return jnp.exp(self.log_prob(value))

    def sample(self, *, seed: Array | int, sample_shape: int | tuple[int, ...] = ()) -> Array:
        """Categories drawn at random, (*sample_shape, *) in int32.

        Args:
            seed: a key of ``jax.random``, or an integer to make one of.
            sample_shape: the shape of the draws from every distribution of the batch.
        """
        key = jax.random.key(seed) if isinstance(seed, int) else seed
        shape = (sample_shape,) if isinstance(sample_shape, int) else tuple(sample_shape)
        return self.head.sample(key, self.scores, shape)

    def sample_and_log_prob(
        self, *, seed: Array | int, sample_shape: int | tuple[int, ...] = ()
    ) -> tuple[Array, Array]:
        """:meth:`sample`, and the log-probability of the draws."""
        value = self.sample(seed=seed, sample_shape=sample_shape)
        return value, self.log_prob(value)

    def rsample_straight_through(
        self, *, seed: Array | int, sample_shape: int | tuple[int, ...] = ()
    ) -> Array:
        """:meth:`sample` as one-hot vectors, (*sample_shape, *, K), with the gradient of probs."""
        value, p = self.sample(seed=seed, sample_shape=sample_shape), self.probs
        return jax.nn.one_hot(value, self.num_categories, dtype=p.dtype) + (
            p - jax.lax.stop_gradient(p)
        )

    def mode(self) -> Array:
        """The most likely category, (*) in int32; -1 where the scores are NaN."""
        logits = self.logits
        return jnp.where(jnp.isnan(logits).any(-1), -1, logits.argmax(-1).astype(jnp.int32))

    def entropy(self) -> Array:
        """-sum_k p_k log p_k with 0 log 0 = 0, (*)."""
        return self.head.entropy(self.scores)

    def kl_divergence(self, other: Categorical) -> Array:
        """KL(self || other) = sum_k p_k (log p_k - log q_k), (*).

        It is finite, with log 0 at its floor, even where q_k = 0 < p_k.
        """
        if other.num_categories != self.num_categories:
            raise ValueError(
                f"distributions over {self.num_categories} and {other.num_categories} categories "
                "have no KL divergence"
            )
        log_p = self.logits
        return (jnp.exp(log_p) * (log_p - other.logits)).sum(-1)
