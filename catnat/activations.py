r"""a(s): how a score divides the probability of its node between the two children.

The paper's parameterization is a tree of binary splits. The score s of a node gives a(s), the
probability of bit 1; bit 0 has 1 - a(s). With the center C of the node and x = s - C,

- sigmoid: a = 1 / (1 + exp(-x));
- natural: a = (1 + sin(pi x / A)) / 2 = sin^2(pi/4 + pi x / (2A)) for |x| <= A/2; a = 0 below and
  a = 1 above. With a tail, the probability of the rarer bit continues as an exponential instead.

It is given by the logarithms log(1 - a) and log a, and by the Fisher information of the node,
(a')^2 / (a (1 - a)): a (1 - a) for sigmoid, and for natural (pi/A)^2, the same for every score
before the tail.

Sigmoid and natural come first, then :class:`CustomActivation` makes an activation of any increasing
function. All are plain differentiable torch; the fused kernels of :mod:`catnat.kernels` hold the
formulas of sigmoid and natural again. ``node_constants`` makes the constants of all nodes, (R, S),
from their centers, (S,) in float64. The other methods get scores (*, S) and these constants in the
dtype and on the device of the scores, None where every C is 0. ``is_fused`` says that the kernels
know the formula, and that a(0) is exactly 1/2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from catnat.natural import NaturalNumbers
from catnat.numerics import largest_score, log_never, safe_log
from catnat.tree import Sides


class _OfCenters:
    """An activation that needs no more of a node than its center."""

    def node_constants(self, center: Tensor, dtype: torch.dtype) -> Tensor:
        """The centers C themselves, (1, S)."""
        return center[None].to(dtype)


@dataclass(frozen=True)
class SigmoidActivation(_OfCenters):
    """a(s) = 1 / (1 + exp(-x)), x = s - C.

    Scores beyond :func:`~catnat.numerics.largest_score` count as that score, with slope 0.
    """

    is_fused = True

    def inverse(self, left: Tensor, right: Tensor) -> Tensor:
        """x = log(right / left); far out, but finite, where left or right is 0."""
        return _floored_log(right) - _floored_log(left)

    def log_activation(self, scores: Tensor, constants: Tensor | None) -> Sides:
        """log(1 - a) = -softplus(x) and log a = -softplus(-x)."""
        x, _ = _centered(scores, constants)
        # Up to the threshold softplus is log1p(exp(x)): small values keep their relative accuracy.
        left = -F.softplus(x, threshold=50)
        right = -F.softplus(-x, threshold=50)
        return _impossible_at_infinity(left, right, scores)

    def information(self, scores: Tensor, constants: Tensor | None) -> Tensor:
        """a (1 - a) = sigmoid(x) sigmoid(-x)."""
        x, beyond = _centered(scores, constants)
        return torch.where(beyond, 0.0, torch.sigmoid(x) * torch.sigmoid(-x))


class NaturalActivation(NaturalNumbers):
    r"""a(s) = sin^2(phi), phi = pi/4 + pi (s - C) / (2A), clamped to [0, pi/2].

    The methods compute with the distance d of s to the *nearer* one of the edges C - A/2 and
    C + A/2. With theta = pi d / (2A) in [0, pi/4], the likelier bit has probability cos^2(theta)
    and the other bit sin^2(theta): phi itself would lose all accuracy near an edge, where
    log sin^2(theta) is steep. For the same reason an edge is stored as a sum of two numbers, so
    that d is accurate right up to the edge.

    With a tail, a follows these formulas up to the *joint*, the distance d_t from the edge
    with sin^2(pi d_t / (2A)) = tail. Nearer to the edge and beyond it the rarer bit has probability
    p = tail exp(-r (d_t - d)). The steepness r is the slope of log sin^2(theta) at the joint, so
    value and slope meet there. The slope of log p stays r, up to
    :func:`~catnat.numerics.largest_score`, and the information is r^2 p / (1 - p).

    Args:
        amplitude: A, the width of the region in which a moves; with a tail it moves beyond.
        tail: probability of the rarer bit at which the tail begins, 0 for none.
    """

    is_fused = True

    def node_constants(self, center: Tensor, dtype: torch.dtype) -> Tensor:
        """Upper and lower edge of every node, each as a high and a low part, (4, S)."""
        rows = []
        for edge in (center + self.amplitude / 2, center - self.amplitude / 2):
            high = edge.to(dtype)
            rows += [high, (edge - high.double()).to(dtype)]
        return torch.stack(rows)

    def half_width(self, dtype: torch.dtype) -> tuple[float, float]:
        """A/2 as a high part that the dtype can represent and a low part."""
        half = self.amplitude / 2
        if dtype == torch.float64:
            return half, 0.0
        scaled = half * (2**29 + 1)
        high = scaled - (scaled - half)  # the first 24 of 53 binary digits (Dekker, 1971)
        return high, half - high

    def inverse(self, left: Tensor, right: Tensor) -> Tensor:
        """x = (2A/pi) (phi - pi/4), tan^2(phi) = right / left; an edge where one of them is 0.

        In the tail x is logarithmic; far out, but finite, where left or right is 0.
        """
        phi = torch.atan2(torch.sqrt(right), torch.sqrt(left))
        total = left + right
        x = torch.where(total <= 0, 0.0, (phi - math.pi / 4) * (2 / self.rate))
        if not self.tail:
            return x
        rare = torch.minimum(left, right) / torch.where(total <= 0, 1.0, total)
        beyond = self.amplitude / 2 - (_floored_log(rare) - self.log_at_edge) / self.steepness
        in_tail = (rare <= self.tail) & (total > 0)
        return torch.where(in_tail, torch.where(left < right, beyond, -beyond), x)

    def distance(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        """Distance to the nearer edge, negative outside, and whether that is the upper edge."""
        high, low = self.half_width(scores.dtype)
        edges = (high, low, -high, -low) if constants is None else constants
        above = (edges[0] - scores) + edges[1]
        below = (scores - edges[2]) - edges[3]
        upper = above < below  # not torch.minimum: its gradient at a tie (s = C) would vanish
        return torch.where(upper, above, below), upper

    def log_activation(self, scores: Tensor, constants: Tensor | None) -> Sides:
        """2 log sin(theta) for the rarer bit, 2 log cos(theta) for the likelier one."""
        distance, upper = self.distance(scores, constants)
        outside = distance <= self.joint  # on an edge or beyond it, or in the tail
        theta = distance * (self.rate / 2)
        theta = torch.where(theta < 1e-30, 1e-30, theta)  # steep, but finite; keeps NaN
        sine = torch.sin(torch.where(outside, 1.0, theta))
        log_p: float | Tensor = log_never(sine.dtype)
        log_rest: float | Tensor = 0.0
        if self.tail:
            log_p, _ = self._tail_log(distance)
            log_rest = torch.log1p(-log_p.exp())
        rare = torch.where(outside, log_p, 2 * torch.log(sine))
        likely = torch.where(outside, log_rest, torch.log1p(-sine * sine))
        left = torch.where(upper, rare, likely)
        right = torch.where(upper, likely, rare)
        return _impossible_at_infinity(left, right, scores) if self.tail else (left, right)

    def information(self, scores: Tensor, constants: Tensor | None) -> Tensor:
        """(pi/A)^2 up to the edges and on them, 0 outside; falls in the tail."""
        distance, _ = self.distance(scores, constants)
        information = torch.where(distance < 0, 0.0, self.rate**2 + 0 * distance)
        if self.tail:
            log_p, beyond = self._tail_log(distance)
            p = log_p.exp()
            steep = torch.where(beyond, 0.0, self.steepness + 0 * p)
            in_tail = steep * (steep * (p / (1 - p)))
            information = torch.where(distance <= self.joint, in_tail, information)
        return information

    def _tail_log(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """log p of the rarer bit in the tail, and where it was cut off at the largest score."""
        bound = largest_score(distance.dtype)
        log_p = self.log_at_edge + self.steepness * distance.clamp_max(self.joint)
        beyond = log_p < -bound
        return torch.where(beyond, -bound, log_p), beyond


@dataclass(frozen=True)
class CustomActivation(_OfCenters):
    """An activation given by its function x -> log(1 - a(x)), log a(x) alone, with a increasing.

    Scores beyond :func:`~catnat.numerics.largest_score` count as that score, with slope 0.

    Args:
        function: differentiable, elementwise; its parameters, if it has any, get gradients.
    """

    is_fused = False

    function: Callable[[Tensor], Sides]

    def inverse(self, left: Tensor, right: Tensor) -> Tensor:
        """x by search, |x| <= 1e6; an end of this range where left or right is 0.

        The result has a gradient in the parameters of the function.
        """
        target = torch.log(right) - torch.log(left)
        with torch.no_grad():
            x = self._search(target)
            step = 1e-4 * (1 + x.abs())
            slope = (self._log_odds(x + step) - self._log_odds(x - step)) / (2 * step)
        # One step of Newton's method hardly moves x, and has the gradient of the inverse function.
        newton = (self._log_odds(x) - target) / torch.where(slope > 0, slope, 1.0)
        return torch.where((slope > 0) & (newton.abs() <= step), x - newton, x)

    def _search(self, target: Tensor) -> Tensor:
        """x where log a - log(1 - a) is the target, to 1e-15 of 1 + |x|.

        Every round cuts the interval of t = arsinh(x) that holds the solution into equal parts.
        """
        points = max(2, min(32, 4096 // max(1, int(target.numel()))))  # parts of the interval
        low = torch.full_like(target, -math.asinh(1e6))
        width = 2 * math.asinh(1e6)
        share = torch.arange(1, points, dtype=target.dtype, device=target.device)
        share = share.view(-1, *[1] * target.dim())
        while width > 1e-15:
            width /= points
            smaller = self._log_odds(_sinh(low + share * width)) < target
            low = low + smaller.to(low.dtype).sum(0) * width
        return torch.where(target.isnan(), target, _sinh(low + width / 2))

    def _log_odds(self, x: Tensor) -> Tensor:
        below, above = self.function(x)
        return above - below

    def log_activation(self, scores: Tensor, constants: Tensor | None) -> Sides:
        """The function itself; an infinite score makes one side certain."""
        infinite = scores.isinf()
        x, _ = _centered(scores, constants)
        logs = self.function(torch.where(infinite, 0.0, x))
        left, right = (torch.where(infinite, 0.0, log) for log in logs)
        return _impossible_at_infinity(left, right, scores)

    def information(self, scores: Tensor, constants: Tensor | None) -> Tensor:
        """-d log(1 - a)/ds times d log a/ds, by forward-mode differentiation; 0 at infinity."""
        x, beyond = _centered(scores, constants)
        x = torch.where(scores.isinf(), 0.0, x)
        moved = torch.func.jvp(self.function, (x,), (torch.ones_like(x),))[1]
        return torch.where(beyond, 0.0, -moved[0] * moved[1])


Activation = SigmoidActivation | NaturalActivation | CustomActivation


def kernel_numbers(activation: Activation) -> dict[str, float]:
    """What the fused kernels, in float32, are told of an activation; sigmoid has the first alone.

    ``NATURAL`` is 0 for sigmoid, 1 for natural and 2 for natural with a tail.
    """
    natural = activation if isinstance(activation, NaturalActivation) else NaturalActivation()
    kind = 2 if natural.tail else 1
    high, low = natural.half_width(torch.float32)
    return {
        "NATURAL": kind if natural is activation else 0,
        "rate": natural.rate,
        "high": high,
        "low": low,
        "joint": natural.joint,
        "slope": natural.steepness,
        "edge": natural.log_at_edge,
    }


def _centered(scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
    """x = s - C, cut off at the largest score on both sides, and where it was cut off."""
    bound = largest_score(scores.dtype)
    x = scores if constants is None else scores - constants[0]
    beyond = x.abs() > bound
    return torch.where(beyond, bound * x.sign(), x), beyond


def _impossible_at_infinity(left: Tensor, right: Tensor, scores: Tensor) -> Sides:
    """The two logarithms, ``log_never`` for the side that an infinite score leaves empty."""
    never = log_never(left.dtype)
    left = left.masked_fill(scores == torch.inf, never)
    return left, right.masked_fill(scores == -torch.inf, never)


def _floored_log(x: Tensor) -> Tensor:
    """log x; where x = 0 a finite number, so low that exp of it is 0."""
    return safe_log(x, math.log(torch.finfo(x.dtype).smallest_normal) * 1.25)


def _sinh(t: Tensor) -> Tensor:
    """``torch.sinh``, written out because ONNX does not have it in float64."""
    return (torch.exp(t) - torch.exp(-t)) / 2
