r"""a(s): how a score divides the probability of its node, as in :mod:`catnat.activations`.

An activation is given by log(1 - a) and log a; JAX differentiates them. Methods get scores (*, S)
and the ``constants`` of the nodes, (R, S), or (R, 1) where all nodes have the same center C; x is
s - C.
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
Constants = Array | np.ndarray


class Activation(ABC):
    """What a tree head needs to know of a(s)."""

    def log_activation(self, scores: Array, constants: Constants) -> Pair:
        """log(1 - a) and log a; an infinite score, which a mask makes, has an impossible side."""
        left, right = self.logs(scores, constants)
        left = jnp.where(scores == jnp.inf, LOG_ZERO, left)
        return left, jnp.where(scores == -jnp.inf, LOG_ZERO, right)

    @abstractmethod
    def logs(self, scores: Array, constants: Constants) -> Pair:
        """log(1 - a) and log a of finite scores; finite, with finite derivatives, elsewhere."""

    @abstractmethod
    def inverse(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """x for which 1 - a : a is left : right, by jax.numpy or numpy; finite where one is 0."""

    @abstractmethod
    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """The constants of nodes with these centers C, which are in float64."""

    def information(self, scores: Array, constants: Constants) -> Array:
        """Fisher information a'^2 / (a (1 - a)): the slope of -log(1 - a) times that of log a."""
        _, (left, right) = jax.jvp(
            lambda s: self.log_activation(s, constants), (scores,), (jnp.ones_like(scores),)
        )
        information: Array = -left * right
        return information


@dataclass(frozen=True)
class SigmoidActivation(Activation):
    """a(s) = 1 / (1 + exp(-x)), x = s - C.

    Scores beyond :func:`~catnat.jax.numerics.largest_score` count as that score, with slope 0.
    """

    def logs(self, scores: Array, constants: Constants) -> Pair:
        """log(1 - a) = -softplus(x) and log a = -softplus(-x)."""
        bound, x = largest_score(scores.dtype), scores - constants[0]
        x = jnp.where(jnp.abs(x) > bound, bound * jnp.sign(x), x)
        return -jnp.logaddexp(x, 0.0), -jnp.logaddexp(-x, 0.0)

    def inverse(self, left: Any, right: Any, xp: Any = jnp) -> Any:
        """log(right / left); far out where one of them is 0."""
        return safe_log(right, FAR_LOG, xp) - safe_log(left, FAR_LOG, xp)

    def node_constants(self, center: np.ndarray, dtype: Any) -> np.ndarray:
        """The centers themselves, (1, S)."""
        return center[None].astype(dtype)


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

    def information(self, scores: Array, constants: Constants) -> Array:
        """(pi/A)^2 up to the edges and on them, 0 outside; it falls in the tail."""
        if self.tail:
            return super().information(scores, constants)
        distance, _ = self._distance(scores, constants)
        return jnp.where(distance < 0, 0.0, self.rate**2 + 0 * distance)  # NaN stays NaN

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

    def saturated(self, scores: Array, constants: Constants) -> Array:
        """Whether a score is on an edge or beyond it, without a tail."""
        return self._distance(scores, constants)[0] <= 0

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
