"""Scores of an output layer along paths: for each row of ``hidden``, some rows of the weight.

:func:`path_scores` is one matmul for the nodes near the root, which every path shares, and gathered
rows below. Three implementations agree to rounding: plain torch (any device and dtype, torch.func,
torch.compile), the same with a backward pass of its own, whose gradient is made of the rows in use
alone, and fused kernels: in C on the CPU in float32, in Triton on CUDA.
"""

from __future__ import annotations

import ctypes
import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from catnat.numerics import at_least_float32, is_plain
from catnat.ops import native
from catnat.ops.dispatch import HAS_TRITON
from catnat.ops.known_rows import sparse_gradient
from catnat.splits import NaturalSplit, SigmoidSplit, Split

_CHUNK = 2**24
"""Largest number of gathered weights that are held at once."""
_PARALLEL = 2**18
"""Number of products from which on a C kernel uses as many threads as torch."""


def path_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, nodes: Tensor, upper: int, sparse: bool
) -> Tensor:
    """``(hidden @ weight.T + bias)`` at the nodes of each row, in float32 or float64.

    Args:
        hidden: (M, D).
        weight: (S, D), a row for each node.
        bias: (S,), or None.
        nodes: indices (M, H); the nodes of one row differ, or have no gradient.
        upper: number of columns of ``nodes`` whose nodes are the first ``2^upper - 1``.
        sparse: whether the gradients of weight and bias are sparse tensors with the rows in use.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        if sparse:
            apart: Tensor = _apart(hidden, weight, bias, nodes, upper)
            return apart
        if not all(map(is_plain, (hidden, weight, nodes))):
            return _in_plain_torch(hidden, weight, bias, nodes, upper)
        out: Tensor = _PathScores.apply(hidden, weight, bias, nodes, upper, sparse)
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apart(*arguments: Any) -> Tensor:
    """With sparse gradients, and apart from a compiled graph, which knows none."""
    out: Tensor = _PathScores.apply(*arguments, True)
    return out


def _in_plain_torch(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, nodes: Tensor, upper: int
) -> Tensor:
    """The scores (M, H), differentiable any number of times."""
    n = min(2**upper - 1, weight.shape[0])
    near = F.linear(hidden, weight[:n].to(hidden.dtype))
    near = at_least_float32(near).gather(1, nodes[:, :upper])
    rows = weight[nodes[:, upper:]].to(hidden.dtype)  # (M, L, D)
    far = at_least_float32(torch.bmm(rows, hidden[:, :, None])[:, :, 0])
    scores = torch.cat((near, far), 1)
    return scores if bias is None else scores + bias[nodes].to(scores.dtype)


class _PathScores(torch.autograd.Function):
    """Scores whose backward pass reads and writes the rows in use alone."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        nodes: Tensor,
        upper: int,
        sparse: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, nodes)
        ctx.upper, ctx.sparse = upper, sparse
        if _has_kernels(hidden, weight, bias):
            return _native_scores(hidden, weight, bias, nodes)
        if not _has_triton(hidden, weight):
            size = _rows_at_once(nodes.shape[1] - upper, hidden.shape[1])
            pieces = zip(hidden.split(size), nodes.split(size), strict=True)
            return torch.cat([_in_plain_torch(h, weight, bias, n, upper) for h, n in pieces])
        from catnat.ops import triton_rows

        near = _in_plain_torch(hidden, weight, None, nodes[:, :upper], upper)
        scores = torch.cat((near, triton_rows.scores(hidden, weight, nodes[:, upper:])), 1)
        return scores if bias is None else scores + bias[nodes].to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, nodes = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of the gradient is wanted
            return *_differentiable_backward(hidden, weight, bias, nodes, grad), None, None, None
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = of_weight = of_bias = None
        if wants_hidden:
            of_hidden = _grad_of_hidden(hidden, weight, nodes, grad, ctx.upper)
        if not (wants_weight or wants_bias):
            return of_hidden, None, None, None, None, None
        if ctx.sparse or _has_kernels(hidden, weight, grad):
            rows, of_weight, of_bias = _grad_of_rows(hidden, weight, nodes, grad, ctx.upper)
            place = sparse_gradient if ctx.sparse else _as_dense
            of_weight = place(rows, of_weight, weight) if wants_weight else None
            of_bias = place(rows, of_bias, bias) if wants_bias else None
        else:
            of_weight, of_bias = _grad_of_all_rows(hidden, weight, nodes, grad, ctx.upper)
            of_bias = of_bias.to(bias.dtype) if wants_bias else None
        return of_hidden, of_weight if wants_weight else None, of_bias, None, None, None


