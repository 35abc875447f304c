r"""Activations a(s), which divide the probability of a node between its two children.

The paper's parameterization is a tree of binary splits. A node with score s gives bit 1 the
probability a(s) and bit 0 the probability 1 - a(s). With the center C of the node and x = s - C,

- sigmoid: a = 1 / (1 + exp(-x));
- natural: a = (1 + sin(pi x / A)) / 2 = sin^2(pi/4 + pi x / (2A)) for |x| <= A/2; a = 0 below and
  a = 1 above. With a tail, the probability of the rarer bit continues as an exponential instead.

An activation computes the logarithms log(1 - a) and log a, and the Fisher information of the node,
(a')^2 / (a (1 - a)): a (1 - a) for sigmoid, and for natural (pi/A)^2 for every score before the
tail.

All activations are plain differentiable torch. The fused kernels of :mod:`catnat.kernels` and
:mod:`catnat.jax` implement sigmoid and natural again, and are tested against this module: the
kernels also compute slopes, in float32 and without autograd. ``node_constants`` computes the
constants of all nodes, (R, S), from their centers, (S,) in float64. The other methods take scores
(*, S) and these constants in the dtype and on the device of the scores; None if every C is 0.
``is_fused`` is true if the kernels implement the formula; a(0) is then exactly 1/2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from catnat.heads.natural import NaturalNumbers
from catnat.heads.nodes import Sides
from catnat.numerics import largest_score, log_never, safe_log


class _OfCenters:
    """An activation whose only constant of a node is its center."""

    def node_constants(self, center: Tensor, dtype: torch.dtype) -> Tensor:
        """Centers C, (1, S)."""
        return center[None].to(dtype)


@dataclass(frozen=True)
class SigmoidActivation(_OfCenters):
    """a(s) = 1 / (1 + exp(-x)), x = s - C.

    Scores beyond :func:`~catnat.numerics.largest_score` are clamped to it, with slope 0.
    """

    is_fused = True

    def inverse(self, left: Tensor, right: Tensor) -> Tensor:
        """x = log(right / left); large but finite if left or right is 0."""
        return _floored_log(right) - _floored_log(left)

    def log_activation(self, scores: Tensor, constants: Tensor | None) -> Sides:
        """log(1 - a) = -softplus(x) and log a = -softplus(-x)."""
        x, _ = _centered(scores, constants)
        # Below the threshold softplus is log1p(exp(x)), which keeps small values accurate.
        left = -F.softplus(x, threshold=50)
        right = -F.softplus(-x, threshold=50)
        return _impossible_at_infinity(left, right, scores)

    def information(self, scores: Tensor, constants: Tensor | None) -> Tensor:
        """a (1 - a) = sigmoid(x) sigmoid(-x)."""
        x, beyond = _centered(scores, constants)
        return torch.where(beyond, 0.0, torch.sigmoid(x) * torch.sigmoid(-x))


class NaturalActivation(NaturalNumbers):
    r"""a(s) = sin^2(phi), phi = pi/4 + pi (s - C) / (2A), clamped to [0, pi/2].

    The methods use the distance d from s to the *nearer* of the edges C - A/2 and C + A/2. With
    theta = pi d / (2A) in [0, pi/4], the likelier bit has probability cos^2(theta) and the other
    bit sin^2(theta). Computing with phi would be inaccurate near an edge, where log sin^2(theta) is
    steep. An edge is stored as a sum of two numbers for the same reason, so that d is accurate up
    to the edge.

    With a tail, a follows these formulas up to the *joint*, the distance d_t from the edge
    with sin^2(pi d_t / (2A)) = tail. Nearer to the edge and beyond it the rarer bit has probability
    p = tail exp(-r (d_t - d)). The steepness r is the slope of log sin^2(theta) at the joint, so
    value and slope meet there. The slope of log p stays r, up to
    :func:`~catnat.numerics.largest_score`, and the information is r^2 p / (1 - p).

    Args:
        amplitude: width of the region in which a moves (A); with a tail it also moves beyond.
        tail: probability of the rarer bit at which the tail begins; 0 for no tail.
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
        """x = (2A/pi) (phi - pi/4), tan^2(phi) = right / left; an edge if one of them is 0.

        In the tail x is logarithmic, and large but finite if left or right is 0.
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
        upper = above < below  # torch.minimum has no gradient at a tie (s = C)
        return torch.where(upper, above, below), upper

    def log_activation(self, scores: Tensor, constants: Tensor | None) -> Sides:
        """2 log sin(theta) for the rarer bit, 2 log cos(theta) for the likelier one."""
        distance, upper = self.distance(scores, constants)
        outside = distance <= self.joint  # on or beyond an edge, or in the tail
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
        """log p of the rarer bit in the tail, and where it was clamped to the largest score."""
        bound = largest_score(distance.dtype)
        log_p = self.log_at_edge + self.steepness * distance.clamp_max(self.joint)
        beyond = log_p < -bound
        return torch.where(beyond, -bound, log_p), beyond


@dataclass(frozen=True)
class CustomActivation(_OfCenters):
    """An activation defined by a function x -> log(1 - a(x)), log a(x), with a increasing.

    Scores beyond :func:`~catnat.numerics.largest_score` are clamped to it, with slope 0.

    Args:
        function: differentiable elementwise function; its parameters get gradients.
    """

    is_fused = False

    function: Callable[[Tensor], Sides]

    def inverse(self, left: Tensor, right: Tensor) -> Tensor:
        """x found by search in |x| <= 1e6; an end of this range if left or right is 0.

        The result has a gradient in the parameters of the function.
        """
        target = torch.log(right) - torch.log(left)
        with torch.no_grad():
            x = self._search(target)
            step = 1e-4 * (1 + x.abs())
            slope = (self._log_odds(x + step) - self._log_odds(x - step)) / (2 * step)
        # One Newton step hardly changes x and has the gradient of the inverse function.
        newton = (self._log_odds(x) - target) / torch.where(slope > 0, slope, 1.0)
        return torch.where((slope > 0) & (newton.abs() <= step), x - newton, x)

    def _search(self, target: Tensor) -> Tensor:
        """x at which log a - log(1 - a) is the target, accurate to 1e-15 of 1 + |x|.

        Every round divides the interval of t = arsinh(x) with the solution into equal parts.
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
        """Value of the function; an infinite score makes one side certain."""
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
    """Constants of an activation for the fused kernels in float32.

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
    """x = s - C, clamped to the largest score on both sides, and where it was clamped."""
    bound = largest_score(scores.dtype)
    x = scores if constants is None else scores - constants[0]
    beyond = x.abs() > bound
    return torch.where(beyond, bound * x.sign(), x), beyond


def _impossible_at_infinity(left: Tensor, right: Tensor, scores: Tensor) -> Sides:
    """The two logarithms, with ``log_never`` for the side that an infinite score excludes."""
    never = log_never(left.dtype)
    left = left.masked_fill(scores == torch.inf, never)
    return left, right.masked_fill(scores == -torch.inf, never)


def _floored_log(x: Tensor) -> Tensor:
    """log x, and a finite number with exp = 0 where x = 0."""
    return safe_log(x, math.log(torch.finfo(x.dtype).smallest_normal) * 1.25)


def _sinh(t: Tensor) -> Tensor:
    """``torch.sinh`` by ``exp``, because ONNX lacks it in float64."""
    return (torch.exp(t) - torch.exp(-t)) / 2
