"""The choice between the implementations: plain torch, the C kernels, the Triton kernels."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from catnat.activations import Activation, CustomActivation
from catnat.kernels import cpu, reference
from catnat.numerics import common_shape, is_plain, safe_log

HAS_TRITON = importlib.util.find_spec("triton") is not None
TREE_TRITON_LIMIT = 32768
"""Largest K of the Triton kernels for trees: a program holds all leaves of a row in registers."""
SPARSEMAX_TRITON_LIMIT = 16384
"""Largest K of the Triton kernels for sparsemax."""
_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # not known to torch 2.6


def tree_log_probs(
    scores: Tensor, activation: Activation, constants: Tensor | None = None
) -> Tensor:
    """Log-probability of every leaf, (*, K-1) -> (*, K), for float32 or float64 scores.

    Args:
        scores: one score per internal node, (*, K-1), breadth first.
        activation: how a score divides the probability of its node.
        constants: ``activation.node_constants`` of the nodes; None where all centers are 0.
    """
    fused = _tree_kernels(scores, activation)
    if fused is None:
        return reference.tree_log_probs(scores, activation, constants)
    out: Tensor = _TreeLogProbs.apply(scores, activation, constants, fused)
    return out


def tree_fisher(
    scores: Tensor, activation: Activation, constants: Tensor | None = None
) -> Tensor | None:
    """Diagonal of the Fisher matrix and, in the last column, share of flat activations.

    (*, K-1) -> (*, K), without gradient, for float32 scores; None where there is no fused kernel.
    Arguments as in :func:`tree_log_probs`.
    """
    fused = _tree_kernels(scores, activation)
    if fused is None or (scores.requires_grad and torch.is_grad_enabled()):
        return None
    out: Tensor = _kernels(fused).tree_fisher(scores.detach(), activation, constants)
    return out


def tree_log_prob(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None = None
) -> Tensor:
    """Log-probability of one leaf per row, by the O(log K) nodes of its path alone.

    (*, K-1) and (*), which broadcast -> (*), for float32 or float64 scores. NaN for a leaf that
    does not exist. Other arguments as in :func:`tree_log_probs`.
    """
    shape = common_shape(leaf.shape, scores.shape[:-1])
    leaf = leaf if leaf.shape == shape else leaf.expand(shape)
    fused = _path_kernels(scores, shape, activation)
    if fused is None:
        return reference.tree_log_prob(scores, leaf, activation, constants)
    flat, leaves = scores.reshape(-1, scores.shape[-1]), leaf.reshape(-1)
    out: Tensor = _TreeLogProb.apply(flat, leaves, activation, constants, fused)
    return out.view(shape)


def tree_sample(
    scores: Tensor, uniforms: Tensor, activation: Activation, constants: Tensor | None = None
) -> Tensor:
    """One random leaf per row of uniforms, by the O(log K) nodes of its path alone.

    (*, K-1) and (*, H) -> (*) int64, without gradient. -1 where a score on the path is NaN. Other
    arguments as in :func:`tree_log_probs`. The uniforms are float64, independent and uniform in
    [0, 1), one for each of the H = ceil(log2 K) levels, the root's first. Their batch shape is that
    of the result, to which the batch shape of the scores is broadcast.
    """
    scores, shape = scores.detach(), uniforms.shape[:-1]
    fused = _path_kernels(scores, shape, activation)
    if fused is None:
        return reference.tree_sample(scores, uniforms, activation, constants)
    flat, noise = scores.reshape(-1, scores.shape[-1]), uniforms.reshape(-1, uniforms.shape[-1])
    out: Tensor = _kernels(fused).path_sample(flat, noise, activation, constants)
    return out.view(shape)


def sparsemax_log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities of sparsemax, (*, K) -> (*, K); at their floor outside the support."""
    fused = kernels_for(scores, scores.shape[-1], SPARSEMAX_TRITON_LIMIT)
    if fused is None:
        return safe_log(reference.sparsemax_probs(scores))
    out: Tensor = _SparsemaxLogProbs.apply(scores, fused)
    return out


