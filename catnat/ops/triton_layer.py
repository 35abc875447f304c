"""Triton kernels for the loss of an output layer by paths, with sigmoid and natural splits.

Shapes: hidden (M, D), weight (S, D) with S = K - 1, paths of H nodes. The scores of the first U
nodes of a path come from one matmul, those of the L = H - U nodes below from gathered rows.

The *key* of a row names its path in one number: the heap number of its leaf, moved to depth H. The
node at level l has heap number ``key >> (H - l)``, and is on the path if that is below K. A row
without a target has the key 2^(H+1). Sorted keys are sorted nodes at every level at once.
"""

# mypy: ignore-errors
# Triton's own language, in Python's clothes.
from __future__ import annotations

import triton
import triton.language as tl

from catnat.ops.triton_splits import _log_split, _slopes

_AT_ONCE = tl.constexpr(4)  # rows of hidden that a sum over tokens loads together


@triton.jit
def _steps(
    s,
    level,
    key,
    alive,
    constants,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    K: tl.constexpr,
    H: tl.constexpr,
    NATURAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Logarithm and its derivative of the steps at some levels of a path; 0 off the path."""
    heap = key >> tl.where(level < H, H - level, 0)
    inside = alive & (level < H) & (heap < K)
    node = tl.where(inside, heap - 1, 0)
    bit = (key >> tl.where(level < H, H - 1 - level, 0)) & 1
    S: tl.constexpr = K - 1
    known = (constants, S, rate, high, low, joint, slope, edge)
    left, right = _log_split(s[None, :], node, *known, inside, NATURAL, CENTRED)
    fall, rise = _slopes(s[None, :], node, *known, inside, NATURAL, CENTRED)
    up = (bit == 1)[None, :]
    logs = tl.where(inside[None, :], tl.where(up, right, left), 0.0)
    moves = tl.where(inside[None, :], tl.where(up, rise, -fall), 0.0)
    return tl.sum(logs), moves


@triton.jit(do_not_specialize=["ignored"])
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
    ignored,
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
    BIAS: tl.constexpr,
    ORDERED: tl.constexpr,
    IGNORES: tl.constexpr,
    NATURAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(target + row).to(tl.int64)
    counts = k == k
    if IGNORES:
        counts = k != ignored
    possible = (k >= 0) & (k < K)
    alive = counts & possible
    leaf = tl.where(alive, k, 0)
    if ORDERED:
        leaf = tl.load(order + leaf)
    key = (leaf + K).to(tl.int32)
    key = tl.where(key >= (1 << H), key, 2 * key)
    tl.store(keys + row, tl.where(alive, key, 2 << H))

    level = tl.arange(0, PU)
    here = level < tl.where(alive, U, 0)
    node = tl.where(here, (key >> tl.where(level < U, H - level, 0)) - 1, 0)
    s = tl.load(near + row * N + node, mask=here, other=0.0).to(tl.float32)
    if BIAS:
        s += tl.load(bias + node, mask=here, other=0.0).to(tl.float32)
    total, moves = _steps(
        s, level, key, here, constants, rate, high, low, joint, slope, edge, K, H, NATURAL, CENTRED
    )
    tl.store(slopes + row * H + level[None, :], moves, mask=(level < U)[None, :])

    level = U + tl.arange(0, PL)
    heap = key >> tl.where(level < H, H - level, 0)
    here = (level < tl.where(alive, H, 0)) & (heap < K)
    node = tl.where(here, heap - 1, 0)
    column = tl.arange(0, B)
    at = weight + node.to(tl.int64)[:, None] * D + column[None, :]
    products = tl.zeros((PL, B), tl.float32)
    for start in range(0, D, B):
        inside = start + column < D
        h = tl.load(hidden + row * D + start + column, mask=inside, other=0.0)
        w = tl.load(at + start, mask=here[:, None] & inside[None, :], other=0.0)
        products += w.to(tl.float32) * h.to(tl.float32)[None, :]
    s = tl.sum(products, axis=1)
    if BIAS:
        s += tl.load(bias + node, mask=here, other=0.0).to(tl.float32)
    below, moves = _steps(
        s, level, key, here, constants, rate, high, low, joint, slope, edge, K, H, NATURAL, CENTRED
    )
    tl.store(slopes + row * H + level[None, :], moves, mask=(level < H)[None, :])
    tl.store(out + row, tl.where(counts & (possible == 0), float("nan"), total + below))


@triton.jit(do_not_specialize=["M", "ignored"])
def _mean_kernel(log_probs, target, out, scale, M, ignored, B: tl.constexpr):
    """Minus the mean of the log-probabilities that count, and the derivative in each of them."""
    total = tl.zeros((B,), tl.float32)
    count = tl.zeros((B,), tl.float32)
    start = 0
    while start < M:
        i = start + tl.arange(0, B)
        counts = (tl.load(target + i, mask=i < M, other=0) != ignored) & (i < M)
        total += tl.load(log_probs + i, mask=counts, other=0.0)
        count += tl.where(counts, 1.0, 0.0)
        start += B
    number = tl.sum(count)
    tl.store(out, -tl.sum(total) / number)
    tl.store(scale, -1.0 / number)


@triton.jit
def _upstream(grad, scale, row, mask, MEAN: tl.constexpr):
    """The gradient in the log-probability of a row; of a mean it is the same for all rows."""
    if MEAN:
        return tl.load(grad) * tl.load(scale)
    else:
        return tl.load(grad + row, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["M"])
def _near_kernel(
    keys,
    slopes,
    grad,
    scale,
    out,
    M,
    largest,
    N: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,  # a power of two >= N
    MEAN: tl.constexpr,
):
    """The gradient at each of the nodes near the root; 0 off the paths."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    exists = row < M
    key = tl.load(keys + row, mask=exists, other=2 << H)
    alive = key < (2 << H)
    g = _upstream(grad, scale, row, exists, MEAN)
    column = tl.arange(0, C)
    total = tl.zeros((R, C), tl.float32)
    for level in tl.static_range(U):
        move = tl.load(slopes + row * H + level, mask=alive, other=0.0)
        move = tl.where(alive, move * g, 0.0)
        node = (key >> (H - level)) - 1
        total = tl.where(node[:, None] == column[None, :], move[:, None], total)
    total = tl.where(total > largest, largest, tl.where(total < -largest, -largest, total))
    at = out + row[:, None] * N + column[None, :]
    inside = exists[:, None] & (column < N)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _hidden_kernel(
    weight,
    keys,
    slopes,
    grad,
    scale,
    out,
    D: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    B: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Add what the gathered rows give to the gradient of hidden."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(keys + row)
    alive = key < (2 << H)
    d = tl.program_id(1) * B + tl.arange(0, B)
    g = _upstream(grad, scale, row, alive, MEAN)
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
def _begins_kernel(
    ranked,
    out,
    M,
    K: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    B: tl.constexpr,
):
    """1 where the tokens of a node begin or all tokens end, else 0: (M,) sorted -> (L, M + 1)."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    key = tl.load(ranked + i, mask=i < M, other=2 << H)
    before = tl.load(ranked + i - 1, mask=(i > 0) & (i <= M), other=0)
    for level in tl.static_range(U, H):
        node, last = key >> (H - level), before >> (H - level)
        inside = (key < (2 << H)) & (node < K)
        followed = (before < (2 << H)) & (last < K)
        begins = tl.where(inside, node != last, followed) | (i == 0)
        at = out + (level - U) * (M + 1).to(tl.int64) + i
        tl.store(at, begins.to(out.dtype.element_ty), mask=i <= M)


@triton.jit(do_not_specialize=["size"])
def _starts_kernel(places, out, size, B: tl.constexpr):
    """The indices at which ``places``, running sums of 0 and 1, grow."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    place = tl.load(places + i, mask=i < size, other=0)
    before = tl.load(places + i - 1, mask=(i > 0) & (i < size), other=0)
    tl.store(out + place - 1, i, mask=place > before)


@triton.jit(do_not_specialize=["M", "count"])
def _rows_kernel(
    hidden,
    slopes,
    grad,
    scale,
    ranked,
    tokens,
    starts,
    rows,
    of_weight,
    of_bias,
    M,
    count,
    N: tl.constexpr,  # nodes near the root
    C: tl.constexpr,  # a power of two >= N
    D: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    B: tl.constexpr,
    BIAS: tl.constexpr,
    DENSE: tl.constexpr,
    MEAN: tl.constexpr,
):
    """The gradient in the row and the bias of one node below: a sum over the tokens there."""
    program = tl.program_id(0)
    start = tl.load(starts + program)
    level = start // (M + 1)
    i = start - level * (M + 1)
    key = tl.load(ranked + i, mask=i < M, other=2 << H)
    heap = (key >> (H - U - level)).to(tl.int64)
    real = (key < (2 << H)) & (heap < K)  # else it is the end of a level
    end = tl.load(starts + program + 1, mask=real & (program + 1 < count), other=0)
    end = tl.where(real, end - level * (M + 1), i)
    d = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    sum_of_g = tl.full((), 0.0, tl.float32)
    while i < end:
        for step in tl.static_range(_AT_ONCE):
            here = i + step < end
            token = tl.load(tokens + i + step, mask=here, other=0)
            g = tl.load(slopes + token * H + U + level, mask=here, other=0.0)
            if not MEAN:
                g *= tl.load(grad + token, mask=here, other=0.0)
            h = tl.load(hidden + token * D + d, mask=d < tl.where(here, D, 0), other=0.0)
            total += g * h.to(tl.float32)
            sum_of_g += g
        i += _AT_ONCE
    if MEAN:
        factor = _upstream(grad, scale, i, real, MEAN)
        total *= factor
        sum_of_g *= factor
    place = N + program - level
    if DENSE:
        place = heap - 1
    at = of_weight + place.to(tl.int64) * D + d
    tl.store(at, total.to(of_weight.dtype.element_ty), mask=d < tl.where(real, D, 0))
    if BIAS:
        sum_of_g = sum_of_g.to(of_bias.dtype.element_ty)
        tl.store(of_bias + place, sum_of_g, mask=real & (tl.program_id(1) == 0))
    if not DENSE:
        tl.store(rows + place, heap - 1, mask=real & (tl.program_id(1) == 0))
        first = tl.arange(0, C)
        one = (program == 0) & (tl.program_id(1) == 0)
        tl.store(rows + first, first.to(tl.int64), mask=first < tl.where(one, N, 0))
