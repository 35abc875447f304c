"""The catnat heads: a tree of binary decisions, whose Fisher matrix is diagonal.

:mod:`catnat.tree` describes the tree: internal nodes have the heap numbers 1..K-1 and the score
indices 0..K-2, leaves the heap numbers K..2K-1; the children of node j are 2j and 2j + 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from catnat.checks import checked_order, require_finite, require_tail, require_within
from catnat.jax.head import CategoricalHead
from catnat.jax.numerics import (
    FAR_LOG,
    LOG_ZERO,
    floored_sums,
    largest_score,
    log_never,
    pick,
    safe_log,
    uniform,
)

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
        sums = path_sums(*self._log_activation(self._checked(scores)))[1]
        return self._by_class(floored_sums(sums))

    def log_prob(self, scores: Array, value: Array) -> Array:
        """Log-probability of the categories ``value`` in O(log K): along their paths alone.

        The shape of ``value`` broadcasts with the batch shape. NaN for one that is not a category.
        """
        scores = self._checked(scores)
        left, right, bits = self.path_logs_by(lambda node: pick(scores, node), value)
        return floored_sums(jnp.where(bits, right, left).sum(-1))

    def path_logs(self, scores: Array, value: Array) -> tuple[Array, Array, Array]:
        """log(1 - a), log a and the bits of the nodes above the categories ``value``, (*, H).

        If a path is shorter than H, its last entries are those of a node with a = 0 and bit 0.
        They are NaN for a value that is not a category.
        """
        scores = self._checked(scores)
        left, right, bits = self.path_logs_by(lambda node: pick(scores, node), value)
        return floored_sums(left), floored_sums(right), bits

    def path_logs_by(
        self, scores_at: Callable[[Array], Array], value: Array
    ) -> tuple[Array, Array, Array]:
        """As :meth:`path_logs`, for scores that a function gives for the indices of nodes.

        An impossible step has the logarithm ``log_never``: see :func:`floored_sums`.
        """
        value, is_category = self._checked_value(value)
        leaf = value if self.order is None else jnp.asarray(np.array(self.order))[value]
        child = leaf[..., None] + self.num_categories >> jnp.arange(self.num_scores.bit_length())
        has_parent = child > 1  # heap numbers, from the leaf up; the root has no parent
        node = jnp.where(has_parent, (child >> 1) - 1, 0)
        left, right = self._log_activation(scores_at(node), node)
        left = jnp.where(has_parent, left, 0.0)
        right = jnp.where(has_parent, right, LOG_ZERO)
        is_category = is_category[..., None]
        left = jnp.where(is_category, left, jnp.nan)
        right = jnp.where(is_category, right, jnp.nan)
        return left, right, has_parent & (child & 1 == 1)

    def sample(self, key: Array, scores: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Categories drawn at random in O(log K), (*sample_shape, *) in int32.

        A draw starts at the root and takes the rarer bit of a node if a uniform number is below
        that bit's probability. The draw is -1 where it comes to a NaN score.
        """
        scores = self._checked(scores)
        shape = (*sample_shape, *scores.shape[:-1])
        return self.sample_by(key, lambda node: pick(scores, node), shape, scores.dtype)

    def sample_by(
        self, key: Array, scores_at: Callable[[Array], Array], shape: tuple[int, ...], dtype: Any
    ) -> Array:
        """As :meth:`sample`, for scores that a function gives for the indices of nodes."""
        K = self.num_categories
        place = jnp.ones(shape, jnp.int32)  # heap numbers
        is_nan = jnp.zeros(shape, bool)
        for u in uniform(key, (self.num_scores.bit_length(), *shape), dtype):
            is_inner = place < K
            node = jnp.where(is_inner, place - 1, 0)[..., None]
            left, right = self._log_activation(scores_at(node), node)
            left = left[..., 0]
            right = right[..., 0]
            bit = (u < jnp.exp(jnp.minimum(left, right))) == (right < left)
            place = jnp.where(is_inner, 2 * place + bit, place)
            is_nan |= is_inner & jnp.isnan(left)
        leaf = place - K
        if self.order is not None:
            leaf = jnp.asarray(np.argsort(self.order).astype(np.int32))[leaf]
        return jnp.where(is_nan, -1, leaf)

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
            center = self._at_shares(mask, scores.dtype)
            center_before = self._at_shares(before, scores.dtype)
            scores = scores + (center - center_before)  # exactly 0 where the mask changes nothing
        return self._filled(scores, mask)

    def _at_shares(self, allowed: Array, dtype: Any) -> Array:
        """x at which a node divides as its allowed leaves do; as halves if a side has none."""
        left, right = subtree_sums(self._by_leaf(allowed.astype(dtype)))
        is_split = (left > 0) & (right > 0)
        center: Array = self.split_at(jnp.where(is_split, left, 1), jnp.where(is_split, right, 1))
        return center

    def _filled(self, scores: Array, mask: Array) -> Array:
        left, right = subtree_sums(self._by_leaf(mask.astype(scores.dtype)))
        one_sided = jnp.where(left > 0, -jnp.inf, jnp.where(right > 0, jnp.inf, 0.0))
        is_split = (left > 0) & (right > 0)
        return jnp.where(is_split, scores, one_sided.astype(scores.dtype))

    def allowed(self, scores: Array) -> Array:
        """The mask back from :meth:`masked` scores, (*, K-1) -> (*, K) bool."""
        scores = self._checked(scores)
        forbidden = path_sums((scores == jnp.inf) * 1, (scores == -jnp.inf) * 1)[1] > 0
        return self._by_class(~forbidden)

    def _log_activation(self, scores: Array, node: Array | None = None) -> tuple[Array, Array]:
        """log(1 - a) and log a of all nodes, or of the nodes with these indices.

        An infinite score, which a mask makes, has an impossible side.
        """
        constants: Constants = constants_of(self, scores.dtype)
        if node is not None and constants.shape[-1] > 1:
            constants = jnp.asarray(constants)[:, node]
        left, right = self.logs(scores, constants)
        never = log_never(scores.dtype)
        left = jnp.where(scores == jnp.inf, never, left)
        right = jnp.where(scores == -jnp.inf, never, right)
        return left, right

    def _by_class(self, leaves: Array) -> Array:
        """Values of leaves in the order of classes, (*, K)."""
        return leaves if self.order is None else leaves[..., np.array(self.order)]

    def _by_leaf(self, classes: Array) -> Array:
        """Values of classes in the order of leaves, (*, K)."""
        return classes if self.order is None else classes[..., np.argsort(self.order)]


