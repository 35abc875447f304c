"""Fused Triton kernels for sparsemax and softmax, one forward and one backward. CUDA, float32."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.numerics import LOG_ZERO, largest_score

_LOG_ZERO = tl.constexpr(LOG_ZERO)
_LOWEST = tl.constexpr(-largest_score(torch.float32))
_OVERFLOWS = tl.constexpr(-1e30)  # a difference of scores overflows only below this


@triton.jit
def _places(rows, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Valid rows and valid entries of a program, and their places in memory."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, P)
    exists = (row < rows)[:, None]
    return exists, exists & (column < K)[None, :], row[:, None] * K + column[None, :]


@triton.jit(do_not_specialize=["rows"])
def sparsemax_forward(scores, out, rows, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Newton's method on sum_k max(s_k - tau, 0) = 1, in float64."""
    exists, inside, offset = _places(rows, K, R, P)
    s = tl.load(scores + offset, mask=inside, other=float("-inf"))
    s = tl.where(exists, s, 0.0)
    top = tl.max(s, axis=1)[:, None]
    broken = tl.sum((s != s).to(tl.int32), axis=1)[:, None] > 0
    broken = broken | (tl.abs(top) == float("inf"))
    z = tl.where(broken, 0.0, s.to(tl.float64) - top.to(tl.float64))
    # Triton 3.6 compiles a while loop only if all of its variables are read in and after it.
    tau = tl.full((R, 1), -1.0, tl.float64)
    size = tl.zeros((R, 1), tl.float32)
    changed = 1
    while changed > 0:
        active = tl.sum((z > tau).to(tl.float32), axis=1)[:, None]
        total = tl.sum(tl.maximum(z - tau, 0.0), axis=1)[:, None]
        different = (active != size) & (changed > 0)
        tau += tl.where(different, (total - 1.0) / active.to(tl.float64), 0.0)
        changed = tl.sum(different.to(tl.int32))
        size = active
    broken = broken | (size < changed)
    p = (z - tau).to(tl.float32)
    log_p = tl.where(p > 0, tl.log(tl.where(p > 0, p, 1.0)), _LOG_ZERO)
    tl.store(out + offset, tl.where(broken, float("nan"), log_p), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sparsemax_backward(
    log_probs, grad, out, rows, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr
):
    """With g = grad / p on the support: g minus its mean there, 0 elsewhere."""
    _, inside, offset = _places(rows, K, R, P)
    log_p = tl.load(log_probs + offset, mask=inside, other=_LOG_ZERO)
    support = (log_p <= _LOG_ZERO) == 0
    g = tl.load(grad + offset, mask=inside, other=0.0)
    g = tl.where(support, g * tl.exp(tl.where(support, -log_p, 0.0)), 0.0)
    size = tl.maximum(tl.sum(support.to(tl.float32), axis=1), 1.0)
    mean = (tl.sum(g, axis=1) / size)[:, None]
    tl.store(out + offset, tl.where(support, g - mean, 0.0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def softmax_forward(scores, out, rows, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """s - max s - log sum exp(s - max s) with the floors of ``numerics.floored``."""
    _, inside, offset = _places(rows, K, R, P)
    s = tl.load(scores + offset, mask=inside, other=float("-inf"))
    z = s - tl.max(s, axis=1)[:, None]
    log_p = z - tl.log(tl.sum(tl.exp(z), axis=1))[:, None]
    low = tl.where(log_p == float("-inf"), _LOG_ZERO, _LOWEST)
    tl.store(out + offset, tl.where(log_p < _LOWEST, low, log_p), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def softmax_backward(
    scores, log_probs, grad, out, rows, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr
):
    """g - p sum g, where g is the gradient above the floor and 0 at the floor."""
    _, inside, offset = _places(rows, K, R, P)
    s = tl.load(scores + offset, mask=inside, other=float("-inf"))
    log_p = tl.load(log_probs + offset, mask=inside, other=_LOWEST)
    g = tl.load(grad + offset, mask=inside, other=0.0)
    impossible = (log_p == _LOG_ZERO) & (s < _OVERFLOWS)
    g = tl.where((log_p <= _LOWEST) | impossible, 0.0, g)
    tl.store(out + offset, g - tl.exp(log_p) * tl.sum(g, axis=1)[:, None], mask=inside)


def launch(kernel: Any, *tensors: Tensor) -> None:
    """Launch a kernel; a program holds R rows, each padded to the next power of two."""
    K = tensors[0].shape[-1]
    rows = tensors[0].numel() // K
    if not rows:
        return
    P = triton.next_power_of_2(K)
    R = max(1, (1024 if P <= 64 else 512) // P)
    warps = 4 if P <= 64 else min(16, max(1, R * P // 512))
    kernel[(triton.cdiv(rows, R),)](*tensors, rows=rows, K=K, R=R, P=P, num_warps=warps)
