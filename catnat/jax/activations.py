r"""a(s): how a score divides the probability of its node, as in :mod:`catnat.activations`.

An activation is given by log(1 - a) and log a, and by their slopes, -d log(1 - a)/ds and
d log a/ds. Methods get scores (*, S) and the ``constants`` of the nodes, (R, S), or (R, 1) where
all nodes have the same center C; x is s - C.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from catnat.jax.numerics import FAR_LOG, LOG_ZERO, largest_score, safe_log

Pair = tuple[Array, Array]


class Activation(ABC):
    """What a tree head needs to know of a(s)."""

    def log_activation(self, scores: Array, constants: Array) -> Pair:
        """log(1 - a) and log a; their derivatives are the slopes."""
        out: Pair = _with_slopes(self, scores, constants)
        return out

    @abstractmethod
    def logs(self, scores: Array, constants: Array) -> Pair:
        """log(1 - a) and log a, whatever JAX finds as their derivatives."""

    @abstractmethod
    def slopes(self, scores: Array, constants: Array) -> Pair:
        """-d log(1 - a)/ds and d log a/ds."""

    @abstractmethod
    def inverse(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """x for which 1 - a : a is left : right, by jax.numpy or numpy; finite where one is 0."""

    @abstractmethod
    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """The constants of nodes with these centers C, which are in float64."""

    def information(self, scores: Array, constants: Array) -> Array:
        """Fisher information a'^2 / (a (1 - a))."""
        left, right = self.slopes(scores, constants)
        return left * right


def _logs(activation: Activation, scores: Array, constants: Array) -> Pair:
    """An infinite score, which a mask makes, gives its impossible side the one floor."""
    left, right = activation.logs(scores, constants)
    left = jnp.where(scores == jnp.inf, LOG_ZERO, left)
    return left, jnp.where(scores == -jnp.inf, LOG_ZERO, right)


_with_slopes = jax.custom_jvp(_logs, nondiff_argnums=(0,))


@_with_slopes.defjvp
def _logs_jvp(
    activation: Activation, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Pair, Pair]:
    left, right = activation.slopes(*primals)
    return activation.log_activation(*primals), (-left * tangents[0], right * tangents[0])


