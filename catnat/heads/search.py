"""Search in a tree: the likeliest leaves and draws without replacement, from few of its nodes.

A node is at least as likely as every leaf below it. :func:`best_leaves` therefore keeps the 64
likeliest nodes of each level. If no omitted node is likelier than the k-th leaf found, the result
is exact, as it usually is. For all other rows, a second search visits exactly the nodes that are
likelier than this leaf.

:func:`draw_leaves` is the top-down Gumbel top-k of Kool, van Hoof and Welling (2019): every node
holds the largest of the perturbed log-probabilities below it, so the k largest nodes of a level
are above the k largest leaves.

Rows are distributions over the same tree, M of them. Nodes are numbered as in
:mod:`catnat.heads.nodes`.
"""

import torch
from torch import Tensor

from catnat.heads.activations import Activation
from catnat.heads.nodes import Sides, path_sums
from catnat.kernels.reference import constants_at
from catnat.numerics import exponential, log_never, uniform

BEAM = 64
"""Nodes of a level that a search keeps, a power of two."""
FEW = 16  # a search is for at most 1/16 of all leaves: for more, computing all leaves is faster
_FULL_SHARE = 64  # a level with more than 1/64 of all nodes: computing all leaves is faster
_AT_ONCE = 2**24  # numbers that a search holds at once


