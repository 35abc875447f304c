"""The activations in Triton, float32: what :mod:`catnat.activations` computes, inside a kernel.

``NATURAL`` says which one: 0 is sigmoid, 1 is natural, 2 is natural with a tail. ``CENTERED`` says
that all nodes are centered at 0. The numbers rate, high, low, joint, slope and edge are those of a
:class:`~catnat.activations.NaturalActivation`: rate, half_width, joint, steepness and log_at_edge.
``settings`` holds the constants of the nodes, how many nodes there are, and these numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from catnat.activations import Activation, NaturalActivation
from catnat.numerics import LOG_ZERO, largest_score, log_never

_LOG_ZERO = tl.constexpr(LOG_ZERO)
_NEVER = tl.constexpr(log_never(torch.float32))
_LARGEST = tl.constexpr(largest_score(torch.float32))


def activation_arguments(activation: Activation, centered: bool) -> dict[str, Any]:
    """The arguments of a kernel that describe an activation; sigmoid does not use the numbers."""
    is_natural = isinstance(activation, NaturalActivation)
    natural = activation if is_natural else NaturalActivation()
    high, low = natural.half_width(torch.float32)
    return {
        "rate": natural.rate,
        "high": high,
        "low": low,
        "joint": natural.joint,
        "slope": natural.steepness,
        "edge": natural.log_at_edge,
        "NATURAL": 0 if not is_natural else 2 if natural.tail else 1,
        "CENTERED": centered,
    }


@triton.jit
def _log_cos_squared(u):
    """2 log cos(theta) for u = theta^2, 0 <= theta <= pi/4; relative error below 3e-9."""
    p = -1.204253843e-3 * u - 7.845413504e-4
    p = p * u - 4.691762294e-3
    p = p * u - 1.341941110e-2
    p = p * u - 4.445224194e-2
    p = p * u - 1.666663549e-1
    return (p * u - 1.000000002) * u


@triton.jit
def _log_sin_squared(theta, u):
    """2 log sin(theta) = 2 log(theta) + 2 log(sin(theta) / theta), error below 1e-9."""
    p = -5.993279433e-5 * u - 7.017163058e-4
    p = p * u - 1.111189001e-2
    return 2.0 * tl.log(theta) + (p * u - 3.333332833e-1) * u


@triton.jit
def _log1p_unit(x):
    """log(1 + x) = 2 atanh(x / (2 + x)) for -1/2 <= x <= 1; relative error below 3e-9."""
    t = x / (2.0 + x)
    u = t * t
    p = 0.13333333 * u + 0.15384615
    p = p * u + 0.18181818
    p = p * u + 0.22222222
    p = p * u + 0.28571429
    p = p * u + 0.4
    p = p * u + 0.66666667
    return 2.0 * t + t * (u * p)


@triton.jit
def _sine(x, u):
    """sin x for 0 <= x <= pi/4, u = x^2."""
    p = 2.7557319e-6 * u - 1.9841270e-4
    p = p * u + 8.3333333e-3
    p = p * u - 1.6666667e-1
    return x + x * (u * p)


@triton.jit
def _cosine(u):
    """cos x for 0 <= x <= pi/4, u = x^2."""
    p = -2.7557319e-7 * u + 2.4801587e-5
    p = p * u - 1.3888889e-3
    p = p * u + 4.1666667e-2
    return 1.0 - 0.5 * u + u * (u * p)


@triton.jit
def _distances(s, node, constants, S, high, low, inside, CENTERED: tl.constexpr):
    """Distance of natural scores to the upper and to the lower edge of their node."""
    if CENTERED:
        return (high - s) + low, (s + high) + low
    else:
        top = tl.load(constants + node, mask=inside, other=0.0)
        top_low = tl.load(constants + S + node, mask=inside, other=0.0)
        bottom = tl.load(constants + 2 * S + node, mask=inside, other=0.0)
        bottom_low = tl.load(constants + 3 * S + node, mask=inside, other=0.0)
        return (top[None, :] - s) + top_low[None, :], (s - bottom[None, :]) - bottom_low[None, :]


@triton.jit
def _centered(s, node, constants, inside, CENTERED: tl.constexpr):
    """Sigmoid scores minus the center of their node."""
    if CENTERED:
        return s
    else:
        return s - tl.load(constants + node, mask=inside, other=0.0)[None, :]


@triton.jit
def _tail_log(d, joint, slope, edge):
    """log p of the rarer bit in the tail, and its slope; log p = log tail before the tail."""
    log_p = edge + slope * tl.where(d > joint, joint, d)
    beyond = log_p < -_LARGEST
    floor = tl.where(d == -float("inf"), _NEVER, -_LARGEST)
    return tl.where(beyond, floor, log_p), tl.where(beyond, 0.0, slope)


@triton.jit
def _floored(total):
    """The log-probability from the sum along a path: LOG_ZERO where a step was impossible."""
    return tl.where(total < _NEVER / 2, _LOG_ZERO, total)


@triton.jit
def _log_activation(s, node, settings, inside, NATURAL: tl.constexpr, CENTERED: tl.constexpr):
    """log(1 - a) and log a."""
    constants, S, rate, high, low, joint, slope, edge = settings
    if NATURAL:
        above, below = _distances(s, node, constants, S, high, low, inside, CENTERED)
        upper = above < below
        d = tl.where(upper, above, below)
        theta = tl.where(d <= 0, 0.0, d * (0.5 * rate))
        theta = tl.where(theta < 1e-30, 1e-30, theta)
        u = theta * theta
        rare = tl.where(d <= 0, _NEVER, _log_sin_squared(theta, u))
        likely = _log_cos_squared(u)
        if NATURAL == 2:
            log_p, _ = _tail_log(d, joint, slope, edge)
            rare = tl.where(d <= joint, log_p, rare)
            likely = tl.where(d <= joint, _log1p_unit(-tl.exp(log_p)), likely)
        return tl.where(upper, rare, likely), tl.where(upper, likely, rare)
    else:
        x = _centered(s, node, constants, inside, CENTERED)
        size = tl.where(tl.abs(x) > _LARGEST, _LARGEST, tl.abs(x))
        size = tl.where(tl.abs(x) == float("inf"), -_NEVER, size)
        tail = _log1p_unit(tl.exp(-size))
        return tl.where(x > 0, -size, 0.0) - tail, tl.where(x > 0, 0.0, -size) - tail


@triton.jit
def _slopes(s, node, settings, inside, NATURAL: tl.constexpr, CENTERED: tl.constexpr):
    """-d log(1 - a)/ds and d log a/ds."""
    constants, S, rate, high, low, joint, slope, edge = settings
    if NATURAL:
        above, below = _distances(s, node, constants, S, high, low, inside, CENTERED)
        upper = above < below
        d = tl.where(upper, above, below)
        theta = tl.where(d <= 0, 1.0, d * (0.5 * rate))
        theta = tl.where(theta < 1e-30, 1e-30, theta)
        u = theta * theta
        sine, cosine = _sine(theta, u), _cosine(u)
        scale = tl.where(d <= 0, 0.0, rate) / (sine * cosine)
        steep, gentle = scale * (cosine * cosine), scale * (sine * sine)
        if NATURAL == 2:
            log_p, r = _tail_log(d, joint, slope, edge)
            p = tl.exp(log_p)
            steep = tl.where(d <= joint, r, steep)
            gentle = tl.where(d <= joint, r * (p / (1.0 - p)), gentle)
        return tl.where(upper, steep, gentle), tl.where(upper, gentle, steep)
    else:
        x = _centered(s, node, constants, inside, CENTERED)
        e = tl.exp(-tl.abs(x))
        major = tl.where(tl.abs(x) > _LARGEST, 0.0, 1.0) / (1.0 + e)
        minor = e * major
        return tl.where(x > 0, major, minor), tl.where(x > 0, minor, major)