def kernels_for(scores: Tensor, num_categories: int, triton_limit: int) -> str | None:
    """``"triton"``, ``"cpu"`` (the C kernels), or None for plain torch.

    Plain torch is what torch.func, forward-mode derivatives, fake tensors, torch.jit.trace,
    torch.export, both ONNX exporters and other tracers need. ``torch.compile`` knows Triton, and
    turns the rest into kernels of its own.
    """
    if scores.dtype != torch.float32:
        return None
    plain = is_plain(scores)
    if plain and scores.is_cpu:
        return "cpu" if cpu.library() is not None else None
    on_gpu = scores.is_cuda and HAS_TRITON and num_categories <= triton_limit
    known = plain or (torch.compiler.is_compiling() and not _is_exporting())
    return "triton" if on_gpu and known else None


def _kernels(fused: str) -> Any:
    """The module of the C kernels or of the Triton kernels; both have the same functions."""
    if fused == "cpu":
        return cpu
    from catnat.kernels import triton_heads

    return triton_heads


def _tree_kernels(scores: Tensor, activation: Activation) -> str | None:
    if isinstance(activation, CustomActivation):  # no kernel knows its formula
        return None
    return kernels_for(scores, scores.shape[-1] + 1, TREE_TRITON_LIMIT)


def _path_kernels(scores: Tensor, shape: torch.Size, activation: Activation) -> str | None:
    """Kernels of paths: none for a custom activation.

    Element i of the result belongs to row i % B of the scores, so the batch shape of the scores
    must be the end of the shape of the result.
    """
    batch = scores.shape[:-1]
    if isinstance(activation, CustomActivation) or batch != shape[len(shape) - len(batch) :]:
        return None
    return kernels_for(scores, 0, 0)


def _needs_reference(grad: Tensor) -> bool:
    """Whether a backward pass must itself be plain torch: create_graph, or batched gradients."""
    if is_plain(grad):
        return torch.is_grad_enabled()
    return not torch.compiler.is_compiling()


class _TreeLogProbs(torch.autograd.Function):
    """scores (*, K-1) -> log-probabilities (*, K), by fused kernels."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, activation: Activation, constants: Tensor | None, fused: str
    ) -> Tensor:
        ctx.activation, ctx.fused = activation, fused
        ctx.save_for_backward(scores, constants)
        out: Tensor = _kernels(fused).tree_forward(scores, activation, constants)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        scores, constants = ctx.saved_tensors
        plainly = _needs_reference(grad)
        pull = reference.tree_vjp if plainly else _kernels(ctx.fused).tree_backward
        return pull(scores, grad, ctx.activation, constants), None, None, None


class _TreeLogProb(torch.autograd.Function):
    """scores (B, K-1) and leaves (N B) -> log-probabilities (N B), by fused kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        leaf: Tensor,
        activation: Activation,
        constants: Tensor | None,
        fused: str,
    ) -> Tensor:
        ctx.activation, ctx.fused = activation, fused
        ctx.save_for_backward(scores, leaf, constants)
        out: Tensor = _kernels(fused).path_forward(scores, leaf, activation, constants)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        scores, leaf, constants = ctx.saved_tensors
        # Leaves of one row share nodes. On a GPU they are added in any order, and so rounded.
        any_order = not torch.are_deterministic_algorithms_enabled() or len(leaf) == len(scores)
        if _needs_reference(grad) or (ctx.fused == "triton" and not any_order):
            shape = (len(leaf) // max(1, len(scores)), len(scores))
            out = reference.tree_path_vjp(
                scores, leaf.view(shape), grad.view(shape), ctx.activation, constants
            )
        else:
            pull = _kernels(ctx.fused).path_backward
            out = pull(scores, leaf, grad, ctx.activation, constants)
        return out, None, None, None, None


class _SparsemaxLogProbs(torch.autograd.Function):
    """scores (*, K) -> log-probabilities (*, K), by fused kernels."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, fused: str) -> Tensor:
        ctx.fused = fused
        log_probs: Tensor = _kernels(fused).sparsemax_forward(scores)
        ctx.save_for_backward(log_probs)
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (log_probs,) = ctx.saved_tensors
        plainly = _needs_reference(grad)  # a derivative of log_probs comes back to this method
        pull = reference.sparsemax_vjp if plainly else _kernels(ctx.fused).sparsemax_backward
        return pull(log_probs, grad), None
