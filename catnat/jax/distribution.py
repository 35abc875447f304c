"""The distribution that a head returns."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from catnat.jax.estimators import gumbel_rao, reinmax

if TYPE_CHECKING:
    from catnat.jax.head import CategoricalHead


@partial(jax.tree_util.register_dataclass, data_fields=["scores"], meta_fields=["head"])
@dataclass(frozen=True)
class Categorical:
    """A categorical distribution with distrax's names, made by calling a head.

    It is a pytree with the scores as its only leaf, so that functions under ``jax.jit`` and
    ``jax.vmap`` can take and return it. Results are computed on demand: with a catnat head
    ``log_prob`` and ``sample`` take O(log K) operations.

    Args:
        scores: scores (*, S); infinite scores represent a mask, see ``CategoricalHead.masked``.
        head: :class:`CategoricalHead` that turns the scores into probabilities.

    >>> from catnat.jax import make_head
    >>> make_head("natural", 4)(jnp.zeros(3)).entropy().round(4)
    Array(1.3863, dtype=float32)
    """

    scores: Array
    head: "CategoricalHead"

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.scores.shape[:-1]

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

    def sample(self, *, seed: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Categories drawn at random, (*sample_shape, *) in int32.

        Args:
            seed: key of ``jax.random``.
            sample_shape: shape of the draws from each distribution of the batch.
        """
        return self.head.sample(seed, self.scores, sample_shape)

    def sample_and_log_prob(
        self, *, seed: Array, sample_shape: tuple[int, ...] = ()
    ) -> tuple[Array, Array]:
        """:meth:`sample`, and the log-probability of the draws."""
        value = self.sample(seed=seed, sample_shape=sample_shape)
        return value, self.log_prob(value)

    def rsample_straight_through(self, *, seed: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """:meth:`sample` as one-hot vectors, (*sample_shape, *, K), with the gradient of probs."""
        p = self.probs
        return self._one_hot(seed, sample_shape) + (p - jax.lax.stop_gradient(p))

    def rsample_reinmax(self, *, seed: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """:meth:`sample` as one-hot vectors, (*sample_shape, *, K), with ReinMax's gradient.

        ZGR is the same estimator, see :func:`catnat.jax.estimators.reinmax`.
        """
        return reinmax(self.logits, self._one_hot(seed, sample_shape))

    def rsample_gumbel_rao(
        self,
        *,
        seed: Array,
        temperature: float | Array = 1.0,
        num_draws: int = 8,
        sample_shape: tuple[int, ...] = (),
    ) -> Array:
        """One-hot samples, (*sample_shape, *, K), with the mean gradient of relaxed samples.

        Args:
            seed: key of ``jax.random``.
            temperature: temperature of the relaxed samples, > 0; it is not checked.
            num_draws: relaxed samples for each sample, see
                :func:`catnat.jax.estimators.gumbel_rao`.
            sample_shape: shape of the draws from each distribution of the batch.
        """
        of_sample, of_noise = jax.random.split(seed)
        one_hot = self._one_hot(of_sample, sample_shape)
        return gumbel_rao(self.logits, one_hot, temperature, num_draws, seed=of_noise)

    def _one_hot(self, seed: Array, sample_shape: tuple[int, ...]) -> Array:
        """:meth:`sample` as one-hot vectors, in the dtype of the probabilities."""
        value = self.sample(seed=seed, sample_shape=sample_shape)
        return jax.nn.one_hot(value, self.head.num_categories, dtype=self.logits.dtype)

    def mode(self) -> Array:
        """The most likely category, (*) in int32; -1 where the scores are NaN."""
        logits = self.logits
        return jnp.where(jnp.isnan(logits).any(-1), -1, logits.argmax(-1).astype(jnp.int32))

    def entropy(self) -> Array:
        """-sum_k p_k log p_k with 0 log 0 = 0, (*)."""
        log_p = self.logits
        return -(jnp.exp(log_p) * log_p).sum(-1)

    def kl_divergence(self, other: "Categorical") -> Array:
        """KL(self || other), (*): finite, with log 0 at its floor, even where q_k = 0 < p_k."""
        log_p = self.logits
        return (jnp.exp(log_p) * (log_p - other.logits)).sum(-1)

    def path_entropy(self, value: Array) -> Array:
        r"""Estimate of :meth:`entropy` from one category, (*), in O(log K); only for tree heads.

        It is the sum of the entropies of the nodes above ``value``. Over samples of this
        distribution its mean is sum_i P(node i) H(a_i), the entropy, and the mean of its gradient
        in the scores is the gradient of the entropy. It is never negative and has a much smaller
        variance than -log p.
        """
        tree: Any = self.head
        taken, other = tree.path_logs(self.scores, value)
        entropies = -(jnp.exp(taken) * taken + jnp.exp(other) * other)
        return _path_sum(entropies, taken)

    def path_kl(self, other: "Categorical", value: Array) -> Array:
        r"""Estimate of KL(self || other) from one category, (*), in O(log K); only for tree heads.

        It is the sum of the binary divergences at the nodes above ``value``. Over samples of this
        distribution its mean is sum_i P(node i) KL(a_i || b_i), the divergence, and the means of
        its gradients in the scores of both distributions are the exact ones. It is never negative.

        Args:
            other: distribution of a tree head with the same number of categories.
            value: samples of this distribution.
        """
        tree: Any = self.head
        other_tree: Any = other.head
        if other_tree.num_scores != tree.num_scores:
            raise ValueError(f"path_kl needs two trees of one size, got {tree} and {other_tree}")
        ours = tree.path_logs(self.scores, value)
        theirs = other_tree.path_logs(other.scores, value)
        of_taken, of_other = (
            jnp.exp(log) * (log - their_log) for log, their_log in zip(ours, theirs, strict=True)
        )
        divergences = jnp.maximum(of_taken + of_other, 0)  # rounding may go below 0
        return _path_sum(divergences, ours[0])


def _path_sum(terms: Array, steps: Array) -> Array:
    """Sum along a path, (*, H) -> (*), with the gradient of the mean over all paths.

    Entries go from the leaf up. The entries before an entry are below its node and depend on the
    log-probability of the step there.
    """
    below = jax.lax.stop_gradient(jnp.cumsum(terms, -1) - terms)
    return (terms + below * (steps - jax.lax.stop_gradient(steps))).sum(-1)