class SearchTree:
    """M distributions over the leaves of one tree, given by the scores (M, K-1) of its nodes.

    A subclass that does not have all scores overrides :meth:`first_scores` and :meth:`scores_at`.
    """

    levels_at_once = 3  # that a beam goes down: fewer steps, for more scores
    prefers_all = False  # whether all leaves take less time than a search by a threshold

    def __init__(
        self,
        scores: Tensor,
        num_categories: int,
        activation: Activation,
        constants: Tensor | None,
    ) -> None:
        self.scores = scores
        self.num_categories = num_categories
        self.num_levels = (num_categories - 1).bit_length()
        self.activation = activation
        self.constants = constants

    def first_scores(self, rows: Tensor, count: int) -> Tensor:
        """Scores of the first nodes, breadth first, (R,) -> (R, count)."""
        return self.scores[rows, :count]

    def scores_at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Scores of nodes, from their indices, (R,) and (R, n) -> (R, n)."""
        return self.scores[rows[:, None], nodes]

    def logs_at(self, rows: Tensor, nodes: Tensor) -> Sides:
        """Log-probabilities of the two sides of nodes, (R,) and (R, n) -> (R, n) each."""
        constants = constants_at(self.constants, nodes)
        return self.activation.log_activation(self.scores_at(rows, nodes), constants)

    def first_leaves(self, rows: Tensor, count: int) -> Tensor:
        """Log-probabilities below the first nodes, as if the tree ended there, (R, count + 1)."""
        constants = None if self.constants is None else self.constants[:, :count]
        logs = self.activation.log_activation(self.first_scores(rows, count), constants)
        return path_sums(*logs)[1]

    def below(
        self, rows: Tensor, values: Tensor, heap: Tensor, num_levels: int
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and heap numbers some levels further down, (R, n) -> (R, 2^levels n).

        There are so many levels below all nodes.
        """
        lowest = torch.finfo(values.dtype).min  # above that of a child that does not exist
        if num_levels == 1:
            left, right = self.logs_at(rows, heap - 1)
            values = torch.stack((values + left, values + right), -1)
        else:
            # Indices of a node's subtree, breadth first: 2^d heap + i - 1.
            powers = [2**level for level in range(num_levels) for _ in range(2**level)]
            offsets = [i - 1 for level in range(num_levels) for i in range(2**level)]
            factor, offset = torch.tensor((powers, offsets), device=heap.device)
            nodes = heap[:, :, None] * factor + offset
            left, right = self.logs_at(rows, nodes.flatten(1))
            further = path_sums(left.view(nodes.shape), right.view(nodes.shape))[1]
            values = values[:, :, None] + further
        count = values.shape[-1]
        ends = heap[:, :, None] * count + torch.arange(count, device=heap.device)
        return values.clamp_min(lowest).flatten(1), ends.flatten(1)

    def last_level(self, rows: Tensor, values: Tensor, heap: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`below` for the last level, where some nodes are leaves.

        A leaf stays, beside a child that does not exist and has -inf.
        """
        inside = heap < self.num_categories
        left, right = self.logs_at(rows, torch.where(inside, heap - 1, 0))
        lowest = torch.finfo(values.dtype).min
        lower = torch.where(inside, (values + left).clamp_min(lowest), values)
        upper = torch.where(inside, (values + right).clamp_min(lowest), -torch.inf)
        next_heap = torch.where(inside, 2 * heap, heap)
        return torch.cat((lower, upper), 1), torch.cat((next_heap, 2 * heap + 1), 1)

    def descend(
        self, rows: Tensor, values: Tensor, heap: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, int]:
        """Log-probabilities and heap numbers some levels further down, and their depth."""
        remaining = self.num_levels - 1 - depth
        if not remaining:
            return *self.last_level(rows, values, heap), self.num_levels
        num_levels = min(self.levels_at_once, remaining)
        return *self.below(rows, values, heap, num_levels), depth + num_levels

    def first_depth(self, width: int) -> int:
        """Depth of the level where a beam begins, with all of its nodes."""
        return min(width, self.num_categories).bit_length() - 1


def best_leaves(
    tree: SearchTree, rows: Tensor, k: int, floor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and numbers of the k likeliest leaves, (R,) -> (R, k) each, sorted.

    NaN counts as the largest number, as in ``torch.topk``.

    Args:
        tree: the tree.
        rows: the rows to search, int64.
        k: number of leaves, at most K.
        floor: log-probabilities (R,): leaves that are not above may be any ones. None: all count.
    """
    values, leaves, bound = _by_beam(tree, rows, k)
    threshold = values[:, -1] if floor is None else torch.maximum(values[:, -1], floor)
    open_rows = (bound > threshold).nonzero()[:, 0]  # where the threshold is NaN, so are k leaves
    if not len(open_rows):
        return values, leaves
    found = values[open_rows], leaves[open_rows]
    if tree.prefers_all:
        improved = _of_all(tree, rows[open_rows], k)
    else:
        improved = _by_threshold(tree, rows[open_rows], threshold[open_rows], found)
    return values.index_copy(0, open_rows, improved[0]), leaves.index_copy(
        0, open_rows, improved[1]
    )


def _by_beam(tree: SearchTree, rows: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k likeliest leaves that a beam finds, and the likeliest node that it left out, (R,)."""
    K = tree.num_categories
    width = max(BEAM, 1 << (2 * k - 1).bit_length())
    values, heap, depth = _first_level(tree, rows, width)
    bound = torch.full_like(values[:, 0], -torch.inf)
    while depth < tree.num_levels:
        values, heap, bound = _likeliest(values, heap, bound, width)
        values, heap, depth = tree.descend(rows, values, heap, depth)
    best = values.topk(k, 1)
    return best.values, heap.gather(1, best.indices) - K, bound


def _first_level(tree: SearchTree, rows: Tensor, width: int) -> tuple[Tensor, Tensor, int]:
    """Log-probabilities and heap numbers of all nodes of a level, (R, n) each, and its depth."""
    depth = tree.first_depth(width)
    values = tree.first_leaves(rows, 2**depth - 1)
    heap = torch.arange(2**depth, 2 ** (depth + 1), device=rows.device)
    return values, heap.expand(len(rows), -1), depth


def _likeliest(
    values: Tensor, heap: Tensor, bound: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest nodes, and the likeliest node that was left out so far, (R,)."""
    if values.shape[1] <= width:
        return values, heap, bound
    ranked = values.topk(width + 1, 1)
    kept = ranked.indices[:, :-1]
    return ranked.values[:, :-1], heap.gather(1, kept), torch.maximum(bound, ranked.values[:, -1])


def _by_threshold(
    tree: SearchTree, rows: Tensor, threshold: Tensor, found: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The k likeliest of the leaves above a threshold and of k leaves that are known already.

    (R,) and (R, k) each -> (R, k) each. The nodes above the threshold form one list for all rows.
    """
    K, k = tree.num_categories, found[0].shape[1]
    values, heap, depth = _first_level(tree, rows, BEAM)
    kept = values > threshold[:, None]
    owner = kept.nonzero()[:, 0]
    values, heap = values[kept], heap[kept]
    for step in range(depth, tree.num_levels):
        listed = rows[owner], values[:, None], heap[:, None]
        is_last = step == tree.num_levels - 1
        pair, pair_heap = tree.last_level(*listed) if is_last else tree.below(*listed, 1)
        kept = pair > threshold[owner, None]
        owner = owner[:, None].expand(-1, 2)[kept]
        values, heap = pair[kept], pair_heap[kept]
        if len(heap) * _FULL_SHARE > len(rows) * K:
            return _of_all(tree, rows, k)
    known = torch.arange(len(rows), device=rows.device)[:, None].expand(-1, k)
    owner = torch.cat((known.flatten(), owner))
    leaves = torch.cat((found[1].flatten(), heap - K))
    values = torch.cat((found[0].flatten(), values))
    # Each leaf once: the second search found some of the known ones again.
    place = owner * K + leaves
    place, order = place.sort(stable=True)
    is_first = torch.ones_like(place, dtype=torch.bool)
    is_first[1:] = place[1:] != place[:-1]
    unique = order[is_first]
    # By row, and in a row from the likeliest on.
    unique = unique[values[unique].argsort(descending=True, stable=True)]
    unique = unique[owner[unique].argsort(stable=True)]
    sizes = owner[unique].bincount(minlength=len(rows))
    start = sizes.cumsum(0) - sizes
    best = unique[start[:, None] + torch.arange(k, device=rows.device)]
    return values[best], leaves[best]


def _of_all(tree: SearchTree, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest leaves, after all leaves of a few rows at a time were computed."""
    K = tree.num_categories
    parts = [
        tree.first_leaves(part, K - 1).topk(k, 1) for part in rows.split(max(1, _AT_ONCE // K))
    ]
    values, leaves = (torch.cat(part) for part in zip(*parts, strict=True))
    return values, leaves


def draw_leaves(
    tree: SearchTree,
    rows: Tensor,
    k: int,
    generator: torch.Generator | None,
    start: Sides | None = None,
) -> tuple[Tensor, Tensor]:
    """k leaves without replacement, (R,) -> (R, k), in the order of the draws.

    Beside them are their perturbed log-probabilities, which decide this order. A leaf of
    probability 0 comes only if there are no others, and where a score on a path is NaN, so is the
    perturbed log-probability.

    Args:
        tree: the tree.
        rows: the rows to draw from, int64.
        k: number of leaves, at most K.
        generator: random number generator; None is torch's own.
        start: log-probability and perturbed log-probability of the root, (R,) each in float64, if
            the tree is part of a larger one.
    """
    M = len(rows)
    if start is None:
        noise = exponential((M,), rows, generator)
        start = torch.zeros_like(noise), -noise.log()
    values, perturbed = (x[:, None] for x in start)
    heap = torch.ones_like(rows)[:, None]
    for _ in range(tree.num_levels):
        inside = heap < tree.num_categories
        logs = tree.logs_at(rows, torch.where(inside, heap - 1, 0))
        impossible = values < log_never(logs[0].dtype) / 2  # scores below do not matter, even NaN
        left, right = (log.double().masked_fill(impossible, 0.0) for log in logs)
        goes_right = uniform(heap.shape, rows, generator) < right.exp()
        # One child has the noise of its parent. That of the other one is cut off there.
        loser = values + torch.where(goes_right, left, right)
        beyond = exponential(heap.shape, rows, generator).log() - loser
        other = -torch.logaddexp(-perturbed, beyond).clamp_max(1e308)
        lower = torch.where(inside & goes_right, other, perturbed)
        upper = torch.where(goes_right, perturbed, other)
        upper = torch.where(inside, upper, -torch.inf)
        values = torch.cat((torch.where(inside, values + left, values), values + right), 1)
        heap = torch.cat((torch.where(inside, 2 * heap, heap), 2 * heap + 1), 1)
        perturbed = torch.cat((lower, upper), 1)
        if heap.shape[1] > k:
            perturbed, kept = perturbed.topk(k, 1)
            values, heap = values.gather(1, kept), heap.gather(1, kept)
    perturbed, order = perturbed.sort(1, descending=True)
    return heap.gather(1, order) - tree.num_categories, perturbed
