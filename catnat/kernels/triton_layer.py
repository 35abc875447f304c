"""The log-probability of classes under an output layer, by Triton kernels on CUDA.

:func:`log_prob` is for sigmoid and natural activations, with dense gradients; a plain torch
function, which agrees to rounding, is the way for all else, and for a derivative of the gradient.
:func:`sample` draws leaves, by one kernel for all levels.

Shapes: hidden (M, D), weight (S, D) with S = K - 1, paths of H nodes. The scores of the first U
nodes of a path come from one matmul, those of the L = H - U nodes below from gathered rows.

The *key* of a row names its path in one number: the heap number of its leaf, moved to depth H. The
node at level l has heap number ``key >> (H - l)``, and is on the path if that is below K. A row
without a leaf has the key 2^(H+1): its target is a frequent class, which is not in the tree, or not
a class. Sorted keys are sorted nodes at every level at once.
"""

# mypy: ignore-errors
# Triton's own language, in Python's clothes.
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.activations import Activation, NaturalActivation, SigmoidActivation
from catnat.kernels.triton_activations import (
    _floored,
    _log_activation,
    _slopes,
    activation_arguments,
)
from catnat.numerics import is_plain

UPPER = 8  # U, levels whose scores are one matmul
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS_AT_ONCE = 4  # rows of hidden that a program of the kernel "near" takes
_TOKENS_AT_ONCE = tl.constexpr(4)  # rows of hidden that a sum over tokens loads together


def takes(hidden: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> bool:
    """Whether the kernels take these tensors and this activation."""
    parameters = [weight] if bias is None else [weight, bias]
    return (
        type(activation) in (SigmoidActivation, NaturalActivation)
        and hidden.shape[0] > 0
        and UPPER < weight.shape[0].bit_length() < 30
        and all(x.dtype in _DTYPES and is_plain(x) for x in (hidden, *parameters))
        and all(x.is_contiguous() for x in parameters)
    )


def log_prob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    order: Tensor | None,
    frequent: int,
    activation: Activation,
    constants: Tensor | None,
    plainly: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor],
) -> Tensor:
    """Log-probabilities of the leaves of classes, (M, D), (M,) -> (M,) in float32.

    0 for a frequent class, and NaN for what is not a class: such rows are not read.

    Args:
        hidden: (M, D).
        weight: (K-1, D).
        bias: (K-1,), or None.
        target: classes, int64.
        order: the place of each class, (F+K,), or None for place k of class k. Places below F are
            frequent classes, F+k is leaf k.
        frequent: F.
        activation: of the head, sigmoid or natural.
        constants: of the nodes, (R, K-1), or None where all nodes are centered at 0.
        plainly: the same of hidden, weight, bias and target in plain torch.
    """
    described = (order, frequent, activation, constants, plainly)
    with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
        return _LogProb.apply(hidden, weight, bias, target, *described)


