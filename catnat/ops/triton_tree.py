"""Fused Triton kernels for the tree: forward, backward and Fisher diagonal. CUDA, float32.

A program takes R rows and walks their trees level by level in registers. Going down, the two
children of every node are interleaved into the next level; going up, neighbours are split off and
added. Only the scores are kept for the backward pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.numerics import LOG_ZERO, largest_score
from catnat.splits import NaturalSplit, Split

_LOG_ZERO = tl.constexpr(LOG_ZERO)
_LARGEST = tl.constexpr(largest_score(torch.float32))


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
def _distances(s, node, constants, S, high, low, inside, CENTRED: tl.constexpr):
    """Distance of natural scores to the upper and to the lower edge of their node."""
    if CENTRED:
        return (high - s) + low, (s + high) + low
    else:
        top = tl.load(constants + node, mask=inside, other=0.0)
        top_low = tl.load(constants + S + node, mask=inside, other=0.0)
        bottom = tl.load(constants + 2 * S + node, mask=inside, other=0.0)
        bottom_low = tl.load(constants + 3 * S + node, mask=inside, other=0.0)
        return (top[None, :] - s) + top_low[None, :], (s - bottom[None, :]) - bottom_low[None, :]


@triton.jit
def _centred(s, node, constants, inside, CENTRED: tl.constexpr):
    """Sigmoid scores minus the centre of their node."""
    if CENTRED:
        return s
    else:
        return s - tl.load(constants + node, mask=inside, other=0.0)[None, :]


@triton.jit
def _tail_log(d, joint, slope, edge):
    """log p of the rarer bit in the tail, and its slope; log p = log tail before the tail."""
    log_p = edge + slope * tl.where(d > joint, joint, d)
    beyond = log_p < -_LARGEST
    return tl.where(beyond, -_LARGEST, log_p), tl.where(beyond, 0.0, slope)


@triton.jit
def _log_split(
    s,
    node,
    constants,
    S,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    inside,
    NATURAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """log(1 - a) and log a."""
    if NATURAL:
        above, below = _distances(s, node, constants, S, high, low, inside, CENTRED)
        upper = above < below
        d = tl.where(upper, above, below)
        theta = tl.where(d <= 0, 0.0, d * (0.5 * rate))
        theta = tl.where(theta < 1e-30, 1e-30, theta)
        u = theta * theta
        rare = tl.where(d <= 0, _LOG_ZERO, _log_sin_squared(theta, u))
        likely = _log_cos_squared(u)
        if NATURAL == 2:
            log_p, _ = _tail_log(d, joint, slope, edge)
            rare = tl.where(d <= joint, log_p, rare)
            likely = tl.where(d <= joint, _log1p_unit(-tl.exp(log_p)), likely)
        return tl.where(upper, rare, likely), tl.where(upper, likely, rare)
    else:
        x = _centred(s, node, constants, inside, CENTRED)
        size = tl.where(tl.abs(x) > _LARGEST, _LARGEST, tl.abs(x))
        tail = _log1p_unit(tl.exp(-size))
        return tl.where(x > 0, -size, 0.0) - tail, tl.where(x > 0, 0.0, -size) - tail


@triton.jit
def _sigmoid_slopes(x):
    """a and 1 - a, 0 beyond the largest score."""
    e = tl.exp(-tl.abs(x))
    major = tl.where(tl.abs(x) > _LARGEST, 0.0, 1.0) / (1.0 + e)
    minor = e * major
    return tl.where(x > 0, major, minor), tl.where(x > 0, minor, major)


@triton.jit
def _slopes(
    s,
    node,
    constants,
    S,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    inside,
    NATURAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """-d log(1 - a)/ds and d log a/ds."""
    if NATURAL:
        above, below = _distances(s, node, constants, S, high, low, inside, CENTRED)
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
        return _sigmoid_slopes(_centred(s, node, constants, inside, CENTRED))


@triton.jit
def _information(
    s,
    node,
    constants,
    S,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    inside,
    NATURAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Fisher information a'^2 / (a (1 - a)), and 1 where the split is flat."""
    if NATURAL:
        above, below = _distances(s, node, constants, S, high, low, inside, CENTRED)
        d = tl.where(above < below, above, below)
        if NATURAL == 2:
            log_p, r = _tail_log(d, joint, slope, edge)
            p = tl.exp(log_p)
            fallen = r * (r * (p / (1.0 - p)))
            return tl.where(d <= joint, fallen, rate * rate + 0 * d), tl.zeros_like(d)
        else:
            return tl.where(d < 0, 0.0, rate * rate + 0 * d), tl.where(d <= 0, 1.0, 0.0)
    else:
        x = _centred(s, node, constants, inside, CENTRED)
        left, right = _sigmoid_slopes(x)
        return left * right, tl.zeros_like(left)


