"""The two binary splits of the paper, each in closed form: value, slopes, information.

A split turns the score s of a node into log(1 - a(s)), the log-probability of bit 0, and
log a(s), that of bit 1. Its *slopes* are the rates at which these move: -d log(1-a)/ds and
d log a/ds, both >= 0. Their product (a')^2 / (a (1-a)) is the Fisher information of the split.

These are the plain differentiable forms; the fused kernels hold the same formulas again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from catnat.numerics import LOG_ZERO, largest_score


class Split(Protocol):
    """What a tree needs to know of its binary splits, whose centred score is x = s - C."""

    def node_constants(self, centre: Tensor, dtype: torch.dtype) -> Tensor:
        """What the methods below need of the centres C, (S,) in float64 -> (R, S)."""

    def inverse(self, left: Tensor, right: Tensor) -> Tensor:
        """x of a split in the proportion left : right = 1 - a : a, in float64."""

    def log_split(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        """log(1 - a) and log a, (*, S) each; constants None where every node has C = 0."""

    def slopes(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        """-d log(1 - a)/ds and d log a/ds, (*, S) each."""


def _sinh(t: Tensor) -> Tensor:
    """torch.sinh, which ONNX does not know in float64."""
    return (torch.exp(t) - torch.exp(-t)) / 2


@dataclass(frozen=True)
class CustomSplit:
    """A split known only by its function x -> log(1 - a(x)), log a(x), with a increasing."""

    function: Callable[[Tensor], tuple[Tensor, Tensor]]

    def node_constants(self, centre: Tensor, dtype: torch.dtype) -> Tensor:
        return centre[None].to(dtype)

    def inverse(self, left: Tensor, right: Tensor) -> Tensor:
        """By search in the log-odds; the end of the range searched where one side is 0.

        The result carries the gradient in the parameters of the function, if it has any.
        """
        target = torch.log(right) - torch.log(left)
        with torch.no_grad():
            x = self._search(target)
            step = 1e-4 * (1 + x.abs())
            slope = (self._log_odds(x + step) - self._log_odds(x - step)) / (2 * step)
        # One step of Newton's method: its value is that of x, its gradient that of the inverse.
        newton = (self._log_odds(x) - target) / torch.where(slope > 0, slope, 1.0)
        return torch.where((slope > 0) & (newton.abs() <= step), x - newton, x)

    def _search(self, target: Tensor) -> Tensor:
        """x with log-odds as given, to 1e-15 of 1 + |x|: in t = arsinh(x), |x| <= 1e6."""
        points = max(2, min(32, 4096 // max(1, int(target.numel()))))  # at once, in every round
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

    def log_split(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.function(scores if constants is None else scores - constants[0])

    def slopes(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        x = scores if constants is None else scores - constants[0]
        moved: Any = torch.func.jvp(self.function, (x,), (torch.ones_like(x),))[1]
        return -moved[0], moved[1]


@dataclass(frozen=True)
class SigmoidSplit:
    """a(s) = 1 / (1 + exp(-(s - C)))."""

    def node_constants(self, centre: Tensor, dtype: torch.dtype) -> Tensor:
        """The centres C themselves, (1, S)."""
        return centre[None].to(dtype)

    def inverse(self, left: Tensor, right: Tensor) -> Tensor:
        """s - C of a split in the proportion left : right; far out, but finite, where one is 0."""
        lowest = math.log(torch.finfo(left.dtype).smallest_normal) * 1.25  # exp of it is 0

        def log(x: Tensor) -> Tensor:
            return torch.where(x <= 0, lowest, torch.log(torch.where(x <= 0, 1.0, x)))

        return log(right) - log(left)

    def log_split(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        x, _ = self._centred(scores, constants)
        # Up to the threshold softplus is log1p(exp(x)): small values keep their relative accuracy.
        return -F.softplus(x, threshold=50), -F.softplus(-x, threshold=50)

    def slopes(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        x, beyond = self._centred(scores, constants)
        left, right = torch.sigmoid(x), torch.sigmoid(-x)
        return torch.where(beyond, 0.0, left), torch.where(beyond, 0.0, right)

    @staticmethod
    def _centred(scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        """x = s - C within the bounds of what is computed with, and where it was beyond them."""
        bound = largest_score(scores.dtype)
        x = scores if constants is None else scores - constants[0]
        beyond = x.abs() > bound
        return torch.where(beyond, bound * x.sign(), x), beyond


@dataclass(frozen=True)
class NaturalSplit:
    r"""a(s) = sin^2(phi), phi = pi/4 + pi (s - C) / (2A), clamped to [0, pi/2].

    Everything is written in terms of the distance d of s to the *nearer* edge C +- A/2: with
    theta = pi d / (2A) in [0, pi/4], the likelier bit has probability cos^2(theta) and the other
    sin^2(theta). An edge is stored as a sum of two numbers, so d keeps its relative accuracy
    right up to the edge, where log sin^2(theta) is steep.
    """

    amplitude: float = 2 * math.pi
    half_in_float32: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        (rounded,) = struct.unpack("f", struct.pack("f", self.amplitude / 2))
        object.__setattr__(self, "half_in_float32", rounded)

    @property
    def rate(self) -> float:
        """pi / A: the constant square root of the split's Fisher information."""
        return math.pi / self.amplitude

    def node_constants(self, centre: Tensor, dtype: torch.dtype) -> Tensor:
        """Upper and lower edge of every node, each as a high and a low part, (4, S)."""
        rows = []
        for edge in (centre + self.amplitude / 2, centre - self.amplitude / 2):
            high = edge.to(dtype)
            rows += [high, (edge - high.double()).to(dtype)]
        return torch.stack(rows)

    def half_width(self, dtype: torch.dtype) -> tuple[float, float]:
        """A/2 as a high part that the dtype can represent and a low part."""
        half = self.amplitude / 2
        if dtype == torch.float64:
            return half, 0.0
        return self.half_in_float32, half - self.half_in_float32

    def inverse(self, left: Tensor, right: Tensor) -> Tensor:
        """s - C of a split in the proportion left : right; the edge itself where one is 0."""
        phi = torch.atan2(torch.sqrt(right), torch.sqrt(left))
        return torch.where(left + right <= 0, 0.0, (phi - math.pi / 4) * (2 / self.rate))

    def distance(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        """Signed distance to the nearer edge (negative outside), and whether that is the upper."""
        if constants is None:
            high, low = self.half_width(scores.dtype)
            above, below = (high - scores) + low, (scores + high) + low
        else:
            above = (constants[0] - scores) + constants[1]
            below = (scores - constants[2]) - constants[3]
        upper = above < below  # not torch.minimum: its gradient at a tie (s = C) would vanish
        return torch.where(upper, above, below), upper

    def log_split(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        theta, outside, upper = self._angle(scores, constants)
        sine = torch.sin(theta)
        rare = torch.where(outside, LOG_ZERO, 2 * torch.log(sine))
        likely = torch.where(outside, 0.0, torch.log1p(-sine * sine))
        return torch.where(upper, rare, likely), torch.where(upper, likely, rare)

    def slopes(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
        theta, outside, upper = self._angle(scores, constants)
        tan = torch.tan(theta)
        steep = torch.where(outside, 0.0, self.rate / tan)
        gentle = torch.where(outside, 0.0, self.rate * tan)
        return torch.where(upper, steep, gentle), torch.where(upper, gentle, steep)

    def _angle(self, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """theta, at least 1e-30 (and some harmless number outside), with what distance() says."""
        distance, upper = self.distance(scores, constants)
        outside = distance <= 0
        theta = distance * (self.rate / 2)
        theta = torch.where(theta < 1e-30, 1e-30, theta)  # steep, but finite; keeps NaN
        return torch.where(outside, 1.0, theta), outside, upper
