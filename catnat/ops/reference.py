"""Trees and sparsemax in plain torch: what the C and Triton kernels must agree with.

These functions take every device and dtype, work under ``torch.func`` and ``torch.compile``, and
are differentiable any number of times. The kernels' backward passes are here too, as functions of
the gradient, because a second derivative goes through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from catnat.splits import Split
from catnat.tree import path_sums, subtree_sums


def tree_log_probs(scores: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Log-probability of every leaf, (*, K-1) -> (*, K)."""
    return path_sums(*split.log_split(scores, constants))[1]


def tree_vjp(scores: Tensor, grad: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Gradient in the scores, (*, K-1), from the gradient in the log-probabilities, (*, K)."""
    left, right = subtree_sums(grad)
    left_slope, right_slope = split.slopes(scores, constants)
    return right * right_slope - left * left_slope


def sparsemax_probs(scores: Tensor) -> Tensor:
    """Projection of the scores onto the simplex (Martins and Astudillo, 2016), (*, K) -> (*, K).

    p_k = max(s_k - tau, 0), with tau such that the p_k sum to 1; tau is found by sorting. In
    float64, so that probabilities just above 0 keep their relative accuracy.
    """
    z = scores.double()
    z = z - z.amax(-1, keepdim=True).detach()
    ranked = z.sort(-1, descending=True).values.clamp_min(-2)  # lower ones never matter
    beyond = ranked.cumsum(-1) - 1
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (rank * ranked > beyond).sum(-1, keepdim=True)
    excess = z - beyond.gather(-1, (size - 1).clamp_min(0)) / size
    return torch.where(excess <= 0, 0.0, excess).to(scores.dtype)  # not clamp: NaN's gradient


def sparsemax_vjp(scores: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from the gradient in the log-probabilities, (*, K) -> (*, K)."""
    probs = sparsemax_probs(scores)
    support = ~(probs <= 0)
    pulled = torch.where(support, grad / torch.where(support, probs, 1.0), 0.0)
    mean = pulled.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
    return torch.where(support, pulled - mean, 0.0)
