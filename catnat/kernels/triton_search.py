"""Ways down the tree of an output layer, by Triton kernels: random walks, and levels of a search.

A program of :func:`sample` takes one walk through all levels. A program of :func:`descend` takes a
node of the beam of one row: it computes the scores of the nodes in the subtree of the next levels
together, and the log-probabilities at the subtree's ends.
"""

# mypy: ignore-errors
# Triton's own language, in Python's clothes.
import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.kernels.triton_activations import logs_and_slopes
from catnat.kernels.triton_layer import FusedTree, products_at

LEVELS = 3
"""Levels that :func:`descend` goes down."""


def sample(tree: FusedTree, hidden: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
    """Leaves that walks from the root reach, (P,) -> (P,); -1 where a score is NaN.

    Args:
        tree: the tree of the layer.
        hidden: (M, D).
        rows: the row of hidden of each walk, (P,) int64.
        uniforms: in [0, 1), in float64, (H, P): a walk goes right where a(s) is above.
    """
    leaf = torch.empty_like(rows)
    with torch.cuda.device_of(hidden):
        _sample_kernel[(len(rows),)](
            rows=rows,
            uniforms=uniforms,
            leaf=leaf,
            P=len(rows),
            **tree.arguments(hidden.contiguous(), 4096),
            num_warps=8,
        )
    return leaf


def descend(
    tree: FusedTree, hidden: Tensor, rows: Tensor, values: Tensor, heap: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and heap numbers three levels further down, (R, n) -> (R, 8n) each.

    A leaf on the way stays, beside ends that do not exist and have -inf.

    Args:
        tree: the tree of the layer.
        hidden: (M, D).
        rows: the row of hidden of each beam, (R,) int64.
        values: log-probabilities of nodes, (R, n) in float32.
        heap: their heap numbers, (R, n) int64.
    """
    R, n = heap.shape
    ends = 1 << LEVELS
    out_values = values.new_empty(R, n * ends)
    out_heap = heap.new_empty(R, n * ends)
    with torch.cuda.device_of(hidden):
        # A grid of one dimension, because CUDA bounds the others by 65,535.
        _descend_kernel[(R * n,)](
            rows=rows.contiguous(),
            values=values.contiguous(),
            heap=heap.contiguous(),
            out_values=out_values,
            out_heap=out_heap,
            N=n,
            L=LEVELS,
            E=ends,
            **tree.arguments(hidden.contiguous(), 512),
            num_warps=4,
        )
    return out_values, out_heap


@triton.jit(do_not_specialize=["P"])
def _sample_kernel(
    hidden,
    weight,
    bias,
    rows,
    uniforms,
    constants,
    leaf,
    P,
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
    NATURAL: tl.constexpr,
):
    settings = (constants, K - 1, rate, high, low, joint, slope, edge)
    walk = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)  # a tensor of one number
    row = tl.load(rows + tl.program_id(0))
    heap = tl.full((1,), 1, tl.int32)  # 0 after a NaN
    for level in range(H):
        inside = (heap > 0) & (heap < K)
        node = tl.where(inside, heap - 1, 0)
        s = products_at(hidden + row * D, weight, node, inside, D, D, B)
        if bias is not None:
            s += tl.load(bias + node).to(tl.float32)
        _, right, _, _ = logs_and_slopes(s[None, :], node, settings, inside, NATURAL)
        right = tl.sum(right, axis=0)
        u = tl.load(uniforms + level * P + walk)
        child = 2 * heap + (u < tl.exp(right.to(tl.float64))).to(tl.int32)
        heap = tl.where(inside, tl.where(right != right, 0, child), heap)
    tl.store(leaf + walk, tl.where(heap > 0, heap - K, -1).to(tl.int64))


@triton.jit
def _descend_kernel(
    hidden,
    weight,
    bias,
    constants,
    rows,
    values,
    heap,
    out_values,
    out_heap,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    N: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,  # 2^L ends
    D: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    B: tl.constexpr,
    NATURAL: tl.constexpr,
):
    settings = (constants, K - 1, rate, high, low, joint, slope, edge)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place // N)
    start = tl.load(heap + place)

    # The subtree is a heap of its own: its root is 1, and its nodes are 1..E-1.
    own = tl.arange(0, E) + 1
    depth = tl.zeros((E,), tl.int32)
    for level in tl.static_range(1, L):
        depth += (own >= (1 << level)).to(tl.int32)
    number = (start << depth) + own - (1 << depth)
    inside = (own < E) & (number < K)
    node = tl.where(inside, number - 1, 0)
    s = products_at(hidden + row * D, weight, node, inside, D, D, B)
    if bias is not None:
        s += tl.load(bias + node, mask=inside, other=0.0).to(tl.float32)
    left, right, _, _ = logs_and_slopes(s[None, :], node, settings, inside, NATURAL)

    end = tl.arange(0, E)
    total = tl.zeros((E,), tl.float32) + tl.load(values + place)
    current = tl.zeros((E,), tl.int64) + start
    for level in tl.static_range(L):
        bit = (end >> (L - 1 - level)) & 1
        above = (1 << level) + (end >> (L - level))
        side = tl.where(bit[:, None] == 1, right, left)
        step = tl.sum(tl.where(own[None, :] == above[:, None], side, 0.0), axis=1)
        is_inside = current < K
        ended = tl.where(bit == 1, float("-inf"), total)
        total = tl.where(is_inside, total + step, ended)
        current = tl.where(is_inside, 2 * current + bit, current)
    tl.store(out_values + place * E + end, total)
    tl.store(out_heap + place * E + end, current)
