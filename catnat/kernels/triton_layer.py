"""The log-probability of classes under an output layer, by Triton kernels on CUDA.

:class:`FusedTree` is for sigmoid and natural activations, with dense gradients; a plain torch
function, which agrees to rounding, covers all other cases and derivatives of the gradient.

Shapes: hidden (M, D), weight (S, D) with S = K - 1, paths of H nodes. The scores of the first U
nodes of a path come from one matmul, those of the L = H - U nodes below from gathered rows.

The *key* of a row names its path in one number: the heap number of its leaf, moved to depth H. The
node at level l has heap number ``key >> (H - l)``, and is on the path if that is below K. A row
without a leaf has the key 2^(H+1): its target is a frequent class, which is not in the tree, or not
a class. Sorted keys are sorted nodes at every level at once.
"""

# mypy: ignore-errors
# Triton's own language, in Python's clothes.
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.heads.activations import Activation, kernel_numbers
from catnat.kernels.dispatch import TRITON_DTYPES, fit_triton
from catnat.kernels.reference import gradients
from catnat.kernels.triton_activations import floored, logs_and_slopes
from catnat.numerics import is_plain

UPPER = 8  # U, levels whose scores are one matmul: a power of two
_ROWS_AT_ONCE = 4  # rows of hidden that a program of the kernel "near" takes
_TOKENS_AT_ONCE = tl.constexpr(4)  # rows of hidden that a sum over tokens loads together


class FusedTree(NamedTuple):
    """The tree of an output layer, for these kernels."""

    weight: Tensor
    bias: Tensor | None
    activation: Activation
    constants: Tensor | None
    """Of the nodes, (R, K-1) in float32, or None where all nodes are centered at 0."""

    def takes(self, hidden: Tensor) -> bool:
        """Whether the kernels take these tensors and this activation."""
        parameters = [x for x in (self.weight, self.bias) if x is not None]
        return (
            self.activation.is_fused
            and hidden.shape[0] > 0
            and UPPER < self.weight.shape[0].bit_length() < 30
            and hidden.dtype in TRITON_DTYPES
            and is_plain(hidden)  # it is made contiguous where that is needed
            and fit_triton(*parameters)
        )

    def log_prob(
        self,
        hidden: Tensor,
        target: Tensor,
        order: Tensor | None,
        frequent: int,
        plainly: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor],
    ) -> Tensor:
        """Log-probabilities of the leaves of classes, (M, D), (M,) -> (M,) in float32.

        0 for a frequent class, and NaN for what is not a class: such rows are not read.

        Args:
            hidden: (M, D).
            target: classes, int64.
            order: the place of each class, (F+K,), or None for place k of class k. Places below F
                are frequent classes, F+k is leaf k.
            frequent: F.
            plainly: plain torch function of hidden, weight, bias and target with this result.
        """
        with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
            return _LogProb.apply(
                hidden, self.weight, self.bias, target, order, frequent, self, plainly
            )

    def arguments(self, hidden: Tensor, block: int) -> dict[str, Any]:
        """Arguments of the kernels that compute scores, for blocks of at most this many columns."""
        return {
            "hidden": hidden,
            "weight": self.weight,
            "bias": self.bias,
            "constants": self.constants,
            **kernel_numbers(self.activation),
            **_sizes(self.weight, block),
        }


