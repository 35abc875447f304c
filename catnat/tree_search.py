"""Walks through the tree of an output layer that look at few of its nodes.

Heap numbers as in :mod:`catnat.tree`: nodes are 1..K-1, leaves K..2K-1, and the root is 1. Scores
of nodes are computed where a walk comes by, see :class:`NodeLogs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from catnat.numerics import at_least_float32, can_branch_on, uniform
from catnat.ops.path_scores import path_scores
from catnat.tree import levels, path_sums

_CHUNK = 2**24  # hidden numbers that are copied at once
_SMALL = 2048  # up to this K all leaves are computed at once
_SHARE = 128  # a search stops paying where it looks at more than K / 128 nodes a row
_SLACK = 1e-4  # of log-probabilities that are equal but for rounding


class TopK(NamedTuple):
    """The best classes of each row, the best one first."""

    values: Tensor  # log-probabilities
    indices: Tensor


def leaf_paths(leaf: Tensor, num_categories: int) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes above leaves, root first: score indices, bits, and whether there is such a node.

    A leaf (*) has H entries in each, (*, H). If K is no power of two, some leaves have H - 1 nodes
    above them: the last entry is then the root again, and not inside.

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


class NodeLogs:
    """log(1 - a) and log a at any nodes, for rows of hidden states.

    Args:
        hidden: (M, D).
        weight: (K-1, D).
        bias: (K-1,), or None.
        log_split: the logarithms from scores and score indices of nodes.
        upper_levels: levels below the root whose scores are one matmul.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        log_split: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        upper_levels: int,
    ) -> None:
        self.hidden, self.weight, self.bias, self.log_split = hidden, weight, bias, log_split
        self.num_categories = weight.shape[0] + 1
        n = min(2**upper_levels - 1, weight.shape[0])
        near_bias = None if bias is None else bias[:n].to(hidden.dtype)
        self.near = at_least_float32(F.linear(hidden, weight[:n].to(hidden.dtype), near_bias))

    def __call__(self, rows: Tensor, heap: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithms at node ``heap[i]`` for row ``rows[i]``, (P,) each."""
        nodes, n = heap - 1, self.near.shape[1]
        if n and nodes.numel() and can_branch_on(nodes) and int(nodes.max()) < n:
            return self.log_split(self.near[rows, nodes], nodes)
        size = max(1, _CHUNK // self.hidden.shape[1])
        scores = [
            path_scores(self.hidden[r], self.weight, self.bias, n[:, None], 0, False)[:, 0]
            for r, n in zip(rows.split(size), nodes.split(size), strict=True)
        ]
        return self.log_split(torch.cat(scores), nodes)

    def frontier(self) -> tuple[int, Tensor]:
        """Below the nodes of the matmul: the first heap number, and log-probabilities (M, n)."""
        n = self.near.shape[1]
        if not n:
            return 1, self.near.new_zeros(len(self.hidden), 1)
        nodes = torch.arange(n, device=self.near.device).expand_as(self.near)
        return n + 1, path_sums(*self.log_split(self.near, nodes))[1]


def random_leaves(logs: NodeLogs, samples: int, generator: torch.Generator | None) -> Tensor:
    """Leaves drawn by walks from the root, (samples * M,); -1 where a score is NaN."""
    K, rows = logs.num_categories, torch.arange(len(logs.hidden), device=logs.hidden.device)
    rows = rows.repeat(samples)
    heap = torch.ones_like(rows)
    broken = torch.zeros_like(rows, dtype=torch.bool)
    for _ in levels(K):
        inner = heap < K
        right = logs(rows, torch.where(inner, heap, 1))[1].double()
        u = uniform(right.shape, right, generator)
        heap = torch.where(inner, 2 * heap + (u < right.exp()).long(), heap)
        broken |= right.isnan()
    if can_branch_on(broken) and bool(broken.any()):
        raise ValueError("scores must be numbers to draw samples, got NaN")
    return torch.where(broken, -1, heap - K)


def best_leaves(logs: NodeLogs, k: int) -> TopK | None:
    """The k likeliest leaves of each row; None where computing all leaves is cheaper.

    A beam search finds k good leaves. The k-th of them bounds from below what a node must have to
    hold one of the best: the second pass visits all nodes above this bound.
    """
    if logs.num_categories <= max(_SMALL, 2 * k):
        return None
    bound = _beam(logs, k)[:, -1] - _SLACK
    found = _visit_above(logs, bound)
    if found is None:
        return None
    rows, leaves, values = found
    rows, by_row = rows.sort(stable=True)
    counts = rows.bincount(minlength=len(bound))
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    table = values.new_full((len(bound), max(k, int(counts.max()))), -torch.inf)
    table[rows, place] = values[by_row]
    which = torch.zeros_like(table, dtype=torch.long)
    which[rows, place] = leaves[by_row]
    best = table.topk(k, -1)
    return TopK(best.values, which.gather(-1, best.indices))


def _beam(logs: NodeLogs, k: int) -> Tensor:
    """Log-probabilities of k leaves, good ones but not always the best, (M, k), sorted."""
    K, width = logs.num_categories, max(4 * k, 32)
    first, values = logs.frontier()
    heap = torch.arange(first, first + values.shape[1], device=values.device).expand_as(values)
    rows = torch.arange(len(values), device=values.device)[:, None]
    while True:
        values, best = values.topk(min(width, values.shape[1]), -1)
        heap = heap.gather(1, best)
        inner = heap < K
        if not bool(inner.any()):
            return values[:, :k]
        at = torch.where(inner, heap, 1).flatten()
        left, right = logs(rows.expand_as(heap).flatten(), at)
        left, right = left.view_as(values), right.view_as(values)
        children = (torch.where(inner, 2 * heap, heap), 2 * heap + 1)
        below = (torch.where(inner, values + left, values), values + right)
        heap = torch.cat(children, 1)
        values = torch.cat((below[0], torch.where(inner, below[1], -torch.inf)), 1)


def _visit_above(logs: NodeLogs, bound: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Row, leaf and log-probability of all leaves above the bound of their row, (P,) each."""
    K, found, visited = logs.num_categories, [], 0
    first, table = logs.frontier()
    rows, place = (table >= bound[:, None]).nonzero(as_tuple=True)
    values, heap = table[rows, place], first + place
    while len(rows):
        inner = heap < K
        found.append((rows[~inner], heap[~inner] - K, values[~inner]))
        rows, heap, values = rows[inner], heap[inner], values[inner]
        visited += len(rows)
        if visited > len(bound) * K // _SHARE:
            return None
        left, right = logs(rows, heap)
        heap = torch.cat((2 * heap, 2 * heap + 1))
        values = torch.cat((values + left, values + right))
        rows = rows.repeat(2)
        keep = values >= bound[rows]
        rows, heap, values = rows[keep], heap[keep], values[keep]
    a, b, c = zip(*found, strict=True)
    return torch.cat(a), torch.cat(b), torch.cat(c)
