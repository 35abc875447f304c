"""Walks through the tree of an output layer that look at few of its nodes.

Heap numbers as in :mod:`catnat.tree`: nodes are 1..K-1, leaves K..2K-1, and the root is 1. A walk
asks a function ``logs(rows, heap)`` for log(1 - a) and log a of node heap[i] in row rows[i].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from catnat.numerics import can_branch_on, uniform
from catnat.tree import levels

_SHARE = 128  # a search stops paying where it looks at more than K / 128 nodes a row
_SLACK = 1e-4  # of log-probabilities that are equal but for rounding

NodeLogs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class TopK(NamedTuple):
    """The best classes of each row, the best one first."""

    values: Tensor  # log-probabilities
    indices: Tensor


def leaf_paths(leaf: Tensor, num_categories: int) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes above leaves, root first: score indices, bits, and whether there is such a node.

    A leaf (*) has H entries in each, (*, H). If K is not a power of two, some leaves have H - 1
    nodes above them: the last entry is then the root again, and not inside.

    >>> nodes, bits, inside = leaf_paths(torch.tensor(3), 5)
    >>> nodes.tolist(), bits.tolist(), inside.tolist()
    ([0, 1, 3], [False, False, False], [True, True, True])
    """
    K, H = num_categories, (num_categories - 1).bit_length()
    heap = leaf[..., None] + K
    depth = torch.where(heap >= 2**H, H, H - 1)
    shift = depth - torch.arange(H, device=leaf.device)
    nodes = heap >> shift
    inside = nodes < K
    bits = ((heap >> (shift - 1).clamp_min(0)) & 1).bool()
    return torch.where(inside, nodes - 1, 0), bits, inside


def random_leaves(
    logs: NodeLogs, rows: Tensor, num_categories: int, generator: torch.Generator | None
) -> Tensor:
    """A leaf for each row, drawn by a walk from the root, (P,) -> (P,); -1 where a score is NaN."""
    heap = torch.ones_like(rows)
    broken = torch.zeros_like(rows, dtype=torch.bool)
    for _ in levels(num_categories):
        inner = heap < num_categories
        right = logs(rows, torch.where(inner, heap, 1))[1].double()
        u = uniform(right.shape, right, generator)
        heap = torch.where(inner, 2 * heap + (u < right.exp()).long(), heap)
        broken |= right.isnan()
    if can_branch_on(broken) and bool(broken.any()):
        raise ValueError("scores must be numbers to draw samples, got NaN")
    return torch.where(broken, -1, heap - num_categories)


def best_leaves(
    logs: NodeLogs, first: int, values: Tensor, num_categories: int, k: int
) -> TopK | None:
    """The k likeliest leaves of each row, (M, k); None where computing all leaves is cheaper.

    A beam search finds k good leaves. The k-th of them bounds from below what a node must have to
    hold one of the best: the second pass visits all nodes above this bound.

    Args:
        logs: of the nodes.
        first: heap number of the first node to start from.
        values: log-probabilities of the nodes first, first + 1, ..., (M, n).
        num_categories: K.
        k: how many leaves.
    """
    heap = torch.arange(first, first + values.shape[1], device=values.device).expand_as(values)
    bound = _beam(logs, heap, values, num_categories, k) - _SLACK
    found = _visit_above(logs, heap, values, num_categories, bound)
    if found is None:
        return None
    rows, by_row = found[0].sort(stable=True)
    counts = rows.bincount(minlength=len(bound))
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    table = values.new_full((len(bound), int(counts.max())), -torch.inf)
    table[rows, place] = found[2][by_row]
    which = torch.zeros_like(table, dtype=torch.long)
    which[rows, place] = found[1][by_row]
    best = table.topk(k, -1)
    return TopK(best.values, which.gather(-1, best.indices))


def _beam(logs: NodeLogs, heap: Tensor, values: Tensor, K: int, k: int) -> Tensor:
    """Log-probability of the k-th of some good leaves, which need not be the best, (M,)."""
    rows = torch.arange(len(values), device=values.device)[:, None]
    while True:
        values, best = values.topk(min(max(4 * k, 32), values.shape[1]), -1)
        heap = heap.gather(1, best)
        inner = heap < K
        if not bool(inner.any()):
            return values[:, k - 1]
        at = torch.where(inner, heap, 1).flatten()
        left, right = (x.view_as(values) for x in logs(rows.expand_as(heap).flatten(), at))
        heap = torch.cat((torch.where(inner, 2 * heap, heap), 2 * heap + 1), 1)
        below = torch.where(inner, values + left, values)
        values = torch.cat((below, torch.where(inner, values + right, -torch.inf)), 1)


def _visit_above(
    logs: NodeLogs, heap: Tensor, values: Tensor, K: int, bound: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Row, leaf and log-probability of all leaves not below the bound of their row, (P,) each.

    NaN is not below a bound, and so is found.
    """
    found, visited = [], 0
    rows, place = (~(values < bound[:, None])).nonzero(as_tuple=True)
    heap, values = heap[rows, place], values[rows, place]
    while len(rows):
        inner = heap < K
        found.append((rows[~inner], heap[~inner] - K, values[~inner]))
        rows, heap, values = rows[inner], heap[inner], values[inner]
        visited += len(rows)
        if visited > len(bound) * K // _SHARE:
            return None
        left, right = logs(rows, heap)
        heap = torch.cat((2 * heap, 2 * heap + 1))
        values, rows = torch.cat((values + left, values + right)), rows.repeat(2)
        keep = ~(values < bound[rows])
        rows, heap, values = rows[keep], heap[keep], values[keep]
    a, b, c = zip(*found, strict=True)
    return torch.cat(a), torch.cat(b), torch.cat(c)