def _sizes(weight: Tensor, block: int) -> dict[str, int]:
    nodes, D = weight.shape
    block = min(block, triton.next_power_of_2(D))
    return {"D": D, "K": nodes + 1, "H": nodes.bit_length(), "B": block}


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, order, frequent, tree, plainly):
        ctx.plainly = plainly
        saved = (hidden, weight, bias, target)
        hidden, target = hidden.contiguous(), target.contiguous()
        arguments = tree.arguments(hidden, 256)
        M, H = len(hidden), arguments["H"]
        # One row more than the nodes near the root: matmuls are fast where sizes are aligned.
        near = hidden @ weight[: 1 << UPPER].to(hidden.dtype).T
        keys = hidden.new_empty(M, dtype=torch.int32)
        slopes = hidden.new_empty(M, H, dtype=torch.float32)
        out = hidden.new_empty(M, dtype=torch.float32)
        _forward_kernel[(M,)](
            near=near,
            target=target,
            order=order,
            keys=keys,
            slopes=slopes,
            out=out,
            **arguments,
            U=UPPER,
            L=triton.next_power_of_2(H - UPPER),
            F=frequent,
        )
        ctx.save_for_backward(*saved, keys, slopes)
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, target, keys, slopes = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grad):
            plainly = partial(ctx.plainly, target=target)
            return *gradients(plainly, (hidden, weight, bias), grad), *[None] * 5
        with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
            hidden = hidden.contiguous()
            sizes = _sizes(weight, 1024) | {"U": UPPER}
            M = len(hidden)
            N = 1 << UPPER
            columns = triton.cdiv(sizes["D"], sizes["B"])
            of_hidden = of_weight = of_bias = None
            if any(ctx.needs_input_grad[1:3]):  # first: the device fills memory meanwhile
                of_weight = torch.zeros_like(weight)
                of_bias = None if bias is None else torch.zeros_like(bias)
            near = hidden.new_empty(M, N)  # near the root; the last column is zeros
            largest = torch.finfo(near.dtype).max  # a steep gradient must not become infinite
            paths = {"keys": keys, "slopes": slopes, "grad": grad.contiguous()}
            grid = (triton.cdiv(M, _ROWS_AT_ONCE),)
            _near_kernel[grid](
                **paths,
                out=near,
                M=M,
                largest=largest,
                K=sizes["K"],
                H=sizes["H"],
                U=UPPER,
                R=_ROWS_AT_ONCE,
            )
            if ctx.needs_input_grad[0]:
                of_hidden = near @ weight[:N].to(near.dtype)
                _hidden_kernel[(M, columns)](**paths, weight=weight, out=of_hidden, **sizes)
            if of_weight is not None:
                of_weight[:N] = near.T @ hidden  # the last row is set below if it is in use
                if of_bias is not None:
                    of_bias[:N] = near.sum(0, dtype=torch.float32)
                paths["keys"], tokens = keys.sort()
                _rows_kernel[(M, columns, sizes["H"] - UPPER)](
                    **paths,
                    tokens=tokens,
                    hidden=hidden,
                    of_weight=of_weight,
                    of_bias=of_bias,
                    M=M,
                    **sizes,
                )
            return of_hidden, of_weight, of_bias, *[None] * 5


@triton.jit
def _nodes(key, level, K: tl.constexpr, H: tl.constexpr):
    """The nodes of paths at some levels, and whether there is one."""
    heap = key >> tl.maximum(H - level, 0)
    inside = heap < tl.where(key < (2 << H), K, 0)
    return tl.where(inside, heap - 1, 0), inside


@triton.jit
def products_at(hidden, weight, node, inside, end, D: tl.constexpr, B: tl.constexpr):
    """A row of hidden times the rows of nodes, (n,) -> (n,) in float32."""
    column = tl.arange(0, B)
    at = weight + node.to(tl.int64)[:, None] * D + column[None, :]
    products = tl.zeros((node.shape[0], B), tl.float32)
    for start in range(0, end, B):
        exists = start + column < D
        h = tl.load(hidden + start + column, mask=exists, other=0.0)
        w = tl.load(at + start, mask=inside[:, None] & exists[None, :], other=0.0)
        products += w.to(tl.float32) * h.to(tl.float32)[None, :]
    return tl.sum(products, axis=1)


