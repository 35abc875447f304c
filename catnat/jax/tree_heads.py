"""The catnat heads: a tree of binary splits, whose Fisher matrix is diagonal.

:mod:`catnat.heads.nodes` describes the tree: internal nodes have the heap numbers 1..K-1 and the
score indices 0..K-2, leaves the heap numbers K..2K-1; the children of node j are 2j and 2j + 1.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from catnat.checks import require_tail, require_within
from catnat.heads.natural import NaturalNumbers
from catnat.jax.head import CategoricalHead, checked_value
from catnat.jax.numerics import LOG_ZERO, floored_sums, largest_score, log_never, pick, uniform

Constants = Array | np.ndarray
Sides = tuple[Array, Array]
"""Values of the bit-0 and of the bit-1 child of each node."""


class CatnatHead(CategoricalHead):
    r"""A head with a diagonal Fisher matrix: a tree of binary splits, with S = K - 1 scores.

    Class k with bits b_1..b_H has p_k = prod_h a_h^{b_h} (1 - a_h)^{1 - b_h}. The Fisher matrix is
    diagonal: G_ii = P(node i) a'^2 / (a (1 - a)) (the paper's Theorem). It stays diagonal under a
    mask: a node with one empty side is certain and has no information.

    A subclass defines how a score divides the probability of its node. The ``constants`` of the
    nodes are (R, S), or (R, 1) where all nodes have the same center C; x is s - C.

    Each node has the center with which zero scores give the uniform distribution. Class k is at
    leaf k.

    Args:
        num_categories: number of categories (K), at least 2.
    """

    @property
    def num_scores(self) -> int:
        """S = K - 1, one score for each node."""
        return self.num_categories - 1

    @abstractmethod
    def logs(self, scores: Array, constants: Constants) -> Sides:
        """log(1 - a) and log a; finite with finite derivatives, also for infinite scores."""

    @abstractmethod
    def split_at(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """x for which 1 - a : a is left : right, both above 0, by jax.numpy or numpy."""

    @abstractmethod
    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """Constants of nodes with these centers C, which are float64."""

    def log_probs(self, scores: Array) -> Array:
        """Normalized log-probabilities, (*, K-1) -> (*, K)."""
        sums = path_sums(*self._log_activation(self._checked(scores)))[1]
        return floored_sums(sums)

    def log_prob(self, scores: Array, value: Array) -> Array:
        """Log-probability of the categories ``value`` in O(log K), from their paths.

        The shape of ``value`` broadcasts with the batch shape. The result is NaN for a value that
        is not a category.
        """
        taken, _ = self.path_logs_by(partial(pick, self._checked(scores)), value)
        return floored_sums(taken.sum(-1))

    def path_logs(self, scores: Array, value: Array) -> tuple[Array, Array]:
        """Log-probabilities of the taken and the other branches on the paths, (*, H) each.

        Entries go from the category up. If a path is shorter than H, its last entries are those of
        a certain step. The entries are NaN for a value that is not a category.
        """
        taken, other = self.path_logs_by(partial(pick, self._checked(scores)), value)
        return floored_sums(taken), floored_sums(other)

    def path_logs_by(
        self, scores_at: Callable[[Array], Array], value: Array
    ) -> tuple[Array, Array]:
        """:meth:`path_logs` with a function from the indices of nodes to their scores.

        An impossible step has the logarithm ``log_never``, see :func:`floored_sums`.
        """
        leaf, is_category = checked_value(value, self.num_categories)
        child = leaf[..., None] + self.num_categories >> jnp.arange(self.num_scores.bit_length())
        has_parent = child > 1  # heap numbers, from the leaf up; the root has no parent
        node = jnp.where(has_parent, (child >> 1) - 1, 0)
        left, right = self._log_activation(scores_at(node), node)
        is_right = child & 1 == 1
        taken = jnp.where(is_right, right, left)
        other = jnp.where(is_right, left, right)
        no_category = jnp.where(is_category, 0.0, jnp.nan)[..., None]
        taken = jnp.where(has_parent, taken, 0.0) + no_category
        return taken, jnp.where(has_parent, other, LOG_ZERO) + no_category

    def sample(self, key: Array, scores: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Categories drawn at random in O(log K), (*sample_shape, *) in int32.

        A draw starts at the root and takes the rarer bit of a node if a uniform number is below
        the probability of that bit. The draw is -1 if it reaches a NaN score.
        """
        scores = self._checked(scores)
        shape = (*sample_shape, *scores.shape[:-1])
        return self.sample_by(key, partial(pick, scores), shape, scores.dtype)

    def sample_by(
        self, key: Array, scores_at: Callable[[Array], Array], shape: tuple[int, ...], dtype: Any
    ) -> Array:
        """:meth:`sample` with a function from the indices of nodes to their scores."""
        K = self.num_categories
        place = jnp.ones(shape, jnp.int32)  # heap numbers
        is_nan = jnp.zeros(shape, bool)
        for u in uniform(key, (self.num_scores.bit_length(), *shape), dtype):
            is_inner = place < K
            node = jnp.where(is_inner, place - 1, 0)[..., None]
            logs = self._log_activation(scores_at(node), node)
            left, right = (log[..., 0] for log in logs)
            bit = (u < jnp.exp(jnp.minimum(left, right))) == (right < left)
            place = jnp.where(is_inner, 2 * place + bit, place)
            is_nan |= is_inner & jnp.isnan(left)
        return jnp.where(is_nan, -1, place - K)

    def information(self, scores: Array) -> Array:
        """Fisher information a'^2 / (a (1 - a)) of each node, (*, S) -> (*, S).

        It is the slope of -log(1 - a) times the slope of log a.
        """
        scores = self._checked(scores)
        _, (left, right) = jax.jvp(self._log_activation, (scores,), (jnp.ones_like(scores),))
        return -left * right

    def fisher_diagonal(self, scores: Array) -> Array:
        """P(node) a'^2 / (a (1 - a)) (the paper's Theorem), (*, S) -> (*, S) in O(S)."""
        log_node_probs = path_sums(*self._log_activation(self._checked(scores)))[0]
        return jnp.exp(log_node_probs) * self.information(scores)

    def fisher(self, scores: Array) -> Array:
        """Diagonal matrix of :meth:`fisher_diagonal`."""
        diagonal = self.fisher_diagonal(scores)[..., None]
        return jnp.where(jnp.eye(self.num_scores, dtype=bool), diagonal, 0.0)

    def _masked(self, scores: Array, mask: Array, before: Array) -> Array:
        """Make a node with one empty side certain; a node without leaves is never reached.

        The other nodes get the centers at which zero scores give the uniform distribution over the
        allowed categories.
        """
        left, right = subtree_sums(mask.astype(scores.dtype))
        sides_before = subtree_sums(before.astype(scores.dtype))
        shift = self._even_split(left, right) - self._even_split(*sides_before)
        scores = scores + shift  # the shift is exactly 0 where the mask has no effect
        one_sided = jnp.where(left > 0, -jnp.inf, jnp.where(right > 0, jnp.inf, 0.0))
        is_split = (left > 0) & (right > 0)
        return jnp.where(is_split, scores, one_sided)

    def _even_split(self, left: Array, right: Array) -> Any:
        """x that divides in proportion to the leaves on both sides; halves if a side is empty."""
        is_split = (left > 0) & (right > 0)
        return self.split_at(jnp.where(is_split, left, 1), jnp.where(is_split, right, 1))

    def allowed(self, scores: Array) -> Array:
        """Recover the mask from :meth:`masked` scores, (*, K-1) -> (*, K) bool."""
        scores = self._checked(scores)
        return path_sums((scores == jnp.inf) * 1, (scores == -jnp.inf) * 1)[1] == 0

    def _log_activation(self, scores: Array, node: Array | None = None) -> Sides:
        """log(1 - a) and log a of all nodes, or of the nodes with these indices.

        An infinite score, as in a masked row, makes one side impossible.
        """
        constants: Constants = constants_of(self, scores.dtype)
        if node is not None and constants.shape[-1] > 1:
            constants = jnp.asarray(constants)[:, node]
        left, right = self.logs(scores, constants)
        never = log_never(scores.dtype)
        left = jnp.where(scores == jnp.inf, never, left)
        right = jnp.where(scores == -jnp.inf, never, right)
        return left, right