def sample(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    uniforms: Tensor,
    activation: Activation,
    constants: Tensor | None,
) -> Tensor:
    """Leaves that walks from the root reach, (P,) -> (P,); -1 where a score is NaN.

    Args:
        hidden: (M, D).
        weight: (K-1, D).
        bias: (K-1,), or None.
        rows: the row of hidden of each walk, (P,) int64.
        uniforms: in [0, 1), in float64, (P, H): a walk goes right where a(s) is above.
        activation: of the head, sigmoid or natural.
        constants: of the nodes, (R, K-1), or None where all nodes are centered at 0.
    """
    hidden = hidden.contiguous()
    leaf = torch.empty_like(rows)
    absent = constants is None
    sizes = {"D": hidden.shape[1], "K": weight.shape[0] + 1, "H": uniforms.shape[1]}
    with torch.cuda.device_of(hidden):
        _sample_kernel[(len(rows),)](
            hidden,
            weight,
            hidden if bias is None else bias,
            rows,
            uniforms,
            uniforms if absent else constants,
            leaf,
            **activation_arguments(activation, absent),
            **sizes,
            B=min(4096, _power(hidden.shape[1])),
            BIAS=bias is not None,
            num_warps=8,
        )
    return leaf


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, order, frequent, activation, constants, plainly):
        ctx.plainly = plainly
        saved = (hidden, weight, bias, target)
        hidden, target = hidden.contiguous(), target.contiguous()
        (M, D), K, U, N = hidden.shape, weight.shape[0] + 1, UPPER, 1 << UPPER
        H = (K - 1).bit_length()
        # One row more than the nodes near the root: matmuls are fast where sizes are aligned.
        near = hidden @ weight[:N].to(hidden.dtype).T
        keys = hidden.new_empty(M, dtype=torch.int32)
        slopes = hidden.new_empty(M, H, dtype=torch.float32)
        out = hidden.new_empty(M, dtype=torch.float32)
        absent = constants is None
        sizes = {"N": N, "D": D, "K": K, "H": H, "U": U, "PU": _power(U), "PL": _power(H - U)}
        _forward_kernel[(M,)](
            hidden,
            weight,
            hidden if bias is None else bias,
            near,
            target,
            target if order is None else order,
            slopes if absent else constants,
            keys,
            slopes,
            out,
            **activation_arguments(activation, absent),
            **sizes,
            B=min(256, _power(D)),
            F=frequent,
            BIAS=bias is not None,
            ORDERED=order is not None,
        )
        ctx.save_for_backward(*saved, keys, slopes)
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, target, keys, slopes = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grad):
            return *_plain_backward(ctx, hidden, weight, bias, target, grad), *[None] * 6
        with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
            tensors = (hidden.contiguous(), weight, bias, keys, slopes, grad.contiguous())
            return *_backward(*tensors, *ctx.needs_input_grad[:3]), *[None] * 6


def _backward(hidden, weight, bias, keys, slopes, grad, for_hidden, for_weight, for_bias):
    """The gradients of hidden, weight and bias, None where they are not wanted."""
    (M, D), K, H, U, N = hidden.shape, weight.shape[0] + 1, slopes.shape[1], UPPER, 1 << UPPER
    B, R = min(1024, _power(D)), _ROWS_AT_ONCE
    of_hidden = of_weight = of_bias = None
    if for_weight or for_bias:  # first: the device fills memory while the host goes on
        of_weight, of_bias = (
            torch.zeros_like(weight),
            None if bias is None else torch.zeros_like(bias),
        )
    near = hidden.new_empty(M, N)  # the gradient near the root, with a last column of zeros
    largest = torch.finfo(near.dtype).max  # a steep gradient must not become infinite
    _near_kernel[(triton.cdiv(M, R),)](keys, slopes, grad, near, M, largest, N=N, H=H, U=U, R=R)
    if for_hidden:
        of_hidden = near @ weight[:N].to(near.dtype)
        tensors = (weight, keys, slopes, grad, of_hidden)
        _hidden_kernel[(M, triton.cdiv(D, B))](*tensors, D=D, K=K, H=H, U=U, B=B)
    if of_weight is not None:
        of_weight[:N] = near.T @ hidden  # the last of these rows is set below if it is in use
        if of_bias is not None:
            of_bias[:N] = near.sum(0, dtype=torch.float32)
        ranked, tokens = keys.sort()
        tensors = (hidden, slopes, grad, ranked, tokens, of_weight)
        tensors = (*tensors, of_weight if of_bias is None else of_bias)
        sizes = {"D": D, "K": K, "H": H, "U": U, "B": B, "BIAS": bias is not None}
        _rows_kernel[(M, triton.cdiv(D, B), H - U)](*tensors, M, **sizes)
    return of_hidden, of_weight if for_weight else None, of_bias if for_bias else None


def _plain_backward(ctx, hidden, weight, bias, target, grad):
    """The gradients by way of plain torch, differentiable."""
    needed = ctx.needs_input_grad[:3]
    with torch.enable_grad():
        out = ctx.plainly(hidden, weight, bias, target)
        wanted = [x for x, need in zip((hidden, weight, bias), needed, strict=True) if need]
        grads = iter(torch.autograd.grad(out, wanted, grad, create_graph=torch.is_grad_enabled()))
    return [next(grads) if need else None for need in needed]


def _power(n: int) -> int:
    """The least power of two >= n, at least 2."""
    return max(2, 1 << (n - 1).bit_length())