@triton.jit
def _load_levels(source, alive, HEIGHT: tl.constexpr):
    """Scores of the complete levels, loaded all at once so that memory is waited for once."""
    loaded = ()
    for level in tl.static_range(HEIGHT):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        loaded = loaded + (tl.load(source + node[None, :], mask=alive, other=0.0),)  # noqa: RUF005
    return loaded


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    scores,
    constants,
    out,
    rows,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    R: tl.constexpr,
    P: tl.constexpr,  # largest power of two <= K
    HEIGHT: tl.constexpr,  # log2 P
    REST: tl.constexpr,  # K - P: nodes of the last, incomplete level
    NATURAL: tl.constexpr,  # 0: sigmoid, 1: natural, 2: natural with a tail
    CENTRED: tl.constexpr,
):
    K: tl.constexpr = P + REST
    S: tl.constexpr = K - 1
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = (row < rows)[:, None]
    source = scores + row[:, None] * S
    target = out + row[:, None] * K
    here = tl.zeros((R, 1), tl.float32)
    loaded = _load_levels(source, alive, HEIGHT)
    for level in tl.static_range(HEIGHT):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        left, right = _log_split(
            loaded[level],
            node,
            constants,
            S,
            rate,
            high,
            low,
            joint,
            slope,
            edge,
            node < S,
            NATURAL,
            CENTRED,
        )
        here = tl.interleave(here + left, here + right)
    if REST == 0:
        tl.store(target + tl.arange(0, P)[None, :], here, mask=alive)
    else:
        i = tl.arange(0, P)
        deep = i < REST
        node = P - 1 + i
        s = tl.load(source + node[None, :], mask=alive & deep[None, :], other=0.0)
        left, right = _log_split(
            s, node, constants, S, rate, high, low, joint, slope, edge, deep, NATURAL, CENTRED
        )
        pair = target + (P - REST + 2 * i)[None, :]
        tl.store(pair, here + left, mask=alive & deep[None, :])
        tl.store(pair + 1, here + right, mask=alive & deep[None, :])
        tl.store(target + (i - REST)[None, :], here, mask=alive & (i >= REST)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    scores,
    constants,
    grad,
    out,
    rows,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    R: tl.constexpr,
    P: tl.constexpr,
    HEIGHT: tl.constexpr,
    REST: tl.constexpr,
    NATURAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    K: tl.constexpr = P + REST
    S: tl.constexpr = K - 1
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = (row < rows)[:, None]
    source = scores + row[:, None] * S
    target = out + row[:, None] * S
    leaf = grad + row[:, None] * K
    i = tl.arange(0, P)
    if REST == 0:
        here = tl.load(leaf + i[None, :], mask=alive, other=0.0)
    else:
        deep = i < REST
        node = P - 1 + i
        both = alive & deep[None, :]
        s = tl.load(source + node[None, :], mask=both, other=0.0)
        left, right = _slopes(
            s, node, constants, S, rate, high, low, joint, slope, edge, deep, NATURAL, CENTRED
        )
        pair = leaf + (P - REST + 2 * i)[None, :]
        a = tl.load(pair, mask=both, other=0.0)
        b = tl.load(pair + 1, mask=both, other=0.0)
        tl.store(target + node[None, :], b * right - a * left, mask=both)
        shallow = alive & (i >= REST)[None, :]
        here = a + b + tl.load(leaf + (i - REST)[None, :], mask=shallow, other=0.0)
    loaded = _load_levels(source, alive, HEIGHT)
    for level in tl.static_range(HEIGHT - 1, -1, -1):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        left, right = _slopes(
            loaded[level],
            node,
            constants,
            S,
            rate,
            high,
            low,
            joint,
            slope,
            edge,
            node < S,
            NATURAL,
            CENTRED,
        )
        a, b = tl.split(tl.reshape(here, (R, 1 << level, 2)))
        tl.store(target + node[None, :], b * right - a * left, mask=alive)
        here = a + b


@triton.jit(do_not_specialize=["rows"])
def _fisher_kernel(
    scores,
    constants,
    out,
    rows,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    R: tl.constexpr,
    P: tl.constexpr,
    HEIGHT: tl.constexpr,
    REST: tl.constexpr,
    NATURAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    K: tl.constexpr = P + REST
    S: tl.constexpr = K - 1
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = (row < rows)[:, None]
    source = scores + row[:, None] * S
    target = out + row[:, None] * K
    here = tl.zeros((R, 1), tl.float32)
    count = tl.zeros((R,), tl.float32)
    loaded = _load_levels(source, alive, HEIGHT)
    for level in tl.static_range(HEIGHT):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        information, flat = _information(
            loaded[level],
            node,
            constants,
            S,
            rate,
            high,
            low,
            joint,
            slope,
            edge,
            node < S,
            NATURAL,
            CENTRED,
        )
        tl.store(target + node[None, :], tl.exp(here) * information, mask=alive)
        count += tl.sum(flat, 1)
        left, right = _log_split(
            loaded[level],
            node,
            constants,
            S,
            rate,
            high,
            low,
            joint,
            slope,
            edge,
            node < S,
            NATURAL,
            CENTRED,
        )
        here = tl.interleave(here + left, here + right)
    if REST > 0:
        i = tl.arange(0, P)
        deep = i < REST
        node = P - 1 + i
        both = alive & deep[None, :]
        s = tl.load(source + node[None, :], mask=both, other=0.0)
        information, flat = _information(
            s, node, constants, S, rate, high, low, joint, slope, edge, deep, NATURAL, CENTRED
        )
        tl.store(target + node[None, :], tl.exp(here) * information, mask=both)
        count += tl.sum(tl.where(both, flat, 0.0), 1)
    tl.store(target + S, count[:, None] / S, mask=alive)


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make the device of x the current one: Triton launches kernels there."""
    here = torch.compiler.is_compiling() or not x.is_cuda  # not CUDA: Triton's interpreter
    if here or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(x)


def forward(scores: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Log-probabilities of the leaves, (B, K-1) -> (B, K)."""
    return _from_scores(_forward_kernel, scores, split, constants)


def fisher(scores: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Fisher diagonal and, in the last column, share of flat splits, (B, K-1) -> (B, K)."""
    return _from_scores(_fisher_kernel, scores, split, constants)


def _from_scores(kernel: Any, scores: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    scores = scores.contiguous()
    B, S = scores.shape
    out = scores.new_empty(B, S + 1)
    if B:
        grid, settings = _settings(B, S + 1, split, constants, elements=1024, small_warps=1)
        given = scores if constants is None else constants
        with on_device_of(scores):
            kernel[grid](scores, given, out, **settings)
    return out


def backward(scores: Tensor, grad: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Gradient in the scores, (B, K-1), from that in the log-probabilities, (B, K)."""
    scores, grad = scores.contiguous(), grad.contiguous()
    B, K = grad.shape
    out = torch.empty_like(scores)
    if B:
        grid, settings = _settings(B, K, split, constants, elements=512, small_warps=2)
        given = scores if constants is None else constants
        with on_device_of(scores):
            _backward_kernel[grid](scores, given, grad, out, **settings)
    return out


def _settings(
    rows: int, K: int, split: Split, constants: Tensor | None, elements: int, small_warps: int
) -> tuple[tuple[int], dict[str, int | float | bool]]:
    """Grid and arguments common to all kernels; block sizes that were fastest on an H200."""
    height = K.bit_length() - 1
    P = 1 << height
    R = max(2, min(16, elements // P))  # one row alone leads Triton to a far slower layout
    while R > 4 and rows < 512 * R:  # for few rows, more programs with fewer rows each are faster
        R //= 2
    warps = min(16, small_warps if P <= 64 else max(1, R * P // (1024 * small_warps)))
    natural = split if isinstance(split, NaturalSplit) else NaturalSplit()
    high, low = natural.half_width(torch.float32)
    return (triton.cdiv(rows, R),), {
        "rows": rows,
        "rate": natural.rate,
        "high": high,
        "low": low,
        "joint": natural.joint,
        "slope": natural.steepness,
        "edge": natural.log_at_edge,
        "R": R,
        "P": P,
        "HEIGHT": height,
        "REST": K - P,
        "NATURAL": 0 if natural is not split else 2 if natural.tail else 1,
        "CENTRED": constants is None,
        "num_warps": warps,
    }
