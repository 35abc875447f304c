"""The choice between the implementations: plain torch, the C kernels, the Triton kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from catnat.numerics import floored, is_plain, largest_score, safe_log
from catnat.ops import native, reference
from catnat.splits import CustomSplit, Split

HAS_TRITON = importlib.util.find_spec("triton") is not None
TREE_TRITON_LIMIT = 32768
"""Largest K of the Triton kernels for trees: a program holds all leaves of a row in registers."""
SPARSEMAX_TRITON_LIMIT = 16384
"""Largest K of the Triton kernels for sparsemax."""
SOFTMAX_TRITON_LIMIT = 32768
"""Largest K of the Triton kernels for softmax."""
_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # not known to torch 2.6


def tree_log_probs(scores: Tensor, split: Split, constants: Tensor | None = None) -> Tensor:
    """Log-probability of every leaf, (*, K-1) -> (*, K), for float32 or float64 scores.

    Args:
        scores: one score per internal node, (*, K-1), breadth first.
        split: how a score divides the probability of its node.
        constants: ``split.node_constants`` of the nodes, or None where all are centred at 0.
    """
    fused = _tree_kernels(scores, split)
    if fused is None:
        return reference.tree_log_probs(scores, split, constants)
    out: Tensor = _TreeLogProbs.apply(scores, split, constants, fused)
    return out


def tree_fisher(scores: Tensor, split: Split, constants: Tensor | None = None) -> Tensor | None:
    """Diagonal of the Fisher matrix and, in the last column, share of flat splits.

    (*, K-1) -> (*, K), without gradient, for float32 scores; None where there is no fused kernel.
    Arguments as in :func:`tree_log_probs`.
    """
    fused = _tree_kernels(scores, split)
    if fused is None or (scores.requires_grad and torch.is_grad_enabled()):
        return None
    if fused == "triton":
        from catnat.ops import triton_tree

        return triton_tree.fisher(scores.detach(), split, constants)
    return native.tree_fisher(scores.detach(), split, constants)


def tree_log_prob(
    scores: Tensor, leaf: Tensor, split: Split, constants: Tensor | None = None
) -> Tensor:
    """Log-probability of one leaf per row, by the O(log K) nodes of its path alone.

    (*, K-1) and (*), which broadcast -> (*), for float32 or float64 scores. NaN for a leaf that
    does not exist. Other arguments as in :func:`tree_log_probs`.
    """
    shape = reference.common_shape(leaf.shape, scores.shape[:-1])
    leaf = leaf if leaf.shape == shape else leaf.expand(shape)
    fused = _path_kernels(scores, shape, split)
    if fused is None:
        return reference.tree_log_prob(scores, leaf, split, constants)
    flat, leaves = scores.reshape(-1, scores.shape[-1]), leaf.reshape(-1)
    out: Tensor = _TreeLogProb.apply(flat, leaves, split, constants, fused)
    return out.view(shape)


def tree_sample(
    scores: Tensor, uniforms: Tensor, split: Split, constants: Tensor | None = None
) -> Tensor:
    """One random leaf per row of uniforms, by the O(log K) nodes of its path alone.

    (*, K-1) and (*, H) -> (*) int64, without gradient. -1 where a score on the path is NaN. Other
    arguments as in :func:`tree_log_probs`. The uniforms are float64, independent and uniform in
    [0, 1), one for each of the H = ceil(log2 K) levels, the root's first. Their batch shape is that
    of the result, to which the batch shape of the scores is broadcast.
    """
    scores, shape = scores.detach(), uniforms.shape[:-1]
    fused = _path_kernels(scores, shape, split)
    if fused is None:
        return reference.tree_sample(scores, uniforms, split, constants)
    flat, noise = scores.reshape(-1, scores.shape[-1]), uniforms.reshape(-1, uniforms.shape[-1])
    if fused == "triton":
        from catnat.ops import triton_path

        return triton_path.sample(flat, noise, split, constants).view(shape)
    return native.tree_sample(flat, noise, split, constants).view(shape)


def tree_gradients_at(
    scores: Tensor, levels: Tensor, split: Split, constants: Tensor | None = None
) -> Tensor | None:
    """grad_s log p(c) of a leaf c for each level, by the O(log K) nodes of the leaf's path alone.

    (*, K-1) and (M, *) -> (M, *, K-1), without gradient; None where there is no fused kernel. A
    level in [0, 1) decides on the leaf, see ``CategoricalHead._gradients_at``. Other arguments as
    in :func:`tree_log_probs`.
    """
    scores, shape = scores.detach(), levels.shape
    if _path_kernels(scores, shape, split) != "native":
        return None
    out = native.tree_gradients(_rows(scores), levels.float().reshape(-1), split, constants)
    return out.view(*shape, scores.shape[-1])


def tree_observe(
    scores: Tensor, levels: Tensor, split: Split, constants: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Means of :func:`tree_fisher` and of products of :func:`tree_gradients_at`, for T steps.

    (T, B, K-1) and (M, T, B) -> (T, K) and (2, T, K-1, K-1), without gradient; None where there is
    no fused kernel. The products are outer ones, of a gradient with itself; the first mean is that
    of the first M // 2 draws, the second that of the others. Other arguments as in
    :func:`tree_log_probs`.
    """
    scores, empty = scores.detach(), 0 in levels.shape
    if empty or _path_kernels(scores, levels.shape, split) != "native":
        return None
    return native.tree_observe(scores, levels.float(), split, constants)


