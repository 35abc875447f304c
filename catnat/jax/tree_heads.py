"""The catnat heads: a tree of binary splits, whose Fisher matrix is diagonal."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from catnat.checks import checked_order, require_finite, require_tail, require_within
from catnat.jax.categorical_head import CategoricalHead
from catnat.jax.numerics import pick, uniform
from catnat.jax.splits import NaturalSplit, SigmoidSplit, Split, log_split
from catnat.jax.tree import height, path_sums, right_shares, subtree_sums


@dataclass(frozen=True)
class CatnatHead(CategoricalHead):
    r"""A head with a diagonal Fisher matrix: a tree of binary splits, with S = K - 1 scores.

    Class k with bits b_1..b_H has p_k = prod_h a_h^{b_h} (1 - a_h)^{1 - b_h}. The Fisher matrix is
    diagonal: G_ii = P(node i) a'^2 / (a (1 - a)) (the paper's Theorem). It stays diagonal under a
    mask: a split with one empty side goes to the other and has no information.

    Args:
        num_categories: K, at least 2.
        center: the paper's C, added to every node's centre.
        uniform_at_zero: give each node a centre such that zero scores give the uniform distribution
            for every K; otherwise they do only if K is a power of two.
        order: the leaf of every class, a permutation of 0..K-1; None for class k at leaf k.
    """

    _: KW_ONLY
    center: float = 0.0
    uniform_at_zero: bool = True
    order: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite(center=self.center)
        object.__setattr__(self, "center", float(self.center))
        object.__setattr__(self, "uniform_at_zero", bool(self.uniform_at_zero))
        if self.order is not None:
            object.__setattr__(self, "order", checked_order(self.order, self.num_categories))

    @property
    def num_scores(self) -> int:
        """S = K - 1, one score for each split."""
        return self.num_categories - 1

    @property
    @abstractmethod
    def split(self) -> Split:
        """How a score divides the probability of its node."""

    def log_probs(self, scores: Array) -> Array:
        """Normalized log-probabilities, (*, K-1) -> (*, K)."""
        return self._by_class(path_sums(*self._log_split(self._checked(scores)))[1])

    def log_prob(self, scores: Array, value: Array) -> Array:
        """Log-probability of the categories ``value`` in O(log K): along their paths alone.

        The shape of ``value`` broadcasts with the batch shape. A value that is no category is an
        error where it can be seen, and NaN elsewhere.
        """
        scores, (value, known) = self._checked(scores), self._checked_value(value)
        leaf = value if self.order is None else jnp.asarray(np.array(self.order))[value]
        steps = jnp.arange(height(self.num_categories))
        child = (leaf[..., None] + self.num_categories) >> steps  # heap numbers, from the leaf up
        above = child > 1  # the root has no parent
        left, right = self._log_split(scores, jnp.where(above, (child >> 1) - 1, 0))
        edges = jnp.where(child & 1 == 1, right, left)
        return jnp.where(known, jnp.where(above, edges, 0.0).sum(-1), jnp.nan)

    def sample(self, key: Array, scores: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Categories drawn at random in O(log K), (*sample_shape, *) in int32.

        A draw starts at the root and takes the rarer bit of a split if a uniform number is below
        that bit's probability. The draw is -1 where it comes to a NaN score.
        """
        scores, K = self._checked(scores), self.num_categories
        shape = (*sample_shape, *scores.shape[:-1])
        node, broken = jnp.ones(shape, jnp.int32), jnp.zeros(shape, bool)
        for u in uniform(key, (height(K), *shape), scores.dtype):
            inner = node < K
            index = jnp.where(inner, node - 1, 0)[..., None]
            left, right = (each[..., 0] for each in self._log_split(scores, index))
            bit = (u < jnp.exp(jnp.minimum(left, right))) == (right < left)
            node = jnp.where(inner, 2 * node + bit, node)
            broken |= inner & jnp.isnan(left)
        leaf = node - K
        if self.order is not None:
            leaf = jnp.asarray(np.argsort(self.order).astype(np.int32))[leaf]
        return jnp.where(broken, -1, leaf)

    def node_probs(self, scores: Array) -> Array:
        """Probability P(node) of passing through each internal node, (*, K-1) -> (*, K-1)."""
        return jnp.exp(path_sums(*self._log_split(self._checked(scores)))[0])

    def information(self, scores: Array) -> Array:
        """Fisher information a'^2 / (a (1 - a)) of each split alone, (*, S) -> (*, S)."""
        scores = self._checked(scores)
        return self.split.information(scores, self._constants(scores.dtype))

    def fisher_diagonal(self, scores: Array) -> Array:
        """P(node) a'^2 / (a (1 - a)) (the paper's Theorem), (*, S) -> (*, S) in O(S)."""
        return self.node_probs(scores) * self.information(scores)

    def fisher(self, scores: Array) -> Array:
        """The diagonal matrix of :meth:`fisher_diagonal`."""
        diagonal = self.fisher_diagonal(scores)[..., None]
        return jnp.where(jnp.eye(self.num_scores, dtype=bool), diagonal, 0.0)

    def inverse(self, probs: Array) -> Array:
        """The score of every node from the probabilities of its two subtrees; 0 if both are 0.

        If one of the two is 0, the nearest representable score.
        """
        left, right = subtree_sums(self._by_leaf(self._checked_probs(probs)))
        scores = self.split.inverse(left, right, self._constants(left.dtype))
        return jnp.where(left + right <= 0, 0.0, scores)

    def _masked(self, scores: Array, mask: Array) -> Array:
        """A split with one empty side goes to the other; a node without leaves is never reached.

        With ``uniform_at_zero`` the other nodes get the centres at which zero scores give the
        uniform distribution over the allowed categories.
        """
        if self.uniform_at_zero:
            left, right = subtree_sums(self._by_leaf(mask.astype(jnp.int32)))
            every = sum(subtree_sums(jnp.ones(self.num_categories, jnp.int32)))
            moves = (left > 0) & (right > 0) & (left + right < every)
            # Half and half where nothing moves, and the result is not used.
            number = jnp.where(moves, left + right, 2).astype(scores.dtype)
            sides = (jnp.where(moves, each, 1).astype(scores.dtype) for each in (left, right))
            one, other = (each / number for each in sides)
            at_share = self.split.inverse(one, other, self._constants(scores.dtype)) - self.center
            scores = scores + jnp.where(moves, at_share, 0.0).astype(scores.dtype)
        return self._filled(scores, mask)

    def _filled(self, scores: Array, mask: Array) -> Array:
        left, right = (each > 0 for each in subtree_sums(self._by_leaf(mask.astype(jnp.int32))))
        one_sided = jnp.where(left, -jnp.inf, jnp.where(right, jnp.inf, 0.0))
        return jnp.where(left & right, scores, one_sided.astype(scores.dtype))

    def allowed(self, scores: Array) -> Array:
        """The mask back from :meth:`masked` scores, (*, K-1) -> (*, K) bool."""
        scores = self._checked(scores)
        forbidden = path_sums((scores == jnp.inf) * 1, (scores == -jnp.inf) * 1)[1] > 0
        return self._by_class(~forbidden)

    def _log_split(self, scores: Array, index: Array | None = None) -> tuple[Array, Array]:
        """log(1 - a) and log a of all nodes, or of the nodes with these score indices, (*, H)."""
        constants = self._constants(scores.dtype)
        if index is not None:
            scores = pick(scores, index)
            constants = constants if constants.shape[-1] == 1 else constants[:, index]
        return log_split(self.split, scores, constants)

    def _by_class(self, leaves: Array) -> Array:
        """Values of leaves in the order of classes, (*, K)."""
        return leaves if self.order is None else leaves[..., np.array(self.order)]

    def _by_leaf(self, classes: Array) -> Array:
        """Values of classes in the order of leaves, (*, K)."""
        return classes if self.order is None else classes[..., np.argsort(self.order)]

    def _constants(self, dtype: Any) -> Array:
        """``split.node_constants`` in this dtype, (R, S), or (R, 1) where all nodes are alike."""
        return jnp.asarray(self._constants64 if dtype == jnp.float64 else self._constants32)

    @cached_property
    def _constants32(self) -> np.ndarray:
        return self.split.node_constants(self._centre, np.float32)

    @cached_property
    def _constants64(self) -> np.ndarray:
        return self.split.node_constants(self._centre, np.float64)

    @cached_property
    def _centre(self) -> np.ndarray:
        """The centre C of every node, (S,) in float64, or (1,) where all nodes have the same."""
        power_of_two = self.num_categories & (self.num_categories - 1) == 0
        if power_of_two or not self.uniform_at_zero:
            return np.array([self.center])
        shares = right_shares(self.num_categories)
        return self.center - self.split.offset(1 - shares, shares)


