"""Triton kernels for paths in a tree: log-probability, its gradient, and samples. CUDA, float32.

A program takes R results, and every lane walks its own path: up from a leaf, or down from the root.
Result i belongs to row i % B of the scores. Of a row only the nodes of a path are read, so K has no
limit. Tensors in a program are (1, R): a row of R nodes for the functions of
``triton_activations.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from catnat.kernels.triton_activations import _log_activation, _slopes


@triton.jit(do_not_specialize=["count", "rows"])
def leaf_kernel(
    scores,
    constants,
    leaf,
    grad,  # not read forward
    out,
    count,
    rows,
    K,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    BACKWARD: tl.constexpr,
    R: tl.constexpr,
    HEIGHT: tl.constexpr,
    NATURAL: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """Log-probabilities of leaves, or their gradient in the scores: up from a leaf to the root."""
    S = K - 1
    known = (constants, S, rate, high, low, joint, slope, edge)
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = i < count
    k = tl.load(leaf + i, mask=alive, other=0)
    valid = (k >= 0) & (k < K)
    heap = tl.where(valid, k, 0) + K
    row = (i % rows) * S
    if BACKWARD:
        g = tl.load(grad + i, mask=alive, other=0.0)
        g = tl.where(valid, g, float("nan"))[None, :]
    else:
        total = tl.zeros((1, R), tl.float32)
    for _ in tl.static_range(HEIGHT):
        right_hand = (heap & 1) == 1
        heap = heap >> 1
        inside = alive & (heap > 0)
        node = tl.where(inside, heap - 1, 0)
        s = tl.load(scores + row + node, mask=inside, other=0.0)[None, :]
        if BACKWARD:
            left, right = _slopes(s, node, known, inside, NATURAL, CENTERED)
            step = g * tl.where(right_hand[None, :], right, -left)
            tl.atomic_add(out + (row + node)[None, :], step, mask=inside[None, :])
        else:
            left, right = _log_activation(s, node, known, inside, NATURAL, CENTERED)
            total += tl.where(inside[None, :], tl.where(right_hand[None, :], right, left), 0.0)
    if not BACKWARD:
        total = tl.where(valid[None, :], total, float("nan"))
        tl.store(out + i[None, :], total, mask=alive[None, :])


@triton.jit(do_not_specialize=["count", "rows"])
def sample_kernel(
    scores,
    constants,
    uniforms,
    out,
    count,
    rows,
    K,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    R: tl.constexpr,
    HEIGHT: tl.constexpr,
    NATURAL: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """Random leaves: down from the root."""
    S = K - 1
    known = (constants, S, rate, high, low, joint, slope, edge)
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = i < count
    source = scores + (i % rows) * S
    heap = tl.zeros((R,), tl.int64) + 1  # 0 after a NaN
    for level in tl.static_range(HEIGHT):
        inside = alive & (heap > 0) & (heap < K)
        node = tl.where(inside, heap - 1, 0)
        s = tl.load(source + node, mask=inside, other=0.0)[None, :]
        left, _ = _log_activation(s, node, known, inside, NATURAL, CENTERED)
        left = tl.reshape(left, (R,)).to(tl.float64)
        u = tl.load(uniforms + i * HEIGHT + level, mask=alive, other=0.0)
        child = 2 * heap + (u >= tl.exp(left)).to(tl.int64)
        heap = tl.where(inside, tl.where(left != left, 0, child), heap)
    tl.store(out + i, tl.where(heap > 0, heap - K, -1), mask=alive)
