"""The two catnat heads of the paper: how a score divides the probability of its node."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from catnat.checks import require_tail, require_within
from catnat.jax.numerics import FAR_LOG, LOG_ZERO, largest_score, safe_log
from catnat.jax.tree_heads import CatnatHead, Constants, constants_of

Pair = tuple[Array, Array]


@dataclass(frozen=True)
class SigmoidHead(CatnatHead):
    """catnat with a(s) = 1 / (1 + exp(-x)), x = s - C.

    Scores beyond :func:`~catnat.jax.numerics.largest_score` count as that score, with slope 0.
    """

    name: str = field(init=False, repr=False, default="sigmoid")

    def logs(self, scores: Array, constants: Constants) -> Pair:
        """log(1 - a) = -softplus(x) and log a = -softplus(-x)."""
        bound, x = largest_score(scores.dtype), scores - constants[0]
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

    def logs(self, scores: Array, constants: Constants) -> Pair:
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
        rare, likely = xp.minimum(left, right), xp.maximum(left, right)
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
        constants, up = constants_of(self, scores.dtype), left <= 0
        edge = jnp.where(up, constants[0], constants[2])
        outward = jnp.where(up, jnp.inf, -jnp.inf).astype(edge.dtype)
        inside = ~(self._distance(edge, constants)[0] <= 0)
        edge = jnp.where(inside, jnp.nextafter(edge, outward), edge)
        return jnp.where(up ^ (right <= 0), edge, scores)

    def _distance(self, scores: Array, constants: Constants) -> Pair:
        """Distance to the nearer edge, negative outside, and whether that is the upper edge.

        The edge is chosen before its low part is added. XLA would turn (high - s) + low with
        constant parts into (high + low) - s, and the low part would be lost.
        """
        above, below = constants[0] - scores, scores - constants[2]
        upper = above < below
        low = jnp.where(upper, constants[1], -constants[3])
        return jnp.where(upper, above, below) + low, upper

    def _tail_log(self, distance: Array) -> Array:
        """log p of the rarer bit in the tail, or of an impossible one."""
        if not self.tail:
            return jnp.full_like(distance, LOG_ZERO)
        at_edge = math.log(self.tail) - self.steepness * self.joint
        return jnp.maximum(at_edge + self.steepness * distance, -largest_score(distance.dtype))
