"""Fused Triton kernels for trees: all leaves or single paths, forward, backward, samples.

CUDA, float32.

All leaves: a program takes R rows and walks their trees level by level in registers. Going down,
the two children of every node are interleaved into the next level; going up, neighbors are split
off and added. Only the scores are kept for the backward pass.

Paths: a program takes R results, and every lane walks its own path, up from a leaf or down from the
root. Result i belongs to row i % B of the scores. Of a row only the nodes of a path are read, so K
has no limit. Tensors are (1, R): a row of R nodes for the functions of ``triton_activations.py``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from catnat.activations import Activation
from catnat.kernels.triton_activations import (
    _floored,
    _log_activation,
    _slopes,
    activation_arguments,
)

_BLOCK = 128  # paths of a program


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
    settings = (constants, S, rate, high, low, joint, slope, edge)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = (row < rows)[:, None]
    source = scores + row[:, None] * S
    target = out + row[:, None] * K
    values = tl.zeros((R, 1), tl.float32)
    loaded = _load_levels(source, alive, HEIGHT)
    for level in tl.static_range(HEIGHT):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        left, right = _log_activation(loaded[level], node, settings, node < S, NATURAL, CENTERED)
        values = tl.interleave(values + left, values + right)
    if REST == 0:
        tl.store(target + tl.arange(0, P)[None, :], _floored(values), mask=alive)
    else:
        i = tl.arange(0, P)
        deep = i < REST
        node = P - 1 + i
        s = tl.load(source + node[None, :], mask=alive & deep[None, :], other=0.0)
        left, right = _log_activation(s, node, settings, deep, NATURAL, CENTERED)
        pair = target + (P - REST + 2 * i)[None, :]
        tl.store(pair, _floored(values + left), mask=alive & deep[None, :])
        tl.store(pair + 1, _floored(values + right), mask=alive & deep[None, :])
        tl.store(target + (i - REST)[None, :], _floored(values), mask=alive & (i >= REST)[None, :])


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
    settings = (constants, S, rate, high, low, joint, slope, edge)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = (row < rows)[:, None]
    source = scores + row[:, None] * S
    target = out + row[:, None] * S
    leaf = grad + row[:, None] * K
    i = tl.arange(0, P)
    if REST == 0:
        values = tl.load(leaf + i[None, :], mask=alive, other=0.0)
    else:
        deep = i < REST
        node = P - 1 + i
        deep_alive = alive & deep[None, :]
        s = tl.load(source + node[None, :], mask=deep_alive, other=0.0)
        left, right = _slopes(s, node, settings, deep, NATURAL, CENTERED)
        pair = leaf + (P - REST + 2 * i)[None, :]
        a = tl.load(pair, mask=deep_alive, other=0.0)
        b = tl.load(pair + 1, mask=deep_alive, other=0.0)
        tl.store(target + node[None, :], b * right - a * left, mask=deep_alive)
        shallow = alive & (i >= REST)[None, :]
        values = a + b + tl.load(leaf + (i - REST)[None, :], mask=shallow, other=0.0)
    loaded = _load_levels(source, alive, HEIGHT)
    for level in tl.static_range(HEIGHT - 1, -1, -1):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        left, right = _slopes(loaded[level], node, settings, node < S, NATURAL, CENTERED)
        a, b = tl.split(tl.reshape(values, (R, 1 << level, 2)))
        tl.store(target + node[None, :], b * right - a * left, mask=alive)
        values = a + b


@triton.jit(do_not_specialize=["count", "rows"])
def path_kernel(
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
    settings = (constants, S, rate, high, low, joint, slope, edge)
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
            left, right = _slopes(s, node, settings, inside, NATURAL, CENTERED)
            step = g * tl.where(right_hand[None, :], right, -left)
            tl.atomic_add(out + (row + node)[None, :], step, mask=inside[None, :])
        else:
            left, right = _log_activation(s, node, settings, inside, NATURAL, CENTERED)
            total += tl.where(inside[None, :], tl.where(right_hand[None, :], right, left), 0.0)
    if not BACKWARD:
        total = tl.where(valid[None, :], _floored(total), float("nan"))
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
    settings = (constants, S, rate, high, low, joint, slope, edge)
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = i < count
    source = scores + (i % rows) * S
    heap = tl.zeros((R,), tl.int64) + 1  # 0 after a NaN
    for level in tl.static_range(HEIGHT):
        inside = alive & (heap > 0) & (heap < K)
        node = tl.where(inside, heap - 1, 0)
        s = tl.load(source + node, mask=inside, other=0.0)[None, :]
        left, _ = _log_activation(s, node, settings, inside, NATURAL, CENTERED)
        left = tl.reshape(left, (R,)).to(tl.float64)
        u = tl.load(uniforms + i * HEIGHT + level, mask=alive, other=0.0)
        child = 2 * heap + (u >= tl.exp(left)).to(tl.int64)
        heap = tl.where(inside, tl.where(left != left, 0, child), heap)
    tl.store(out + i, tl.where(heap > 0, heap - K, -1), mask=alive)


def launch(
    name: str, activation: Activation, constants: Tensor | None, scores: Tensor, *tensors: Tensor
) -> None:
    """Launch a kernel of this name; arguments as in ``dispatch.py``."""
    centers = scores if constants is None else constants
    arguments = activation_arguments(activation, constants is None)
    if name == "tree_forward":
        _launch_tree(forward_kernel, 1024, 1, arguments, scores, centers, *tensors)
    elif name == "tree_backward":
        _launch_tree(backward_kernel, 512, 2, arguments, scores, centers, *tensors)
    elif name == "path_sample":
        _launch_path(sample_kernel, arguments, scores, centers, *tensors)
    elif name == "path_forward":
        leaf, out = tensors
        _launch_path(path_kernel, arguments, scores, centers, leaf, scores, out, BACKWARD=False)
    else:
        _launch_path(path_kernel, arguments, scores, centers, *tensors, BACKWARD=True)


def _launch_tree(
    kernel: Any,
    elements: int,
    few: int,
    arguments: dict[str, Any],
    scores: Tensor,
    *tensors: Tensor,
) -> None:
    """A program takes R rows; ``elements`` of it and ``few`` warps were fastest on an H200."""
    S = scores.shape[-1]
    rows = scores.numel() // S
    if not rows:
        return
    height = (S + 1).bit_length() - 1
    P = 1 << height
    R = max(2, min(16, elements // P))  # one row alone leads Triton to a far slower layout
    while R > 4 and rows < 512 * R:  # for few rows, more programs with fewer rows each are faster
        R //= 2
    warps = min(16, few if P <= 64 else max(1, R * P // (1024 * few)))
    sizes = {"R": R, "P": P, "HEIGHT": height, "REST": S + 1 - P}
    grid = (triton.cdiv(rows, R),)
    kernel[grid](scores, *tensors, rows=rows, **arguments, **sizes, num_warps=warps)


def _launch_path(
    kernel: Any, arguments: dict[str, Any], scores: Tensor, *tensors: Tensor, **options: bool
) -> None:
    rows, S = scores.shape
    count = tensors[1].shape[0]
    if not count:
        return
    sizes = {"count": count, "rows": rows, "K": S + 1, "R": _BLOCK, "HEIGHT": S.bit_length()}
    grid = (triton.cdiv(count, _BLOCK),)
    kernel[grid](scores, *tensors, **sizes, **arguments, **options, num_warps=4)