def flat_observe(scores: Tensor, levels: Tensor, sparse: bool) -> tuple[Tensor, Tensor] | None:
    """The same of softmax or of sparsemax, whose mean Fisher matrices are not diagonal.

    (T, B, K) and (M, T, B) -> (T, K^2 + 1) and (2, T, K, K), without gradient; None where there is
    no fused kernel, or K > 64.
    """
    scores, known = scores.detach(), 0 not in levels.shape and scores.shape[-1] <= native.WIDEST
    if not known or kernels_for(scores, 0, 0) != "native" or levels.shape[1:] != scores.shape[:-1]:
        return None
    return native.flat_observe(scores, levels.float(), sparse)


def softmax_gradients_at(scores: Tensor, levels: Tensor) -> Tensor | None:
    """The same for the categories of softmax, (*, K) and (M, *) -> (M, *, K)."""
    return _gradients_at(native.softmax_gradients, scores, levels)


def sparsemax_gradients_at(scores: Tensor, levels: Tensor) -> Tensor | None:
    """The same for the categories of sparsemax, (*, K) and (M, *) -> (M, *, K)."""
    return _gradients_at(native.sparsemax_gradients, scores, levels)


def _gradients_at(
    kernel: Callable[[Tensor, Tensor], Tensor], scores: Tensor, levels: Tensor
) -> Tensor | None:
    scores = scores.detach()
    if kernels_for(scores, 0, 0) != "native" or levels.shape[1:] != scores.shape[:-1]:
        return None
    out = kernel(_rows(scores), levels.float().reshape(-1))
    return out.view(*levels.shape, scores.shape[-1])


def sparsemax_log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities of sparsemax, (*, K) -> (*, K); at their floor outside the support."""
    fused = kernels_for(scores, scores.shape[-1], SPARSEMAX_TRITON_LIMIT)
    if fused is None:
        return safe_log(reference.sparsemax_probs(scores))
    out: Tensor = _SparsemaxLogProbs.apply(scores, fused)
    return out


def softmax_log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities of softmax, (*, K) -> (*, K), no lower than -largest_score.

    A category at that floor gets no gradient. On the CPU torch's own kernels are the fastest.
    ``torch.compile`` makes one kernel of log_softmax and the floor.
    """
    fused = kernels_for(scores, scores.shape[-1], SOFTMAX_TRITON_LIMIT)
    if fused != "triton" or torch.compiler.is_compiling():
        return floored(torch.log_softmax(scores, -1))
    out: Tensor = _SoftmaxLogProbs.apply(scores)
    return out


def kernels_for(scores: Tensor, num_categories: int, triton_limit: int) -> str | None:
    """``"triton"``, ``"native"`` (the C kernels), or None for plain torch.

    Plain torch is what torch.func, forward-mode derivatives, fake tensors, torch.jit.trace,
    torch.export, both ONNX exporters and other tracers need. ``torch.compile`` knows Triton, and
    turns the rest into kernels of its own.
    """
    if scores.dtype != torch.float32:
        return None
    plain = is_plain(scores)
    if plain and scores.is_cpu:
        return "native" if native.library() is not None else None
    on_gpu = scores.is_cuda and HAS_TRITON and num_categories <= triton_limit
    known = plain or (torch.compiler.is_compiling() and not _is_exporting())
    return "triton" if on_gpu and known else None