@dataclass(frozen=True)
class SigmoidActivation(Activation):
    """a(s) = 1 / (1 + exp(-x)), x = s - C.

    Scores beyond :func:`~catnat.jax.numerics.largest_score` count as that score, with slope 0.
    """

    def logs(self, scores: Array, constants: Array) -> Pair:
        """log(1 - a) = -softplus(x) and log a = -softplus(-x)."""
        x, _ = self._centered(scores, constants)
        return -jnp.logaddexp(x, 0.0), -jnp.logaddexp(-x, 0.0)

    def slopes(self, scores: Array, constants: Array) -> Pair:
        """a = sigmoid(x) and 1 - a = sigmoid(-x)."""
        x, beyond = self._centered(scores, constants)
        left, right = jax.nn.sigmoid(x), jax.nn.sigmoid(-x)
        return jnp.where(beyond, 0.0, left), jnp.where(beyond, 0.0, right)

    def inverse(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """log(right / left); far out where one of them is 0."""
        return safe_log(right, FAR_LOG, xp) - safe_log(left, FAR_LOG, xp)

    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """The centers themselves, (1, S)."""
        return center[None].astype(dtype)

    @staticmethod
    def _centered(scores: Array, constants: Array) -> Pair:
        """x = s - C, cut off at the largest score on both sides, and where it was cut off."""
        bound = largest_score(scores.dtype)
        x = scores - constants[0]
        beyond = jnp.abs(x) > bound
        return jnp.where(beyond, bound * jnp.sign(x), x), beyond


@dataclass(frozen=True)
class NaturalActivation(Activation):
    r"""a(s) = sin^2(phi), phi = pi/4 + pi (s - C) / (2A), clamped to [0, pi/2].

    The methods compute with the distance d of s to the *nearer* one of the edges C - A/2 and
    C + A/2, and with theta = pi d / (2A): the rarer bit has probability sin^2(theta). An edge is
    stored as a sum of two numbers, so that d is accurate right up to the edge.

    With a tail these formulas hold while the rarer bit has probability ``tail`` or more. From the
    distance d_t where it has the probability ``tail``, its probability continues as
    tail exp(-r (d_t - d)), with the slope r that log sin^2(theta) has there.

    Args:
        amplitude: A, the width of the region in which a(s) moves.
        tail: probability of the rarer bit at which the tail begins, 0 for none.
    """

    amplitude: float = 2 * math.pi
    tail: float = 0.0

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

    def logs(self, scores: Array, constants: Array) -> Pair:
        """2 log sin(theta) for the rarer bit, 2 log cos(theta) for the likelier one."""
        distance, upper = self._distance(scores, constants)
        theta, outside = self._angle(distance)
        sine = jnp.sin(theta)
        beyond = self._tail_log(distance, outside)[0] if self.tail else jnp.asarray(LOG_ZERO)
        rare = jnp.where(outside, beyond, 2 * jnp.log(sine))
        likely = jnp.log1p(-jnp.where(outside, jnp.exp(beyond), sine * sine))
        return jnp.where(upper, rare, likely), jnp.where(upper, likely, rare)

    def slopes(self, scores: Array, constants: Array) -> Pair:
        """(pi/A) / tan(theta) for the rarer bit, (pi/A) tan(theta) for the likelier; 0 outside.

        In the tail r for the rarer bit, r p / (1 - p) for the likelier.
        """
        distance, upper = self._distance(scores, constants)
        theta, outside = self._angle(distance)
        tan = jnp.tan(theta)
        tail = self._tail_slopes(distance, outside) if self.tail else (0.0, 0.0)
        steep = jnp.where(outside, tail[0], self.rate / tan)
        gentle = jnp.where(outside, tail[1], self.rate * tan)
        return jnp.where(upper, steep, gentle), jnp.where(upper, gentle, steep)

    def information(self, scores: Array, constants: Array) -> Array:
        """(pi/A)^2 up to the edges and on them, 0 outside; it falls in the tail."""
        distance, _ = self._distance(scores, constants)
        flat = self.rate**2 + 0 * jnp.where(distance < 0, 0.0, distance)  # NaN stays NaN
        if not self.tail:
            return jnp.where(distance < 0, 0.0, flat)
        outside = distance <= self.joint
        steep, gentle = self._tail_slopes(distance, outside)
        return jnp.where(outside, steep * gentle, flat)

    def inverse(self, left: Any, right: Any, xp: Any = jnp) -> Any:
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

    def saturated(self, scores: Array, constants: Array) -> Array:
        """Whether a score is on an edge or beyond it, without a tail."""
        return self._distance(scores, constants)[0] <= 0

    def _distance(self, scores: Array, constants: Array) -> Pair:
        """Distance to the nearer edge, negative outside, and whether that is the upper edge.

        The edge is chosen before its low part is added. XLA would turn (high - s) + low with
        constant parts into (high + low) - s, and the low part would be lost.
        """
        above, below = constants[0] - scores, scores - constants[2]
        upper = above < below
        low = jnp.where(upper, constants[1], -constants[3])
        return jnp.where(upper, above, below) + low, upper

    def _angle(self, distance: Array) -> Pair:
        """theta, and whether the score is outside: on an edge or beyond it, or in the tail.

        theta is at least 1e-30, and 1 outside, where the callers do not use it.
        """
        outside = distance <= self.joint
        theta = jnp.where(outside, 1.0, distance) * (self.rate / 2)
        theta = jnp.where(theta < 1e-30, 1e-30, theta)  # steep, but finite; keeps NaN
        return jnp.where(outside, 1.0, theta), outside

    def _tail_log(self, distance: Array, outside: Array) -> Pair:
        """log p of the rarer bit in the tail, and where it was cut off at the largest score."""
        bound, at_edge = largest_score(distance.dtype), math.log(self.tail)
        at_edge -= self.steepness * self.joint
        log_p = at_edge + self.steepness * jnp.where(outside, distance, 0.0)
        beyond = log_p < -bound
        return jnp.where(beyond, -bound, log_p), beyond

    def _tail_slopes(self, distance: Array, outside: Array) -> Pair:
        """r for the rarer bit and r p / (1 - p) for the likelier; 0 beyond the largest score."""
        log_p, beyond = self._tail_log(distance, outside)
        p = jnp.exp(log_p)
        steep = jnp.where(beyond, 0.0, self.steepness + 0 * p)
        return steep, steep * (p / (1 - p))
