"""Sparsemax: the Euclidean projection of the scores onto the simplex (Martins & Astudillo 2016).

p_k = max(s_k - tau, 0) with tau such that they sum to 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from catnat.numerics import safe_log
from catnat.ops import native
from catnat.ops.dispatch import backend, differentiable

TRITON_LIMIT = 16384
"""Largest K the Triton kernels take."""


def sparsemax_log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities, (*, K) -> (*, K); at their floor outside the support."""
    K = scores.shape[-1]
    fused = backend(scores, K, TRITON_LIMIT)
    if fused is None:
        return safe_log(reference_probs(scores))
    out: Tensor = _SparsemaxLogProbs.apply(scores.reshape(-1, K), fused)
    return out.view(scores.shape)


def reference_probs(scores: Tensor) -> Tensor:
    """Sparsemax by sorting, in plain differentiable torch.

    In float64, so that probabilities just above 0 keep their relative accuracy.
    """
    z = scores.double()
    z = z - z.amax(-1, keepdim=True).detach()
    ranked = z.sort(-1, descending=True).values.clamp_min(-2)  # lower ones never matter
    beyond = ranked.cumsum(-1) - 1
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (rank * ranked > beyond).sum(-1, keepdim=True)
    excess = z - beyond.gather(-1, (size - 1).clamp_min(0)) / size
    return torch.where(excess <= 0, 0.0, excess).to(scores.dtype)  # not clamp: NaN's gradient


def reference_vjp(scores: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from the gradient in the log-probabilities, differentiable again."""
    probs = reference_probs(scores)
    support = ~(probs <= 0)
    pulled = torch.where(support, grad / torch.where(support, probs, 1.0), 0.0)
    mean = pulled.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
    return torch.where(support, pulled - mean, 0.0)


class _SparsemaxLogProbs(torch.autograd.Function):
    """scores (B, K) -> log-probabilities (B, K), by fused kernels."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, fused: str) -> Tensor:
        ctx.fused = fused
        if fused == "triton":
            from catnat.ops import triton_sparsemax

            log_probs = triton_sparsemax.forward(scores)
        else:
            log_probs = native.sparsemax_forward(scores)
        ctx.save_for_backward(scores, log_probs)
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scores, log_probs = ctx.saved_tensors
        if differentiable(grad):
            return reference_vjp(scores, grad), None
        if ctx.fused == "triton":
            from catnat.ops import triton_sparsemax

            return triton_sparsemax.backward(log_probs, grad), None
        return native.sparsemax_backward(log_probs, grad), None
