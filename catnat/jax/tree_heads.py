"""The catnat heads: a tree of binary decisions, whose Fisher matrix is diagonal.

:mod:`catnat.tree` describes the tree: internal nodes have the heap numbers 1..K-1 and the score
indices 0..K-2, leaves the heap numbers K..2K-1; the children of node j are 2j and 2j + 1.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from catnat.checks import checked_order, require_finite
from catnat.jax.head import CategoricalHead
from catnat.jax.numerics import LOG_ZERO, pick, uniform

Constants = Array | np.ndarray


@dataclass(frozen=True)
class CatnatHead(CategoricalHead):
    r"""A head with a diagonal Fisher matrix: a tree of binary decisions, with S = K - 1 scores.

    Class k with bits b_1..b_H has p_k = prod_h a_h^{b_h} (1 - a_h)^{1 - b_h}. The Fisher matrix is
    diagonal: G_ii = P(node i) a'^2 / (a (1 - a)) (the paper's Theorem). It stays diagonal under a
    mask: a node with one empty side goes to the other and has no information.

    A subclass says how a score divides the probability of its node. The ``constants`` of the nodes
    are (R, S), or (R, 1) where all nodes have the same center C; x is s - C.

    Args:
        num_categories: K, at least 2.
        center: the paper's C, added to every node's center.
        uniform_at_zero: give each node a center such that zero scores give the uniform distribution
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
        self._set(center=float(self.center), uniform_at_zero=bool(self.uniform_at_zero))
        if self.order is not None:
            self._set(order=checked_order(self.order, self.num_categories))

    @property
    def num_scores(self) -> int:
        """S = K - 1, one score for each node."""
        return self.num_categories - 1

    @abstractmethod
    def logs(self, scores: Array, constants: Constants) -> tuple[Array, Array]:
        """log(1 - a) and log a of finite scores; finite, with finite derivatives, elsewhere."""

    @abstractmethod
    def split_at(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """x for which 1 - a : a is left : right, by jax.numpy or numpy; finite where one is 0."""

    @abstractmethod
    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """The constants of nodes with these centers C, which are in float64."""

    def log_probs(self, scores: Array) -> Array:
        """Normalized log-probabilities, (*, K-1) -> (*, K)."""
        return self._by_class(path_sums(*self._log_activation(self._checked(scores)))[1])

    def log_prob(self, scores: Array, value: Array) -> Array:
        """Log-probability of the categories ``value`` in O(log K): along their paths alone.

        The shape of ``value`` broadcasts with the batch shape. NaN for one that is not a category.
        """
        left, right, bits = self.path_logs(scores, value)
        return jnp.where(bits, right, left).sum(-1)

    def path_logs(self, scores: Array, value: Array) -> tuple[Array, Array, Array]:
        """log(1 - a), log a and the bits of the nodes above the categories ``value``, (*, H).

        If a path is shorter than H, its last entries are those of a node with a = 0 and bit 0.
        They are NaN for a value that is not a category.
        """
        scores, (value, known) = self._checked(scores), self._checked_value(value)
        leaf = value if self.order is None else jnp.asarray(np.array(self.order))[value]
        child = leaf[..., None] + self.num_categories >> jnp.arange(self.num_scores.bit_length())
        above = child > 1  # heap numbers, from the leaf up; the root has no parent
        left, right = self._log_activation(scores, jnp.where(above, (child >> 1) - 1, 0))
        left, right = jnp.where(above, left, 0.0), jnp.where(above, right, LOG_ZERO)
        left, right = (jnp.where(known[..., None], each, jnp.nan) for each in (left, right))
        return left, right, above & (child & 1 == 1)

    def sample(self, key: Array, scores: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Categories drawn at random in O(log K), (*sample_shape, *) in int32.

        A draw starts at the root and takes the rarer bit of a node if a uniform number is below
        that bit's probability. The draw is -1 where it comes to a NaN score.
        """
        scores, K = self._checked(scores), self.num_categories
        shape = (*sample_shape, *scores.shape[:-1])
        node, broken = jnp.ones(shape, jnp.int32), jnp.zeros(shape, bool)
        for u in uniform(key, (self.num_scores.bit_length(), *shape), scores.dtype):
            inner = node < K
            index = jnp.where(inner, node - 1, 0)[..., None]
            left, right = (each[..., 0] for each in self._log_activation(scores, index))
            bit = (u < jnp.exp(jnp.minimum(left, right))) == (right < left)
            node = jnp.where(inner, 2 * node + bit, node)
            broken |= inner & jnp.isnan(left)
        leaf = node - K
        if self.order is not None:
            leaf = jnp.asarray(np.argsort(self.order).astype(np.int32))[leaf]
        return jnp.where(broken, -1, leaf)

    def node_probs(self, scores: Array) -> Array:
        """Probability P(node) of passing through each internal node, (*, K-1) -> (*, K-1)."""
        return jnp.exp(path_sums(*self._log_activation(self._checked(scores)))[0])

    def information(self, scores: Array) -> Array:
        """Fisher information a'^2 / (a (1 - a)) of each node alone, (*, S) -> (*, S).

        The slope of -log(1 - a) times that of log a.
        """
        scores = self._checked(scores)
        _, (left, right) = jax.jvp(self._log_activation, (scores,), (jnp.ones_like(scores),))
        information: Array = -left * right
        return information

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
        scores = self.split_at(left, right) + _centers(self).astype(left.dtype)
        return jnp.where(left + right <= 0, 0.0, self._settled(scores, left, right))

    def _settled(self, scores: Array, left: Array, right: Array) -> Array:
        """Scores that rounding has not moved off an edge."""
        return scores

    def _masked(self, scores: Array, mask: Array, before: Array) -> Array:
        """A node with one empty side goes to the other; a node without leaves is never reached.

        With ``uniform_at_zero`` the other nodes get the centers at which zero scores give the
        uniform distribution over the allowed categories, in place of those they had before.
        """
        if self.uniform_at_zero:
            at = [self._at_shares(allowed, scores.dtype) for allowed in (mask, before)]
            scores = scores + (at[0] - at[1])  # exactly 0 where the mask changes nothing
        return self._filled(scores, mask)

    def _at_shares(self, allowed: Array, dtype: Any) -> Array:
        """x at which a node divides as its allowed leaves do; as halves if a side has none."""
        left, right = subtree_sums(self._by_leaf(allowed.astype(dtype)))
        both = (left > 0) & (right > 0)
        out: Array = self.split_at(*(jnp.where(both, each, 1) for each in (left, right)))
        return out

    def _filled(self, scores: Array, mask: Array) -> Array:
        left, right = (each > 0 for each in subtree_sums(self._by_leaf(mask.astype(scores.dtype))))
        one_sided = jnp.where(left, -jnp.inf, jnp.where(right, jnp.inf, 0.0))
        return jnp.where(left & right, scores, one_sided.astype(scores.dtype))

    def allowed(self, scores: Array) -> Array:
        """The mask back from :meth:`masked` scores, (*, K-1) -> (*, K) bool."""
        scores = self._checked(scores)
        forbidden = path_sums((scores == jnp.inf) * 1, (scores == -jnp.inf) * 1)[1] > 0
        return self._by_class(~forbidden)

    def _log_activation(self, scores: Array, index: Array | None = None) -> tuple[Array, Array]:
        """log(1 - a) and log a of all nodes, or of the nodes with these score indices, (*, H).

        An infinite score, which a mask makes, has an impossible side.
        """
        constants: Constants = constants_of(self, scores.dtype)
        if index is not None:
            scores = pick(scores, index)
            constants = constants if constants.shape[-1] == 1 else jnp.asarray(constants)[:, index]
        left, right = self.logs(scores, constants)
        left = jnp.where(scores == jnp.inf, LOG_ZERO, left)
        return left, jnp.where(scores == -jnp.inf, LOG_ZERO, right)

    def _by_class(self, leaves: Array) -> Array:
        """Values of leaves in the order of classes, (*, K)."""
        return leaves if self.order is None else leaves[..., np.array(self.order)]

    def _by_leaf(self, classes: Array) -> Array:
        """Values of classes in the order of leaves, (*, K)."""
        return classes if self.order is None else classes[..., np.argsort(self.order)]


@lru_cache(maxsize=64)
def _centers(head: CatnatHead) -> np.ndarray:
    """The center C of every node, (S,) in float64, or (1,) where all nodes have the same."""
    K = head.num_categories
    if not head.uniform_at_zero or K & (K - 1) == 0:
        return np.array([head.center])
    shares = right_shares(K)
    return np.asarray(head.center - head.split_at(1 - shares, shares, np))


@lru_cache(maxsize=64)
def constants_of(head: CatnatHead, dtype: Any) -> np.ndarray:
    """``head.node_constants``, (R, S), or (R, 1) where all nodes are alike."""
    return head.node_constants(_centers(head), dtype)


@jax.jit
def path_sums(left: Array, right: Array) -> tuple[Array, Array]:
    """Sum edge values from the root down to every internal node and every leaf.

    Args:
        left: value of the edge to the bit-0 child of each node, (*, K-1).
        right: value of the edge to the bit-1 child of each node, (*, K-1).

    Returns:
        Sums at the internal nodes, (*, K-1), and at the leaves, (*, K).
    """
    below_root = [2**level - 1 for level in range(1, left.shape[-1].bit_length())]
    levels = (jnp.split(each, below_root, -1) for each in (left, right))
    here = jnp.zeros_like(left[..., :1])  # values at the nodes and leaves of a level
    nodes = []
    for low, high in zip(*levels, strict=True):
        inner, leaves = jnp.split(here, [low.shape[-1]], -1)
        nodes.append(inner)
        children = jnp.stack((inner + low, inner + high), -1)
        children = children.reshape(*inner.shape[:-1], 2 * inner.shape[-1])
        here = jnp.concatenate((leaves, children), -1)
    return jnp.concatenate(nodes, -1), here


def subtree_sums(leaves: Array) -> tuple[Array, Array]:
    """Sum leaf values over both subtrees of every node: the transpose of :func:`path_sums`.

    Args:
        leaves: (*, K).

    Returns:
        Sums over the leaves below the two children of each node, (*, K-1) each.
    """
    nodes = jnp.zeros_like(leaves[..., 1:])
    _, transpose = jax.vjp(lambda left, right: path_sums(left, right)[1], nodes, nodes)
    left, right = transpose(leaves)
    return left, right


def right_shares(num_categories: int) -> np.ndarray:
    """Share of each node's leaves that lie below its bit-1 child, (K-1,) in float64.

    >>> right_shares(3).round(2).tolist()
    [0.33, 0.5]
    """
    K = num_categories
    heap = np.arange(K, 2 * K)  # the leaves, then their ancestors
    levels = (np.bincount(heap >> up, minlength=2 * K) for up in range(K.bit_length() + 1))
    below = sum(levels, start=np.zeros(2 * K))  # leaves below every heap number
    share: np.ndarray = below[3::2] / below[1:K]
    return share
