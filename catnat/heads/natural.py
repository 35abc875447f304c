"""Constants of the natural split, shared by torch and JAX."""

import math
from dataclasses import dataclass

DEFAULT_TAIL = 0.05
"""Default tail of natural in a likelihood of labels."""


@dataclass(frozen=True)
class NaturalNumbers:
    """Constants of a split that moves between the edges C - A/2 and C + A/2 of its score.

    At the distance d to the nearer edge the rarer bit has probability sin^2(pi d / (2A)), and an
    exponential one in the tail; see :class:`~catnat.heads.activations.NaturalActivation`.

    Args:
        amplitude: width of the region in which a moves (A); with a tail it also moves beyond.
        tail: probability of the rarer bit at which the tail begins; 0 for no tail.
    """

    amplitude: float = 2 * math.pi
    tail: float = 0.0

    @property
    def rate(self) -> float:
        """pi / A: the constant square root of the node's Fisher information."""
        return math.pi / self.amplitude

    @property
    def joint(self) -> float:
        """d_t, the distance from the edge where the tail begins; 0 without a tail."""
        return 2 * math.asin(math.sqrt(self.tail)) / self.rate

    @property
    def steepness(self) -> float:
        """r, the slope of the rarer bit's logarithm in the tail."""
        return self.rate / math.tan(math.asin(math.sqrt(self.tail))) if self.tail else 0.0

    @property
    def log_at_edge(self) -> float:
        """Logarithm of the rarer bit's probability on an edge, with a tail."""
        return math.log(self.tail) - self.steepness * self.joint if self.tail else 0.0
