"""Log-probabilities of the leaves of a tree of binary splits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from catnat.ops import native
from catnat.ops.dispatch import backend, differentiable
from catnat.splits import CustomSplit, Split
from catnat.tree import path_sums, subtree_sums

TRITON_LIMIT = 32768
"""Largest K the Triton kernels take: one program holds all leaves of a row in registers."""


def tree_log_probs(scores: Tensor, split: Split, constants: Tensor | None = None) -> Tensor:
    """Log-probability of every leaf, (*, K-1) -> (*, K), for float32 or float64 scores.

    Args:
        scores: one score per internal node, (*, K-1), breadth first.
        split: how a score divides the probability of its node.
        constants: ``split.node_constants`` of the nodes, or None where all are centred at 0.
    """
    K = scores.shape[-1] + 1
    fused = None if isinstance(split, CustomSplit) else backend(scores, K, TRITON_LIMIT)
    if fused is None:
        return reference_log_probs(scores, split, constants)
    flat = scores.reshape(-1, K - 1)
    out: Tensor = _TreeLogProbs.apply(flat, split, constants, fused)
    return out.view(*scores.shape[:-1], K)


def reference_log_probs(scores: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """:func:`tree_log_probs` in plain differentiable torch."""
    return path_sums(*split.log_split(scores, constants))[1]


def tree_fisher(scores: Tensor, split: Split, constants: Tensor | None = None) -> Tensor | None:
    """Diagonal of the Fisher matrix and, in the last column, share of flat splits.

    (*, K-1) -> (*, K), without gradient, for float32 scores; None where there is no fused kernel.
    Arguments as in :func:`tree_log_probs`.
    """
    K = scores.shape[-1] + 1
    fused = None if isinstance(split, CustomSplit) else backend(scores, K, TRITON_LIMIT)
    if fused is None or (scores.requires_grad and torch.is_grad_enabled()):
        return None
    flat = scores.detach().reshape(-1, K - 1)
    if fused == "triton":
        from catnat.ops import triton_tree

        out = triton_tree.fisher(flat, split, constants)
    else:
        out = native.tree_fisher(flat, split, constants)
    return out.view(*scores.shape[:-1], K)


def reference_vjp(scores: Tensor, grad: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Gradient in the scores from the gradient in the log-probabilities, differentiable again."""
    left, right = subtree_sums(grad)
    left_slope, right_slope = split.slopes(scores, constants)
    return right * right_slope - left * left_slope


class _TreeLogProbs(torch.autograd.Function):
    """scores (B, K-1) -> log-probabilities (B, K), by fused kernels."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, split: Split, constants: Tensor | None, fused: str
    ) -> Tensor:
        ctx.split, ctx.fused = split, fused
        ctx.save_for_backward(scores, constants)
        if fused == "triton":
            from catnat.ops import triton_tree

            return triton_tree.forward(scores, split, constants)
        return native.tree_forward(scores, split, constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        scores, constants = ctx.saved_tensors
        if differentiable(grad):
            out = reference_vjp(scores, grad, ctx.split, constants)
        elif ctx.fused == "triton":
            from catnat.ops import triton_tree

            out = triton_tree.backward(scores, grad, ctx.split, constants)
        else:
            out = native.tree_backward(scores, grad, ctx.split, constants)
        return out, None, None, None