@dataclass(frozen=True)
class SigmoidHead(CatnatHead):
    """catnat with a(s) = 1 / (1 + exp(-(s - C)))."""

    name: str = field(init=False, repr=False, default="sigmoid")

    @property
    def split(self) -> SigmoidSplit:
        """The logistic split."""
        return SigmoidSplit()


@dataclass(frozen=True)
class NaturalHead(CatnatHead):
    r"""catnat with a(s) = (1 + sin(pi (s - C) / A)) / 2 for |s - C| <= A/2, flat beyond.

    Its Fisher matrix is diag(P(node) (pi/A)^2) (the paper's Corollary). With a ``tail`` the split
    is the same until its rarer side has that probability, and goes on as an exponential: no score
    is without gradient, and no probability is 0.

    Args:
        num_categories: K, at least 2.
        center: C.
        uniform_at_zero: as in :class:`CatnatHead`.
        order: as in :class:`CatnatHead`.
        amplitude: A, the width of the region in which the split moves; 2 pi gives the sigmoid's
            slope at 0.
        tail: probability of the rarer side at which the tail begins, 0 (no tail, the paper's head)
            or 1e-30 <= tail < 1/2.
    """

    name: str = field(init=False, repr=False, default="natural")
    _: KW_ONLY
    amplitude: float = 2 * math.pi
    tail: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_within(1e-15, 1e15, amplitude=self.amplitude)  # float32 has no room for others
        require_tail(self.tail)
        object.__setattr__(self, "amplitude", float(self.amplitude))
        object.__setattr__(self, "tail", float(self.tail))

    @property
    def split(self) -> NaturalSplit:
        """The split of constant Fisher information."""
        return NaturalSplit(self.amplitude, self.tail)