def _rows_at_once(levels: int, width: int) -> int:
    return max(1, _CHUNK // max(1, levels * width))


def _grad_of_hidden(
    hidden: Tensor, weight: Tensor, nodes: Tensor, grad: Tensor, upper: int
) -> Tensor:
    """sum_h grad_h weight[node_h], (M, D)."""
    if _has_kernels(hidden, weight, grad):
        return _native_grad_of_hidden(weight, nodes, grad)
    near = _narrowed(_spread(grad, nodes, upper, weight), hidden.dtype)
    out = near @ weight[: near.shape[1]].to(hidden.dtype)
    if _has_triton(hidden, weight):
        from catnat.ops import triton_rows

        triton_rows.add_sums(out, weight, nodes[:, upper:], grad[:, upper:])
        return out
    narrow, size = _narrowed(grad, hidden.dtype), _rows_at_once(nodes.shape[1] - upper, len(out.T))
    for piece, g, n in zip(out.split(size), narrow.split(size), nodes.split(size), strict=True):
        rows = weight[n[:, upper:]].to(hidden.dtype)
        piece += torch.bmm(g[:, None, upper:], rows)[:, 0]
    return out


def _grad_of_rows(
    hidden: Tensor, weight: Tensor, nodes: Tensor, grad: Tensor, upper: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending indices of rows, the gradient in these rows of the weight, and in their biases."""
    if _has_kernels(hidden, weight, grad):
        return _native_grad_of_rows(hidden, nodes, grad)
    near = _spread(grad, nodes, upper, weight)
    n, below = near.shape[1], nodes[:, upper:].flatten()
    ranked, pairs = below.sort()
    rows, counts = torch.unique_consecutive(ranked, return_counts=True)
    ends = counts.cumsum(0)
    starts = ends - counts
    if n and len(rows) and int(rows[0]) < n:  # paths that end early name the root, with gradient 0
        rows, starts, ends = rows[1:], starts[1:], ends[1:]
    g, tokens = grad[:, upper:].flatten()[pairs], pairs // max(1, nodes.shape[1] - upper)
    fused = _has_triton(hidden, weight)
    dtype = weight.dtype if fused else torch.promote_types(weight.dtype, torch.float32)
    values = torch.empty(n + len(rows), hidden.shape[1], dtype=dtype, device=hidden.device)
    values[:n] = _narrowed(near, hidden.dtype).T @ hidden
    if fused:
        from catnat.ops import triton_rows

        triton_rows.segment_sums(values[n:], hidden, g, tokens, starts, ends)
    else:
        _segment_sums(values[n:], hidden, g, tokens, starts, ends)
    bias = near.new_zeros(len(weight)).index_add_(0, below, grad[:, upper:].flatten())
    first = torch.arange(n, device=rows.device)
    return torch.cat((first, rows)), values, torch.cat((near.sum(0), bias[rows]))


def _grad_of_all_rows(
    hidden: Tensor, weight: Tensor, nodes: Tensor, grad: Tensor, upper: int
) -> tuple[Tensor, Tensor]:
    """The gradient of the weight and of the bias, dense; never waits for a device."""
    near = _spread(grad, nodes, upper, weight)
    n, below = near.shape[1], nodes[:, upper:].flatten()
    ranked, pairs = below.sort()
    bounds = torch.searchsorted(ranked, torch.arange(n, len(weight) + 1, device=ranked.device))
    g, tokens = grad[:, upper:].flatten(), pairs // max(1, nodes.shape[1] - upper)
    sums, dtype = _segment_sums, torch.promote_types(weight.dtype, torch.float32)
    if _has_triton(hidden, weight):
        from catnat.ops import triton_rows

        sums, dtype = triton_rows.segment_sums, weight.dtype
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    values[:n] = _narrowed(near, hidden.dtype).T @ hidden
    sums(values[n:], hidden, g[pairs], tokens, bounds[:-1], bounds[1:])
    bias = near.new_zeros(len(weight)).index_add_(0, below, g)
    bias[:n] = near.sum(0)  # paths that end early name the root once more, with gradient 0
    return values.to(weight.dtype), bias


def _segment_sums(
    out: Tensor, hidden: Tensor, grad: Tensor, tokens: Tensor, starts: Tensor, ends: Tensor
) -> None:
    """Set row s of out to the sum of grad[i] hidden[tokens[i]] over i in starts[s]..ends[s]-1."""
    out.zero_()
    skipped = int(starts[0]) if len(starts) else len(grad)
    place = torch.arange(len(out), device=out.device).repeat_interleave(ends - starts)
    size = _rows_at_once(1, hidden.shape[1])
    pieces = (x.split(size) for x in (place, grad[skipped:], tokens[skipped:]))
    for p, g, t in zip(*pieces, strict=True):
        out.index_add_(0, p, g[:, None].to(out.dtype) * hidden[t].to(out.dtype))


def _spread(grad: Tensor, nodes: Tensor, upper: int, weight: Tensor) -> Tensor:
    """The gradient at each of the nodes near the root, (M, 2^upper - 1); 0 off the paths."""
    n = min(2**upper - 1, weight.shape[0])
    return grad.new_zeros(len(grad), n).scatter_add_(1, nodes[:, :upper], grad[:, :upper])


def _narrowed(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """A steep gradient must not become infinite in half precision."""
    largest = torch.finfo(dtype).max
    return grad.clamp(-largest, largest).to(dtype)


def _as_dense(rows: Tensor, values: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_copy_(0, rows, values.to(like.dtype))


def _differentiable_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, nodes: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    grad = _narrowed(grad, hidden.dtype)
    of_hidden = (grad[:, :, None] * weight[nodes].to(hidden.dtype)).sum(1)
    outer = (grad[:, :, None] * hidden[:, None]).flatten(0, 1).to(weight.dtype)
    of_weight = torch.zeros_like(weight).index_add(0, nodes.flatten(), outer)
    if bias is None:
        return of_hidden, of_weight, None
    of_bias = torch.zeros_like(bias).index_add(0, nodes.flatten(), grad.flatten().to(bias.dtype))
    return of_hidden, of_weight, of_bias


def fused_loss_for(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, upper: int, split: Split
) -> ModuleType | None:
    """:mod:`catnat.ops.fused_loss` where its kernels take these tensors, else None."""
    known = type(split) in (SigmoidSplit, NaturalSplit)
    if not known or not is_plain(hidden) or not _has_triton(hidden, weight):
        return None
    from catnat.ops import fused_loss

    return fused_loss if fused_loss.takes(hidden, weight, bias, upper) else None


def _has_triton(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the Triton kernels take these tensors."""
    wide = torch.float64 in (hidden.dtype, weight.dtype)
    return hidden.is_cuda and HAS_TRITON and not wide


# -- the C kernels: CPU, float32 -------------------------------------------------------------------


@functools.cache
def _kernels() -> ctypes.CDLL | None:
    lib = native.library()
    if lib is None or not hasattr(lib, "catnat_layer_scores"):
        return None
    pointer, long, threads = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    lib.catnat_layer_scores.argtypes = [*[pointer] * 5, long, long, long, threads]
    lib.catnat_layer_sums.argtypes = [*[pointer] * 4, long, long, long, threads]
    lib.catnat_segment_sums.argtypes = [*[pointer] * 5, long, long, long, threads]
    return lib


def _has_kernels(*tensors: Tensor | None) -> bool:
    known = (t for t in tensors if t is not None)
    if not all(t.dtype == torch.float32 and t.device.type == "cpu" for t in known):
        return False
    return _kernels() is not None


def _plain(x: Tensor) -> Tensor:
    return x.resolve_neg().contiguous()


def _threads(products: int) -> int:
    return torch.get_num_threads() if products >= _PARALLEL else 1


def _native_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, nodes: Tensor) -> Tensor:
    lib = _kernels()
    assert lib is not None
    hidden, weight, nodes = map(_plain, (hidden, weight, nodes))
    bias = None if bias is None else _plain(bias)
    out = hidden.new_empty(nodes.shape)
    pointers = [x.data_ptr() for x in (hidden, weight, nodes, out)]
    pointers.insert(2, 0 if bias is None else bias.data_ptr())
    shape = (*nodes.shape, hidden.shape[1])
    lib.catnat_layer_scores(*pointers, *shape, _threads(nodes.numel() * shape[2]))
    return out


def _native_grad_of_hidden(weight: Tensor, nodes: Tensor, grad: Tensor) -> Tensor:
    lib = _kernels()
    assert lib is not None
    weight, nodes, grad = map(_plain, (weight, nodes, grad))
    out = grad.new_empty(len(grad), weight.shape[1])
    pointers = [x.data_ptr() for x in (weight, nodes, grad, out)]
    shape = (*nodes.shape, weight.shape[1])
    lib.catnat_layer_sums(*pointers, *shape, _threads(nodes.numel() * shape[2]))
    return out


def _native_grad_of_rows(
    hidden: Tensor, nodes: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    lib = _kernels()
    assert lib is not None
    hidden, grad = map(_plain, (hidden, grad))
    ranked, pairs = nodes.flatten().sort()
    rows, counts = torch.unique_consecutive(ranked, return_counts=True)
    ends = counts.cumsum(0)
    sorted_grad = grad.flatten()[pairs]
    tokens = pairs // nodes.shape[1]
    out = hidden.new_empty(len(rows), hidden.shape[1])
    pointers = [x.data_ptr() for x in (hidden, sorted_grad, tokens, ends, out)]
    shape = (len(rows), len(pairs), hidden.shape[1])
    lib.catnat_segment_sums(*pointers, *shape, _threads(len(pairs) * shape[2]))
    of_bias = sorted_grad.new_zeros(len(rows))
    of_bias.index_add_(0, torch.arange(len(rows)).repeat_interleave(counts), sorted_grad)
    return rows, out, of_bias