def _tree_kernels(scores: Tensor, split: Split) -> str | None:
    if isinstance(split, CustomSplit):  # no kernel knows its formula
        return None
    return kernels_for(scores, scores.shape[-1] + 1, TREE_TRITON_LIMIT)


def _path_kernels(scores: Tensor, shape: torch.Size, split: Split) -> str | None:
    """Kernels of paths: none for a split of one's own.

    Element i of the result belongs to row i % B of the scores, so the batch shape of the scores
    must be the end of the shape of the result.
    """
    batch = scores.shape[:-1]
    if isinstance(split, CustomSplit) or batch != shape[len(shape) - len(batch) :]:
        return None
    return kernels_for(scores, 0, 0)


def _needs_reference(grad: Tensor) -> bool:
    """Whether a backward pass must itself be plain torch: create_graph, or batched gradients."""
    if is_plain(grad):
        return torch.is_grad_enabled()
    return not torch.compiler.is_compiling()


def _rows(x: Tensor) -> Tensor:
    """x with all of its leading dimensions in one, (*, K) -> (B, K)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class _TreeLogProbs(torch.autograd.Function):
    """scores (*, K-1) -> log-probabilities (*, K), by fused kernels."""

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
        if _needs_reference(grad):
            out = reference.tree_vjp(scores, grad, ctx.split, constants)
        elif ctx.fused == "triton":
            from catnat.ops import triton_tree

            out = triton_tree.backward(scores, grad, ctx.split, constants)
        else:
            out = native.tree_backward(scores, grad, ctx.split, constants)
        return out, None, None, None


class _TreeLogProb(torch.autograd.Function):
    """scores (B, K-1) and leaves (N B) -> log-probabilities (N B), by fused kernels."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, leaf: Tensor, split: Split, constants: Tensor | None, fused: str
    ) -> Tensor:
        ctx.split, ctx.fused = split, fused
        ctx.save_for_backward(scores, leaf, constants)
        if fused == "triton":
            from catnat.ops import triton_path

            return triton_path.forward(scores, leaf, split, constants)
        return native.tree_path_forward(scores, leaf, split, constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        scores, leaf, constants = ctx.saved_tensors
        # Leaves of one row share nodes. On a GPU they are added in any order, and so rounded.
        any_order = not torch.are_deterministic_algorithms_enabled() or len(leaf) == len(scores)
        if _needs_reference(grad) or (ctx.fused == "triton" and not any_order):
            shape = (len(leaf) // max(1, len(scores)), len(scores))
            out = reference.tree_path_vjp(
                scores, leaf.view(shape), grad.view(shape), ctx.split, constants
            )
        elif ctx.fused == "triton":
            from catnat.ops import triton_path

            out = triton_path.backward(scores, leaf, grad, ctx.split, constants)
        else:
            out = native.tree_path_backward(scores, leaf, grad, ctx.split, constants)
        return out, None, None, None, None


class _SparsemaxLogProbs(torch.autograd.Function):
    """scores (*, K) -> log-probabilities (*, K), by fused kernels."""

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
        if _needs_reference(grad):
            return reference.sparsemax_vjp(scores, grad), None
        if ctx.fused == "triton":
            from catnat.ops import triton_sparsemax

            return triton_sparsemax.backward(log_probs, grad), None
        return native.sparsemax_backward(log_probs, grad), None


class _SoftmaxLogProbs(torch.autograd.Function):
    """scores (*, K) -> log-probabilities (*, K) with a floor, by fused kernels."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        from catnat.ops import triton_softmax

        log_probs = triton_softmax.forward(scores)
        ctx.save_for_backward(log_probs)
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        log_probs: Tensor = ctx.saved_tensors[0]
        if _needs_reference(grad):  # a derivative of log_probs comes back to this method
            grad = torch.where(log_probs <= -largest_score(grad.dtype), 0.0, grad)
            return grad - log_probs.exp() * grad.sum(-1, keepdim=True)
        from catnat.ops import triton_softmax

        return triton_softmax.backward(log_probs, grad)
