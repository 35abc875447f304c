"""Fused Triton kernels for the tree: forward, backward and Fisher diagonal. CUDA, float32.

A program takes R rows and walks their trees level by level in registers. Going down, the two
children of every node are interleaved into the next level; going up, neighbors are split off and
added. Only the scores are kept for the backward pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.activations import Activation
from catnat.kernels.triton_activations import (
    _information,
    _log_activation,
    _slopes,
    activation_constants,
    activation_numbers,
    on_device_of,
)


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
    NATURAL: tl.constexpr,  # see triton_activations
    CENTERED: tl.constexpr,
):
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
        left, right = _log_activation(loaded[level], node, *known, node < S, NATURAL, CENTERED)
        here = tl.interleave(here + left, here + right)
    if REST == 0:
        tl.store(target + tl.arange(0, P)[None, :], here, mask=alive)
    else:
        i = tl.arange(0, P)
        deep = i < REST
        node = P - 1 + i
        s = tl.load(source + node[None, :], mask=alive & deep[None, :], other=0.0)
        left, right = _log_activation(s, node, *known, deep, NATURAL, CENTERED)
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
    CENTERED: tl.constexpr,
):
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
        left, right = _slopes(s, node, *known, deep, NATURAL, CENTERED)
        pair = leaf + (P - REST + 2 * i)[None, :]
        a = tl.load(pair, mask=both, other=0.0)
        b = tl.load(pair + 1, mask=both, other=0.0)
        tl.store(target + node[None, :], b * right - a * left, mask=both)
        shallow = alive & (i >= REST)[None, :]
        here = a + b + tl.load(leaf + (i - REST)[None, :], mask=shallow, other=0.0)
    loaded = _load_levels(source, alive, HEIGHT)
    for level in tl.static_range(HEIGHT - 1, -1, -1):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        left, right = _slopes(loaded[level], node, *known, node < S, NATURAL, CENTERED)
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
    CENTERED: tl.constexpr,
):
    K: tl.constexpr = P + REST
    S: tl.constexpr = K - 1
    known = (constants, S, rate, high, low, joint, slope, edge)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = (row < rows)[:, None]
    source = scores + row[:, None] * S
    target = out + row[:, None] * K
    here = tl.zeros((R, 1), tl.float32)
    count = tl.zeros((R,), tl.float32)
    loaded = _load_levels(source, alive, HEIGHT)
    for level in tl.static_range(HEIGHT):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        information, flat = _information(loaded[level], node, *known, node < S, NATURAL, CENTERED)
        tl.store(target + node[None, :], tl.exp(here) * information, mask=alive)
        count += tl.sum(flat, 1)
        left, right = _log_activation(loaded[level], node, *known, node < S, NATURAL, CENTERED)
        here = tl.interleave(here + left, here + right)
    if REST > 0:
        i = tl.arange(0, P)
        deep = i < REST
        node = P - 1 + i
        both = alive & deep[None, :]
        s = tl.load(source + node[None, :], mask=both, other=0.0)
        information, flat = _information(s, node, *known, deep, NATURAL, CENTERED)
        tl.store(target + node[None, :], tl.exp(here) * information, mask=both)
        count += tl.sum(tl.where(both, flat, 0.0), 1)
    tl.store(target + S, count[:, None] / S, mask=alive)


def forward(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Log-probabilities of the leaves, (*, K-1) -> (*, K)."""
    return _from_scores("forward", scores, activation, constants)


def fisher(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Fisher diagonal and, in the last column, share of flat activations, (*, K-1) -> (*, K)."""
    return _from_scores("fisher", scores, activation, constants)


def _from_scores(
    name: str, scores: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    scores = scores.contiguous()
    *batch, S = scores.shape
    out = scores.new_empty((*batch, S + 1))
    given = scores if constants is None else constants
    _launch(name, out.numel() // (S + 1), S + 1, activation, constants is None, scores, given, out)
    return out


def backward(
    scores: Tensor, grad: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Gradient in the scores, (*, K-1), from that in the log-probabilities, (*, K)."""
    scores, grad = scores.contiguous(), grad.contiguous()
    out = torch.empty_like(scores)
    K = grad.shape[-1]
    given = scores if constants is None else constants
    _launch(
        "backward", grad.numel() // K, K, activation, constants is None, scores, given, grad, out
    )
    return out


# Kernels, with the elements and the warps of a program that were fastest on an H200.
_KERNELS = {
    "forward": (_forward_kernel, 1024, 1),
    "fisher": (_fisher_kernel, 1024, 1),
    "backward": (_backward_kernel, 512, 2),
}


def _launch(
    name: str, rows: int, K: int, activation: Activation, centered: bool, *tensors: Tensor
) -> None:
    if not rows:
        return
    kernel, elements, small_warps = _KERNELS[name]
    programs, settings = _settings(rows, K, activation, centered, elements, small_warps)
    with on_device_of(tensors[0]):
        kernel[(programs,)](*tensors, **settings)


def _settings(
    rows: int, K: int, activation: Activation, centered: bool, elements: int, small_warps: int
) -> tuple[int, dict[str, int | float | bool]]:
    """Number of programs, and the arguments of a kernel after its tensors."""
    height = K.bit_length() - 1
    P = 1 << height
    R = max(2, min(16, elements // P))  # one row alone leads Triton to a far slower layout
    while R > 4 and rows < 512 * R:  # for few rows, more programs with fewer rows each are faster
        R //= 2
    warps = min(16, small_warps if P <= 64 else max(1, R * P // (1024 * small_warps)))
    return triton.cdiv(rows, R), {
        "rows": rows,
        **activation_numbers(activation),
        "R": R,
        "P": P,
        "HEIGHT": height,
        "REST": K - P,
        **activation_constants(activation, centered),
        "num_warps": warps,
    }