@triton.jit
def _steps(
    s,
    level,
    key,
    alive,
    known,
    K: tl.constexpr,
    H: tl.constexpr,
    NATURAL: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """Logarithm and its derivative of the steps at some levels of a path; 0 off the path."""
    heap = key >> tl.where(level < H, H - level, 0)
    inside = alive & (level < H) & (heap < K)
    node = tl.where(inside, heap - 1, 0)
    bit = (key >> tl.where(level < H, H - 1 - level, 0)) & 1
    left, right = _log_activation(s[None, :], node, known, inside, NATURAL, CENTERED)
    fall, rise = _slopes(s[None, :], node, known, inside, NATURAL, CENTERED)
    up = (bit == 1)[None, :]
    logs = tl.where(inside[None, :], tl.where(up, right, left), 0.0)
    moves = tl.where(inside[None, :], tl.where(up, rise, -fall), 0.0)
    return tl.sum(logs), moves


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
    N: tl.constexpr,  # columns of near
    D: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    PU: tl.constexpr,  # powers of two >= U and >= L
    PL: tl.constexpr,
    B: tl.constexpr,
    F: tl.constexpr,  # frequent classes
    BIAS: tl.constexpr,
    ORDERED: tl.constexpr,
    NATURAL: tl.constexpr,
    CENTERED: tl.constexpr,
):
    S: tl.constexpr = K - 1
    known = (constants, S, rate, high, low, joint, slope, edge)
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(target + row).to(tl.int64)
    possible = (k >= 0) & (k < F + K)
    place = tl.where(possible, k, 0)
    if ORDERED:
        place = tl.load(order + place)
    alive = possible & (place >= F)
    key = (tl.where(alive, place - F, 0) + K).to(tl.int32)
    key = tl.where(key >= (1 << H), key, 2 * key)
    tl.store(keys + row, tl.where(alive, key, 2 << H))

    level = tl.arange(0, PU)
    here = level < tl.where(alive, U, 0)
    node = tl.where(here, (key >> tl.where(level < U, H - level, 0)) - 1, 0)
    s = tl.load(near + row * N + node, mask=here, other=0.0).to(tl.float32)
    if BIAS:
        s += tl.load(bias + node, mask=here, other=0.0).to(tl.float32)
    total, moves = _steps(s, level, key, here, known, K, H, NATURAL, CENTERED)
    tl.store(slopes + row * H + level[None, :], moves, mask=(level < U)[None, :])

    level = U + tl.arange(0, PL)
    heap = key >> tl.where(level < H, H - level, 0)
    here = (level < tl.where(alive, H, 0)) & (heap < K)
    node = tl.where(here, heap - 1, 0)
    column = tl.arange(0, B)
    at = weight + node.to(tl.int64)[:, None] * D + column[None, :]
    products = tl.zeros((PL, B), tl.float32)
    for start in range(0, tl.where(alive, D, 0), B):
        inside = start + column < D
        h = tl.load(hidden + row * D + start + column, mask=inside, other=0.0)
        w = tl.load(at + start, mask=here[:, None] & inside[None, :], other=0.0)
        products += w.to(tl.float32) * h.to(tl.float32)[None, :]
    s = tl.sum(products, axis=1)
    if BIAS:
        s += tl.load(bias + node, mask=here, other=0.0).to(tl.float32)
    below, moves = _steps(s, level, key, here, known, K, H, NATURAL, CENTERED)
    tl.store(slopes + row * H + level[None, :], moves, mask=(level < H)[None, :])
    tl.store(out + row, tl.where(possible, _floored(total + below), float("nan")))


@triton.jit
def _sample_kernel(
    hidden,
    weight,
    bias,
    rows,
    uniforms,
    constants,
    leaf,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    D: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    BIAS: tl.constexpr,
    NATURAL: tl.constexpr,
    CENTERED: tl.constexpr,
):
    S: tl.constexpr = K - 1
    known = (constants, S, rate, high, low, joint, slope, edge)
    walk = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + walk)
    column = tl.arange(0, B)
    one = tl.arange(0, 1)  # a tensor of one number: what the activations take
    heap = one + 1
    lost = one > 0
    for level in range(H):
        inner = heap < K
        node = tl.where(inner, heap - 1, 0)
        at = weight + tl.sum(node).to(tl.int64) * D
        products = tl.zeros((B,), tl.float32)
        for start in range(0, D, B):
            inside = start + column < D
            h = tl.load(hidden + row * D + start + column, mask=inside, other=0.0)
            w = tl.load(at + start + column, mask=inside, other=0.0)
            products += w.to(tl.float32) * h.to(tl.float32)
        s = tl.sum(products) + tl.zeros((1,), tl.float32)
        if BIAS:
            s += tl.load(bias + node).to(tl.float32)
        _, right = _log_activation(s[None, :], node, known, inner, NATURAL, CENTERED)
        right = tl.sum(right, axis=0)
        u = tl.load(uniforms + walk * H + level + one)
        heap = tl.where(inner, 2 * heap + (u < tl.exp(right.to(tl.float64))).to(tl.int32), heap)
        lost = lost | (inner & (right != right))
    tl.store(leaf + walk + one, tl.where(lost, -1, heap - K).to(tl.int64))