@triton.jit
def _steps(
    s,
    level,
    key,
    bias,
    slopes,
    settings,
    K: tl.constexpr,
    H: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """The logarithm of the steps at some levels of a path; stores its slopes, 0 off the path."""
    node, inside = _nodes(key, level, K, H)
    if bias is not None:
        s += tl.load(bias + node, mask=inside, other=0.0).to(tl.float32)
    left, right, fall, rise = logs_and_slopes(s[None, :], node, settings, inside, NATURAL)
    inside = inside[None, :]
    is_right = ((key >> tl.maximum(H - 1 - level, 0)) & 1 == 1)[None, :]
    move = tl.where(inside, tl.where(is_right, rise, -fall), 0.0)
    tl.store(slopes + level[None, :], move, mask=(level < H)[None, :])
    return tl.sum(tl.where(inside, tl.where(is_right, right, left), 0.0))


@triton.jit
def _forward_kernel(
    hidden,
    weight,
    bias,
    near,
    target,
    order,
    constants,
    keys,
    slopes,
    out,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    D: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    L: tl.constexpr,  # a power of two >= H - U
    B: tl.constexpr,
    F: tl.constexpr,  # frequent classes
    NATURAL: tl.constexpr,
):
    settings = (constants, K - 1, rate, high, low, joint, slope, edge)
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(target + row).to(tl.int64)
    possible = (k >= 0) & (k < F + K)
    place = tl.where(possible, k, 0)
    if order is not None:
        place = tl.load(order + place)
    alive = possible & (place >= F)
    key = (tl.where(alive, place - F, 0) + K).to(tl.int32)
    key = tl.where(key >= (1 << H), key, 2 * key)
    key = tl.where(alive, key, 2 << H)
    tl.store(keys + row, key)
    slopes += row * H

    level = tl.arange(0, U)
    node, inside = _nodes(key, level, K, H)
    s = tl.load(near + (row << U) + node, mask=inside, other=0.0).to(tl.float32)
    total = _steps(s, level, key, bias, slopes, settings, K, H, NATURAL)
    level = U + tl.arange(0, L)
    node, inside = _nodes(key, level, K, H)
    s = products_at(hidden + row * D, weight, node, inside, tl.where(alive, D, 0), D, B)
    total += _steps(s, level, key, bias, slopes, settings, K, H, NATURAL)
    tl.store(out + row, tl.where(possible, floored(total), float("nan")))


@triton.jit(do_not_specialize=["M"])
def _near_kernel(
    keys,
    slopes,
    grad,
    out,
    M,
    largest,
    K: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
):
    """The gradient at each of the nodes near the root; 0 off the paths."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    exists = row < M
    key = tl.load(keys + row, mask=exists, other=2 << H)
    g = tl.load(grad + row, mask=exists, other=0.0)
    column = tl.arange(0, 1 << U)
    total = tl.zeros((R, 1 << U), tl.float32)
    for level in tl.static_range(U):
        node, inside = _nodes(key, level, K, H)
        move = tl.load(slopes + row * H + level, mask=inside, other=0.0)
        move = tl.where(inside, move * g, 0.0)
        total = tl.where(node[:, None] == column[None, :], move[:, None], total)
    total = tl.where(total > largest, largest, tl.where(total < -largest, -largest, total))
    at = out + (row << U)[:, None] + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=exists[:, None])


@triton.jit
def _hidden_kernel(
    weight,
    keys,
    slopes,
    grad,
    out,
    D: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    B: tl.constexpr,
):
    """Add what the gathered rows give to the gradient of hidden."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(keys + row)
    d = tl.program_id(1) * B + tl.arange(0, B)
    g = tl.load(grad + row)
    at = out + row * D + d
    mine = d < tl.where(key < (2 << H), D, 0)
    total = tl.load(at, mask=mine, other=0.0).to(tl.float32)
    for level in tl.static_range(U, H):
        node, inside = _nodes(key, level, K, H)
        move = tl.load(slopes + row * H + level)
        w = tl.load(weight + node.to(tl.int64) * D + d, mask=d < tl.where(inside, D, 0), other=0.0)
        total += tl.where(inside, move * g, 0.0) * w.to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    hidden,
    slopes,
    grad,
    keys,  # sorted
    tokens,
    of_weight,
    of_bias,
    M,
    D: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    B: tl.constexpr,
):
    """The gradient in the row and the bias of one node below: a sum over the tokens there.

    A program belongs to a place in the sorted keys and a level. It works if the tokens of a node
    begin at that place.
    """
    i, level = tl.program_id(0), U + tl.program_id(2)
    key = tl.load(keys + i)
    before = tl.load(keys + i - 1, mask=i > 0, other=0)
    heap = key >> (H - level)
    node, begins = _nodes(key, level, K, H)
    begins = begins & (heap != (before >> (H - level)))
    end = tl.where(begins, M, i)
    d = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    sum_of_g = tl.full((), 0.0, tl.float32)
    while i < end:
        for step in tl.static_range(_TOKENS_AT_ONCE):
            other = tl.load(keys + i + step, mask=i + step < M, other=2 << H)
            token = tl.load(tokens + i + step, mask=i + step < M, other=0)
            here = (other >> (H - level)) == heap
            g = tl.load(slopes + token * H + level, mask=here, other=0.0)
            g *= tl.load(grad + token, mask=here, other=0.0)
            h = tl.load(hidden + token * D + d, mask=d < tl.where(here, D, 0), other=0.0)
            total += g * h.to(tl.float32)
            sum_of_g += g
        i += _TOKENS_AT_ONCE
        end = tl.where(here, end, i)  # whether the last of these tokens was one of the node
    at = of_weight + node.to(tl.int64) * D + d
    tl.store(at, total.to(of_weight.dtype.element_ty), mask=d < tl.where(begins, D, 0))
    if of_bias is not None:
        sum_of_g = sum_of_g.to(of_bias.dtype.element_ty)
        tl.store(of_bias + node, sum_of_g, mask=begins & (tl.program_id(1) == 0))
