"""The activations of :mod:`catnat.heads.activations` in Triton, float32.

``NATURAL`` selects one: 0 is sigmoid, 1 is natural, 2 is natural with a tail. The numbers rate,
high, low, joint, slope and edge are rate, half_width, joint, steepness and log_at_edge of a
:class:`~catnat.heads.activations.NaturalActivation`. ``settings`` holds the constants of the nodes
(None where all nodes are centered at 0), how many nodes there are, and these numbers.

With t = tan(theta), theta as in ``NaturalActivation``, the likelier bit has the log-probability
-log(1 + t^2), the other one 2 log t less, and the slopes are rate * t and rate / t.
"""

import torch
import triton
import triton.language as tl

from catnat.numerics import LOG_ZERO, largest_score, log_never

_LOG_ZERO = tl.constexpr(LOG_ZERO)
_NEVER = tl.constexpr(log_never(torch.float32))
_LARGEST = tl.constexpr(largest_score(torch.float32))


@triton.jit
def _tangent(theta):
    """tan(theta) for theta <= pi/4, relative error below 2e-8; theta counts as 1e-30 or more."""
    theta = tl.where(theta < 1e-30, 1e-30, theta)
    u = theta * theta
    p = 9.387657845e-3 * u + 3.116165943e-3
    p = p * u + 2.443243993e-2
    p = p * u + 5.341064635e-2
    p = p * u + 1.333880692e-1
    p = p * u + 3.333315657e-1
    return theta + theta * (u * p)


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
def floored(total):
    """The log-probability from the sum along a path: LOG_ZERO where a step was impossible."""
    return tl.where(total < _NEVER / 2, _LOG_ZERO, total)


@triton.jit
def logs_and_slopes(s, node, settings, inside, NATURAL: tl.constexpr):
    """log(1 - a), log a, -d log(1 - a)/ds and d log a/ds of scores (R, n) at nodes (n,).

    The compiler drops what a kernel does not use.
    """
    if NATURAL:
        return _natural(s, node, settings, inside, NATURAL == 2)
    else:
        return _sigmoid(s, node, settings[0], inside)


@triton.jit
def _sigmoid(s, node, centers, inside):
    x = s
    if centers is not None:
        x -= tl.load(centers + node, mask=inside, other=0.0)[None, :]
    size = tl.abs(x)
    factor = tl.where(size > _LARGEST, 0.0, 1.0)
    size = tl.where(size == float("inf"), -_NEVER, tl.where(size > _LARGEST, _LARGEST, size))
    e = tl.exp(-size)
    log_major = -_log1p_unit(e)
    log_minor = log_major - size
    major = factor / (1.0 + e)
    minor = e * major
    return _by_side(x > 0, log_minor, log_major, major, minor)


@triton.jit
def _natural(s, node, settings, inside, TAIL: tl.constexpr):
    constants, S, rate, high, low, joint, slope, edge = settings
    if constants is None:
        above = (high - s) + low
        below = (s + high) + low
    else:
        at = constants + node
        top = tl.load(at, mask=inside, other=0.0)[None, :]
        top_low = tl.load(at + S, mask=inside, other=0.0)[None, :]
        bottom = tl.load(at + 2 * S, mask=inside, other=0.0)[None, :]
        bottom_low = tl.load(at + 3 * S, mask=inside, other=0.0)[None, :]
        above = (top - s) + top_low
        below = (s - bottom) - bottom_low
    upper = above < below
    d = tl.where(upper, above, below)
    t = _tangent(d * (0.5 * rate))
    likely = -_log1p_unit(t * t)
    rare = tl.where(d <= 0, _NEVER, 2.0 * tl.log(t) + likely)
    factor = tl.where(d <= 0, 0.0, rate)
    steep = factor / t
    gentle = factor * t
    if TAIL:
        in_tail = d <= joint
        log_p = edge + slope * tl.where(d > joint, joint, d)
        beyond = log_p < -_LARGEST
        lowest = tl.where(d == -float("inf"), _NEVER, -_LARGEST)
        log_p = tl.where(beyond, lowest, log_p)
        p = tl.exp(log_p)
        factor = tl.where(beyond, 0.0, slope)
        rare = tl.where(in_tail, log_p, rare)
        likely = tl.where(in_tail, _log1p_unit(-p), likely)
        steep = tl.where(in_tail, factor, steep)
        gentle = tl.where(in_tail, factor * (p / (1.0 - p)), gentle)
    return _by_side(upper, rare, likely, steep, gentle)


@triton.jit
def _by_side(upper, rare, likely, steep, gentle):
    """Result of :func:`logs_and_slopes`; ``upper`` is true where bit 1 is more likely."""
    left = tl.where(upper, rare, likely)
    right = tl.where(upper, likely, rare)
    return left, right, tl.where(upper, steep, gentle), tl.where(upper, gentle, steep)