@triton.jit(do_not_specialize=["M"])
def _near_kernel(
    keys,
    slopes,
    grad,
    out,
    M,
    largest,
    N: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
):
    """The gradient at each of the nodes near the root; 0 off the paths."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    exists = row < M
    key = tl.load(keys + row, mask=exists, other=2 << H)
    alive = key < (2 << H)
    g = tl.load(grad + row, mask=exists, other=0.0)
    column = tl.arange(0, N)
    total = tl.zeros((R, N), tl.float32)
    for level in tl.static_range(U):
        move = tl.load(slopes + row * H + level, mask=alive, other=0.0)
        move = tl.where(alive, move * g, 0.0)
        node = (key >> (H - level)) - 1
        total = tl.where(node[:, None] == column[None, :], move[:, None], total)
    total = tl.where(total > largest, largest, tl.where(total < -largest, -largest, total))
    at = out + row[:, None] * N + column[None, :]
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
    alive = key < (2 << H)
    d = tl.program_id(1) * B + tl.arange(0, B)
    g = tl.load(grad + row)
    at = out + row * D + d
    mine = d < tl.where(alive, D, 0)
    total = tl.load(at, mask=mine, other=0.0).to(tl.float32)
    for level in tl.static_range(U, H):
        heap = key >> (H - level)
        inside = alive & (heap < K)
        move = tl.load(slopes + row * H + level)
        node = tl.where(inside, heap - 1, 0).to(tl.int64)
        w = tl.load(weight + node * D + d, mask=d < tl.where(inside, D, 0), other=0.0)
        total += tl.where(inside, move * g, 0.0) * w.to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    hidden,
    slopes,
    grad,
    ranked,
    tokens,
    of_weight,
    of_bias,
    M,
    D: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    B: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The gradient in the row and the bias of one node below: a sum over the tokens there.

    A program belongs to a place in the sorted keys and a level. It works if the tokens of a node
    begin at that place.
    """
    i, level = tl.program_id(0), U + tl.program_id(2)
    key = tl.load(ranked + i)
    before = tl.load(ranked + i - 1, mask=i > 0, other=0)
    heap = key >> (H - level)
    begins = (key < (2 << H)) & (heap < K) & (heap != (before >> (H - level)))
    end = tl.where(begins, M, i)
    d = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    sum_of_g = tl.full((), 0.0, tl.float32)
    while i < end:
        for step in tl.static_range(_TOKENS_AT_ONCE):
            other = tl.load(ranked + i + step, mask=i + step < M, other=2 << H)
            token = tl.load(tokens + i + step, mask=i + step < M, other=0)
            here = (other >> (H - level)) == heap
            g = tl.load(slopes + token * H + level, mask=here, other=0.0)
            g *= tl.load(grad + token, mask=here, other=0.0)
            h = tl.load(hidden + token * D + d, mask=d < tl.where(here, D, 0), other=0.0)
            total += g * h.to(tl.float32)
            sum_of_g += g
        i += _TOKENS_AT_ONCE
        end = tl.where(here, end, i)  # whether the last of these tokens was one of the node
    node = (heap - 1).to(tl.int64)
    at = of_weight + node * D + d
    tl.store(at, total.to(of_weight.dtype.element_ty), mask=d < tl.where(begins, D, 0))
    if BIAS:
        sum_of_g = sum_of_g.to(of_bias.dtype.element_ty)
        tl.store(of_bias + node, sum_of_g, mask=begins & (tl.program_id(1) == 0))
