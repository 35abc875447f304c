"""The numbers of natural's split, which torch and JAX have in common."""

import math
from dataclasses import dataclass

DEFAULT_TAIL = 0.05
"""Tail of natural where its name alone is given for a likelihood of labels."""


@dataclass(frozen=True)
class NaturalNumbers:
    """The numbers of a split that moves between the edges C - A/2 and C + A/2 of its score.

    The distance d to the nearer edge decides: the rarer bit has probability sin^2(pi d / (2A)), and
    in the tail an exponential; see :class:`~catnat.activations.NaturalActivation`.

    Args:
        amplitude: A, the width of the region in which a moves; with a tail it moves beyond.
        tail: probability of the rarer bit at which the tail begins, 0 for none.
    """

    amplitude: float = 2 * math.pi
    tail: float = 0.0

    @property
    def rate(self) -> float:
        """pi / A: the constant square root of the node's Fisher information."""
        return math.pi / self.amplitude

    @property
    def joint(self) -> float:
        """d_t, the distance from the edge at which the tail begins; 0 without a tail."""
        return 2 * math.asin(math.sqrt(self.tail)) / self.rate

    @property
    def steepness(self) -> float:
        """r, the slope of the rarer bit's logarithm in the tail."""
        return self.rate / math.tan(math.asin(math.sqrt(self.tail))) if self.tail else 0.0

    @property
    def log_at_edge(self) -> float:
        """Logarithm of the rarer bit's probability on an edge, with a tail."""
        return math.log(self.tail) - self.steepness * self.joint if self.tail else 0.0
