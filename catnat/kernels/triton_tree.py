"""Fused Triton kernels for the tree: forward and backward. CUDA, float32.

A program takes R rows and walks their trees level by level in registers. Going down, the two
children of every node are interleaved into the next level; going up, neighbors are split off and
added. Only the scores are kept for the backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from catnat.kernels.triton_activations import _log_activation, _slopes


@triton.jit
def _load_levels(source, alive, HEIGHT: tl.constexpr):
    """Scores of the complete levels, loaded all at once so that memory is waited for once."""
    loaded = ()
    for level in tl.static_range(HEIGHT):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        loaded = loaded + (tl.load(source + node[None, :], mask=alive, other=0.0),)  # noqa: RUF005
    return loaded


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
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
    NATURAL: tl.constexpr,  # see triton_activations
    CENTERED: tl.constexpr,
):
    """Log-probabilities of the leaves."""
    K: tl.constexpr = P + REST
    S: tl.constexpr = K - 1
    known = (constants, S, rate, high, low, joint, slope, edge)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = (row < rows)[:, None]
    source = scores + row[:, None] * S
    target = out + row[:, None] * K
    here = tl.zeros((R, 1), tl.float32)
    loaded = _load_levels(source, alive, HEIGHT)
    for level in tl.static_range(HEIGHT):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        left, right = _log_activation(loaded[level], node, known, node < S, NATURAL, CENTERED)
        here = tl.interleave(here + left, here + right)
    if REST == 0:
        tl.store(target + tl.arange(0, P)[None, :], here, mask=alive)
    else:
        i = tl.arange(0, P)
        deep = i < REST
        node = P - 1 + i
        s = tl.load(source + node[None, :], mask=alive & deep[None, :], other=0.0)
        left, right = _log_activation(s, node, known, deep, NATURAL, CENTERED)
        pair = target + (P - REST + 2 * i)[None, :]
        tl.store(pair, here + left, mask=alive & deep[None, :])
        tl.store(pair + 1, here + right, mask=alive & deep[None, :])
        tl.store(target + (i - REST)[None, :], here, mask=alive & (i >= REST)[None, :])


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
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
    CENTERED: tl.constexpr,
):
    """Gradient in the scores, from that in the log-probabilities."""
    K: tl.constexpr = P + REST
    S: tl.constexpr = K - 1
    known = (constants, S, rate, high, low, joint, slope, edge)
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
        left, right = _slopes(s, node, known, deep, NATURAL, CENTERED)
        pair = leaf + (P - REST + 2 * i)[None, :]
        a = tl.load(pair, mask=both, other=0.0)
        b = tl.load(pair + 1, mask=both, other=0.0)
        tl.store(target + node[None, :], b * right - a * left, mask=both)
        shallow = alive & (i >= REST)[None, :]
        here = a + b + tl.load(leaf + (i - REST)[None, :], mask=shallow, other=0.0)
    loaded = _load_levels(source, alive, HEIGHT)
    for level in tl.static_range(HEIGHT - 1, -1, -1):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        left, right = _slopes(loaded[level], node, known, node < S, NATURAL, CENTERED)
        a, b = tl.split(tl.reshape(here, (R, 1 << level, 2)))
        tl.store(target + node[None, :], b * right - a * left, mask=alive)
        here = a + b
