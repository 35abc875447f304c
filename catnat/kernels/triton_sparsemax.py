"""Fused Triton kernels for sparsemax: one forward, one backward. CUDA, float32."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.kernels.triton_activations import on_device_of
from catnat.numerics import LOG_ZERO

_LOG_ZERO = tl.constexpr(LOG_ZERO)


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(scores, out, rows, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Newton's method on sum_k max(s_k - tau, 0) = 1, in float32, then exactly in float64."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, P)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    offset = row[:, None] * K + column[None, :]
    s = tl.load(scores + offset, mask=inside, other=float("-inf"))
    s = tl.where((row < rows)[:, None], s, 0.0)
    top = tl.max(s, axis=1)[:, None]
    z = s - top
    broken = tl.sum((s != s).to(tl.int32), axis=1)[:, None] > 0
    broken = broken | (tl.abs(top) == float("inf"))
    z = tl.where(broken, 0.0, z)
    top = tl.where(broken, 0.0, top)
    # Triton 3.6 compiles a while loop only if all it carries is read in it and after it.
    tau = tl.full((R, 1), -1.0, tl.float32)
    size = tl.zeros((R, 1), tl.float32)
    changed = 1
    while changed > 0:
        active = tl.sum((z > tau).to(tl.float32), axis=1)[:, None]
        total = tl.sum(tl.maximum(z - tau, 0.0), axis=1)[:, None]
        step = tl.maximum((total - 1.0) / active, 0.0)
        tau += tl.where(changed > 0, step, 0.0)
        changed = tl.sum((active != size).to(tl.int32))
        size = active
    wide = tl.where(broken, 0.0, s.to(tl.float64) - top.to(tl.float64))
    exact = tl.minimum(tau, -1.0 / K).to(tl.float64)
    size = 0.0 - size
    changed += 1
    while changed > 0:
        active = tl.sum((wide > exact).to(tl.float32), axis=1)[:, None]
        total = tl.sum(tl.maximum(wide - exact, 0.0), axis=1)[:, None]
        different = (active != size) & (changed > 0)
        exact += tl.where(different, (total - 1.0) / active.to(tl.float64), 0.0)
        changed = tl.sum(different.to(tl.int32))
        size = active
    broken = broken | (size < changed)
    p = (wide - exact).to(tl.float32)
    log_p = tl.where(p > 0, tl.log(tl.where(p > 0, p, 1.0)), _LOG_ZERO)
    tl.store(out + offset, tl.where(broken, float("nan"), log_p), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(log_probs, grad, out, rows, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """With g = grad / p on the support: g minus its mean there, 0 elsewhere."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, P)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    offset = row[:, None] * K + column[None, :]
    log_p = tl.load(log_probs + offset, mask=inside, other=_LOG_ZERO)
    support = (log_p <= _LOG_ZERO) == 0
    g = tl.load(grad + offset, mask=inside, other=0.0)
    g = tl.where(support, g * tl.exp(tl.where(support, -log_p, 0.0)), 0.0)
    size = tl.maximum(tl.sum(support.to(tl.float32), axis=1), 1.0)
    mean = (tl.sum(g, axis=1) / size)[:, None]
    tl.store(out + offset, tl.where(support, g - mean, 0.0), mask=inside)


def forward(scores: Tensor) -> Tensor:
    """Log-probabilities, (*, K) -> (*, K)."""
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    _launch(_forward_kernel, scores, out)
    return out


def backward(log_probs: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from that in the log-probabilities, (*, K) -> (*, K)."""
    grad = grad.contiguous()
    out = torch.empty_like(grad)
    _launch(_backward_kernel, log_probs, grad, out)
    return out


def _launch(kernel: Any, *tensors: Tensor) -> None:
    """A program holds R whole rows, each in the least power of two P >= K."""
    K = tensors[0].shape[-1]
    rows = tensors[0].numel() // K
    if not rows:
        return
    P = triton.next_power_of_2(K)
    R = max(1, (1024 if P <= 64 else 512) // P)
    warps = 4 if P <= 64 else min(16, max(1, R * P // 512))
    with on_device_of(tensors[0]):
        kernel[(triton.cdiv(rows, R),)](*tensors, rows=rows, K=K, R=R, P=P, num_warps=warps)