@dataclass(frozen=True)
class SigmoidHead(CatnatHead):
    """catnat with a(s) = 1 / (1 + exp(-x)), x = s - C.

    Scores beyond :func:`~catnat.jax.numerics.largest_score` are clamped to it, with slope 0.
    """

    name = "sigmoid"

    def logs(self, scores: Array, constants: Constants) -> Sides:
        """log(1 - a) = -softplus(x) and log a = -softplus(-x)."""
        bound = largest_score(scores.dtype)
        x = scores - constants[0]
        x = jnp.where(jnp.abs(x) > bound, bound * jnp.sign(x), x)
        return -jnp.logaddexp(x, 0.0), -jnp.logaddexp(-x, 0.0)

    def split_at(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """log(right / left)."""
        return xp.log(right) - xp.log(left)

    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """Centers C, (1, S)."""
        return center[None].astype(dtype)


@dataclass(frozen=True)
class NaturalHead(NaturalNumbers, CatnatHead):
    r"""catnat with a(s) = (1 + sin(pi (s - C) / A)) / 2 for |s - C| <= A/2, flat beyond.

    Its Fisher matrix is diag(P(node) (pi/A)^2) (the paper's Corollary). With a ``tail`` a(s)
    continues as an exponential where its rarer side has that probability: every score has a
    gradient, and no probability is 0.

    The methods use the distance d from s to the *nearer* of the edges C - A/2 and C + A/2, and
    theta = pi d / (2A): the rarer bit has probability sin^2(theta). An edge is stored as a sum of
    two numbers, so that d is accurate up to the edge. From the distance
    d_t where the rarer bit has the probability ``tail``, its probability continues as
    tail exp(-r (d_t - d)), with the slope r that log sin^2(theta) has there.

    Args:
        num_categories: number of categories (K), at least 2.
        amplitude: width of the region in which a(s) moves (A); 2 pi gives the slope of the sigmoid
            at 0.
        tail: probability of the rarer side at which the tail begins, 0 (no tail, the paper's head)
            or 1e-30 <= tail < 1/2.
    """

    name = "natural"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_within(1e-15, 1e15, amplitude=self.amplitude)  # range of float32
        require_tail(self.tail)

    def logs(self, scores: Array, constants: Constants) -> Sides:
        """2 log sin(theta) for the rarer bit, 2 log cos(theta) for the likelier one.

        On and beyond an edge, and in the tail, theta is 1 and not used.
        """
        distance, upper = self._distance(scores, constants)
        outside = distance <= self.joint
        theta = jnp.maximum(distance * (self.rate / 2), 1e-30)  # its logarithm is finite
        sine = jnp.sin(jnp.where(outside, 1.0, theta))
        beyond: Array | float = log_never(distance.dtype)
        if self.tail:
            in_tail = self.log_at_edge + self.steepness * jnp.where(outside, distance, 0.0)
            beyond = jnp.maximum(in_tail, -largest_score(distance.dtype))
        rare = jnp.where(outside, beyond, 2 * jnp.log(sine))
        likely = jnp.log1p(-jnp.where(outside, jnp.exp(beyond), sine * sine))
        return jnp.where(upper, rare, likely), jnp.where(upper, likely, rare)

    def information(self, scores: Array) -> Array:
        """(pi/A)^2 up to and on the edges, 0 outside; it decreases in the tail."""
        if self.tail:
            return super().information(scores)
        scores = self._checked(scores)
        distance, _ = self._distance(scores, constants_of(self, scores.dtype))
        return jnp.where(distance < 0, 0.0, self.rate**2 + 0 * distance)  # NaN stays NaN

    def split_at(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """A/2 - d if the upper edge is nearer, otherwise d - A/2."""
        rare = xp.minimum(left, right)
        likely = xp.maximum(left, right)
        d = xp.arctan2(xp.sqrt(rare), xp.sqrt(likely)) * (2 / self.rate)
        if self.tail:
            share = rare / (rare + likely)
            log = xp.log(share) - math.log(self.tail)
            d = xp.where(share <= self.tail, self.joint + log / self.steepness, d)
        return xp.where(left < right, self.amplitude / 2 - d, d - self.amplitude / 2)

    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """Upper and lower edge of every node, each as a high and a low part, (4, S)."""
        rows = []
        for edge in (center + self.amplitude / 2, center - self.amplitude / 2):
            high = edge.astype(dtype)
            rows += [high, (edge - high.astype(np.float64)).astype(dtype)]
        return np.stack(rows)

    def _distance(self, scores: Array, constants: Constants) -> tuple[Array, Array]:
        """Distance to the nearer edge, negative outside, and whether that is the upper edge.

        The edge is selected before its low part is added: XLA would turn (high - s) + low with
        constant parts into (high + low) - s, which loses the low part.
        """
        above = constants[0] - scores
        below = scores - constants[2]
        upper = above < below
        low = jnp.where(upper, constants[1], -constants[3])
        return jnp.where(upper, above, below) + low, upper


@lru_cache(maxsize=64)
def constants_of(head: CatnatHead, dtype: Any) -> np.ndarray:
    """``head.node_constants``, (R, S), or (R, 1) if all nodes have the same constants."""
    K = head.num_categories
    centers = np.zeros(1)
    if K & (K - 1):  # not a power of two
        with jax.ensure_compile_time_eval():  # concrete numbers, also while a caller is traced
            left, right = np.asarray(subtree_sums(jnp.ones(K)), np.float64)
        centers = -head.split_at(left, right, np)
    return head.node_constants(centers, dtype)


@jax.jit
def path_sums(left: Array, right: Array) -> tuple[Array, Array]:
    """Sum edge values from the root down to every internal node and every leaf.

    Args:
        left: value of the edge to the bit-0 child of each node, (*, K-1).
        right: value of the edge to the bit-1 child of each node, (*, K-1).

    Returns:
        Sums at the internal nodes, (*, K-1), and at the leaves, (*, K).
    """
    level = jnp.zeros_like(left[..., :1])  # values at the nodes and leaves of a level
    nodes = []
    for depth in range(left.shape[-1].bit_length()):
        below = slice(2**depth - 1, 2 ** (depth + 1) - 1)
        to_left = left[..., below]
        inner, leaves = jnp.split(level, [to_left.shape[-1]], -1)
        nodes.append(inner)
        children = jnp.stack((inner + to_left, inner + right[..., below]), -1)
        children = children.reshape(*inner.shape[:-1], 2 * inner.shape[-1])
        level = jnp.concatenate((leaves, children), -1)
    return jnp.concatenate(nodes, -1), level


def subtree_sums(leaves: Array) -> Sides:
    """Sum leaf values over both subtrees of every node, the transpose of :func:`path_sums`.

    Args:
        leaves: (*, K).

    Returns:
        Sums over the leaves below the two children of each node, (*, K-1) each.
    """
    nodes = jnp.zeros_like(leaves[..., 1:])
    _, transpose = jax.vjp(lambda left, right: path_sums(left, right)[1], nodes, nodes)
    return transpose(leaves)
