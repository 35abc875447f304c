"""Fused Triton kernels for softmax with a floor: one forward, one backward. CUDA, float32."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.numerics import largest_score
from catnat.ops.triton_launch import Launch, row_settings

_LOWEST = tl.constexpr(-largest_score(torch.float32))


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(scores, out, rows, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """s - max s - log sum exp(s - max s), no lower than the floor; NaN stays NaN."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, P)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    offset = row[:, None] * K + column[None, :]
    s = tl.load(scores + offset, mask=inside, other=float("-inf"))
    z = s - tl.max(s, axis=1)[:, None]
    log_p = z - tl.log(tl.sum(tl.exp(z), axis=1))[:, None]
    tl.store(out + offset, tl.where(log_p < _LOWEST, _LOWEST, log_p), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(log_probs, grad, out, rows, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """g - p sum g, where g is the gradient above the floor and 0 at the floor."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, P)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    offset = row[:, None] * K + column[None, :]
    log_p = tl.load(log_probs + offset, mask=inside, other=_LOWEST)
    g = tl.load(grad + offset, mask=inside, other=0.0)
    g = tl.where(log_p <= _LOWEST, 0.0, g)
    tl.store(out + offset, g - tl.exp(log_p) * tl.sum(g, axis=1)[:, None], mask=inside)


def forward(scores: Tensor) -> Tensor:
    """Log-probabilities, (*, K) -> (*, K)."""
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    _launch("forward", scores, out)
    return out


def backward(log_probs: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from that in the log-probabilities, (*, K) -> (*, K)."""
    grad = grad.contiguous()
    out = torch.empty_like(grad)
    _launch("backward", log_probs, grad, out)
    return out


_KERNELS = {"forward": _forward_kernel, "backward": _backward_kernel}


def _launch(name: str, *tensors: Tensor) -> None:
    K = tensors[0].shape[-1]
    rows = tensors[0].numel() // K
    if rows:
        _kept_launch(name, rows, K)(*tensors)


@lru_cache(maxsize=1024)
def _kept_launch(name: str, rows: int, K: int) -> Launch:
    return Launch(_KERNELS[name], *row_settings(rows, K, most_warps=32))