@dataclass(frozen=True)
class SigmoidHead(CatnatHead):
    """catnat with a(s) = 1 / (1 + exp(-x)), x = s - C.

    Scores beyond :func:`~catnat.jax.numerics.largest_score` count as that score, with slope 0.
    """

    name: str = field(init=False, repr=False, default="sigmoid")

    def logs(self, scores: Array, constants: Constants) -> tuple[Array, Array]:
        """log(1 - a) = -softplus(x) and log a = -softplus(-x)."""
        bound = largest_score(scores.dtype)
        x = scores - constants[0]
        x = jnp.where(jnp.abs(x) > bound, bound * jnp.sign(x), x)
        return -jnp.logaddexp(x, 0.0), -jnp.logaddexp(-x, 0.0)

    def split_at(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """log(right / left); far out where one of them is 0."""
        return safe_log(right, FAR_LOG, xp) - safe_log(left, FAR_LOG, xp)

    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """The centers themselves, (1, S)."""
        return center[None].astype(dtype)


@dataclass(frozen=True)
class NaturalHead(CatnatHead):
    r"""catnat with a(s) = (1 + sin(pi (s - C) / A)) / 2 for |s - C| <= A/2, flat beyond.

    Its Fisher matrix is diag(P(node) (pi/A)^2) (the paper's Corollary). With a ``tail`` a(s) is the
    same until its rarer side has that probability, and continues as an exponential: no score is
    without gradient, and no probability is 0.

    The methods compute with the distance d of s to the *nearer* one of the edges C - A/2 and
    C + A/2, and with theta = pi d / (2A): the rarer bit has probability sin^2(theta). An edge is
    stored as a sum of two numbers, so that d is accurate right up to the edge. From the distance
    d_t where the rarer bit has the probability ``tail``, its probability continues as
    tail exp(-r (d_t - d)), with the slope r that log sin^2(theta) has there.

    Args:
        num_categories: K, at least 2.
        center: C.
        uniform_at_zero: as in :class:`CatnatHead`.
        order: as in :class:`CatnatHead`.
        amplitude: A, the width of the region in which a(s) moves; 2 pi gives the sigmoid's slope
            at 0.
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
        self._set(amplitude=float(self.amplitude), tail=float(self.tail))

    @property
    def rate(self) -> float:
        """pi / A: the constant square root of the Fisher information."""
        return math.pi / self.amplitude

    @property
    def joint(self) -> float:
        """d_t, the distance from the edge at which the tail begins."""
        return 2 * math.asin(math.sqrt(self.tail)) / self.rate

    @property
    def steepness(self) -> float:
        """r, the slope of the rarer bit's logarithm in the tail."""
        return self.rate * math.sqrt((1 - self.tail) / self.tail)

    def logs(self, scores: Array, constants: Constants) -> tuple[Array, Array]:
        """2 log sin(theta) for the rarer bit, 2 log cos(theta) for the likelier one.

        Outside, on an edge or beyond it or in the tail, theta is 1 and not used.
        """
        distance, upper = self._distance(scores, constants)
        outside = distance <= self.joint
        theta = jnp.maximum(distance * (self.rate / 2), 1e-30)  # its logarithm is finite
        sine = jnp.sin(jnp.where(outside, 1.0, theta))
        beyond = self._tail_log(jnp.where(outside, distance, 0.0))
        rare = jnp.where(outside, beyond, 2 * jnp.log(sine))
        likely = jnp.log1p(-jnp.where(outside, jnp.exp(beyond), sine * sine))
        return jnp.where(upper, rare, likely), jnp.where(upper, likely, rare)

    def information(self, scores: Array) -> Array:
        """(pi/A)^2 up to the edges and on them, 0 outside; it falls in the tail."""
        if self.tail:
            return super().information(scores)
        scores = self._checked(scores)
        distance, _ = self._distance(scores, constants_of(self, scores.dtype))
        return jnp.where(distance < 0, 0.0, self.rate**2 + 0 * distance)  # NaN stays NaN

    def split_at(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """A/2 - d where the upper edge is nearer, d - A/2 elsewhere."""
        rare = xp.minimum(left, right)
        likely = xp.maximum(left, right)
        d = xp.arctan2(xp.sqrt(rare), xp.sqrt(likely)) * (2 / self.rate)
        if self.tail:
            share = rare / xp.where(rare + likely <= 0, 1.0, rare + likely)
            log = safe_log(share, FAR_LOG, xp) - math.log(self.tail)
            d = xp.where(share <= self.tail, self.joint + log / self.steepness, d)
        return xp.where(left < right, self.amplitude / 2 - d, d - self.amplitude / 2)

    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """Upper and lower edge of every node, each as a high and a low part, (4, S)."""
        rows = []
        for edge in (center + self.amplitude / 2, center - self.amplitude / 2):
            high = edge.astype(dtype)
            rows += [high, (edge - high.astype(np.float64)).astype(dtype)]
        return np.stack(rows)

    def _settled(self, scores: Array, left: Array, right: Array) -> Array:
        """The score of an impossible bit is on its edge, or next to it if the edge is inside."""
        if self.tail:
            return scores
        constants = constants_of(self, scores.dtype)
        up = left <= 0
        edge = jnp.where(up, constants[0], constants[2])
        outward = jnp.where(up, jnp.inf, -jnp.inf).astype(edge.dtype)
        inside = ~(self._distance(edge, constants)[0] <= 0)
        edge = jnp.where(inside, jnp.nextafter(edge, outward), edge)
        return jnp.where(up ^ (right <= 0), edge, scores)

    def _distance(self, scores: Array, constants: Constants) -> tuple[Array, Array]:
        """Distance to the nearer edge, negative outside, and whether that is the upper edge.

        The edge is chosen before its low part is added. XLA would turn (high - s) + low with
        constant parts into (high + low) - s, and the low part would be lost.
        """
        above = constants[0] - scores
        below = scores - constants[2]
        upper = above < below
        low = jnp.where(upper, constants[1], -constants[3])
        return jnp.where(upper, above, below) + low, upper

    def _tail_log(self, distance: Array) -> Array:
        """log p of the rarer bit in the tail, or of an impossible one."""
        if not self.tail:
            return jnp.full_like(distance, log_never(distance.dtype))
        at_edge = math.log(self.tail) - self.steepness * self.joint
        return jnp.maximum(at_edge + self.steepness * distance, -largest_score(distance.dtype))


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
    left_levels = jnp.split(left, below_root, -1)
    right_levels = jnp.split(right, below_root, -1)
    level = jnp.zeros_like(left[..., :1])  # values at the nodes and leaves of a level
    nodes = []
    for to_left, to_right in zip(left_levels, right_levels, strict=True):
        inner, leaves = jnp.split(level, [to_left.shape[-1]], -1)
        nodes.append(inner)
        children = jnp.stack((inner + to_left, inner + to_right), -1)
        children = children.reshape(*inner.shape[:-1], 2 * inner.shape[-1])
        level = jnp.concatenate((leaves, children), -1)
    return jnp.concatenate(nodes, -1), level


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
