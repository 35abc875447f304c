"""Triton kernels that read and write some rows of a matrix: what an output layer by paths needs.

Shapes: hidden (M, D), weight (S, D), nodes (M, H). All sums are in float32. A program of the first
two kernels takes one row of ``hidden`` with all its nodes.
"""

# mypy: ignore-errors
# Triton's own language, in Python's clothes.
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.ops.triton_launch import Launch


@triton.jit
def _scores_kernel(
    hidden, weight, nodes, out, H, D: tl.constexpr, P: tl.constexpr, B: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    level, column = tl.arange(0, P), tl.arange(0, B)
    inside = level < H
    node = tl.load(nodes + row * H + level, mask=inside, other=0)
    total = tl.zeros((P,), tl.float32)
    for start in range(0, D, B):
        d = start + column
        h = tl.load(hidden + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        here = inside[:, None] & (d < D)[None, :]
        w = tl.load(weight + node[:, None] * D + d[None, :], mask=here, other=0.0)
        total += tl.sum(w.to(tl.float32) * h[None, :], axis=1)
    tl.store(out + row * H + level, total, mask=inside)


@triton.jit
def _sums_kernel(weight, nodes, grad, out, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.load(out + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    for level in tl.static_range(H):  # not a tile of all nodes: its sum would cross warps
        node, g = tl.load(nodes + row * H + level), tl.load(grad + row * H + level)
        w = tl.load(weight + node * D + d, mask=d < D, other=0.0)
        total += g * w.to(tl.float32)
    tl.store(out + row * D + d, total.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _segments_kernel(hidden, grad, tokens, starts, ends, out, D, T: tl.constexpr, B: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    first, last = tl.load(starts + segment), tl.load(ends + segment)
    while first < last:  # T tokens at a time: a frequent word has thousands
        i = first + tl.arange(0, T)
        token = tl.load(tokens + i, mask=i < last, other=0)
        g = tl.load(grad + i, mask=i < last, other=0.0)
        here = (i < last)[:, None] & (d < D)[None, :]
        h = tl.load(hidden + token[:, None] * D + d[None, :], mask=here, other=0.0)
        total += tl.sum(g[:, None] * h.to(tl.float32), axis=0)
        first += T
    tl.store(out + segment * D + d, total.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["n", "step", "scale"])
def _adam_kernel(
    param,
    mean,
    square,
    rows,
    grad,
    n,
    beta1,
    beta2,
    step,
    scale,
    eps,
    D: tl.constexpr,
    B: tl.constexpr,
):
    if D == 1:  # a program takes B rows of one number each
        place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        inside = place < n
        at = tl.load(rows + place, mask=inside, other=0)
        source = grad + place
    else:
        place = tl.program_id(0).to(tl.int64)
        d = tl.program_id(1) * B + tl.arange(0, B)
        inside = d < D
        at = tl.load(rows + place) * D + d
        source = grad + place * D + d
    g = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    p -= step * m / (tl.sqrt(v) * scale + eps)
    tl.store(mean + at, m.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + at, v.to(square.dtype.element_ty), mask=inside)
    tl.store(param + at, p.to(param.dtype.element_ty), mask=inside)


def scores(hidden: Tensor, weight: Tensor, nodes: Tensor) -> Tensor:
    """``hidden @ weight[node]`` at the nodes of each row, (M, H) in float32."""
    hidden, weight, nodes = hidden.contiguous(), weight.contiguous(), nodes.contiguous()
    out = torch.empty(nodes.shape, dtype=torch.float32, device=hidden.device)
    if out.numel():
        (M, H), D = nodes.shape, hidden.shape[1]
        launch = _kept_launch(
            _scores_kernel, hidden.dtype, weight.dtype, H=H, D=D, P=_power(H), B=_block(D, 256)
        )
        launch(hidden, weight, nodes, out, programs=(M,))
    return out


def add_sums(out: Tensor, weight: Tensor, nodes: Tensor, grad: Tensor) -> None:
    """Add sum_h grad_h weight[node_h] to out, (M, D)."""
    weight, nodes, grad = weight.contiguous(), nodes.contiguous(), grad.float().contiguous()
    if nodes.numel():
        (M, H), D = nodes.shape, out.shape[1]
        B = _block(D, 1024)
        launch = _kept_launch(_sums_kernel, weight.dtype, out.dtype, H=H, D=D, B=B)
        launch(weight, nodes, grad, out, programs=(M, _pieces(D, B)))


def segment_sums(
    out: Tensor, hidden: Tensor, grad: Tensor, tokens: Tensor, starts: Tensor, ends: Tensor
) -> None:
    """Set row s of out to the sum of grad[i] hidden[tokens[i]] over i in starts[s]..ends[s]-1."""
    hidden, grad = hidden.contiguous(), grad.float().contiguous()
    if out.numel():
        D = out.shape[1]
        B = _block(D, 256)
        launch = _kept_launch(_segments_kernel, hidden.dtype, out.dtype, D=D, T=16, B=B)
        tensors = (hidden, grad, tokens, starts, ends, out)
        launch(*tensors, programs=(out.shape[0], _pieces(D, B)))


def adam_rows(tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> None:
    """As :func:`catnat.ops.adam_rows.adam_rows`, for contiguous tensors.

    Args:
        tensors: param, mean, square, rows and grad.
        numbers: the betas, step, scale and eps.
    """
    grad, n = tensors[4], tensors[3].shape[0]
    if grad.numel():
        D = grad.numel() // n
        B = 1024 if D == 1 else _block(D, 1024)
        programs = (_pieces(n, B),) if D == 1 else (n, _pieces(D, B))
        launch = _kept_launch(_adam_kernel, *(x.dtype for x in tensors), D=D, B=B)
        launch(*tensors, numbers=(n, *numbers), programs=programs)


@lru_cache(maxsize=1024)
def _kept_launch(kernel: Any, *dtypes: torch.dtype, **settings: int) -> Launch:
    """A launch for tensors of these dtypes; those of the other tensors never change."""
    return Launch(kernel, None, settings)


def _power(n: int) -> int:
    return max(2, 1 << (n - 1).bit_length())


def _block(width: int, most: int) -> int:
    return min(most, max(16, 1 << (width - 1).bit_length()))


def _pieces(n: int, size: int) -> int:
    """How many pieces of a size cover n; ``triton.cdiv`` takes 10 us."""
    return -(-n // size)
