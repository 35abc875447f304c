"""The likeliest classes of a :class:`catnat.TreeLinear`, by few rows of its weight."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from catnat.heads.search import FEW, SearchTree, best_leaves
from catnat.kernels.dispatch import tree_log_probs
from catnat.numerics import (
    LOG_ZERO,
    at_least_float32,
    can_branch_on,
    floored_sums,
    log_never,
    without_autocast,
)

if TYPE_CHECKING:
    from catnat.output_layer.tree_linear import TreeLinear

CHUNK = 2**24  # numbers that are held at once
LARGE_CHUNK = 2**28  # where a single row has many numbers
_SEARCH_COST = {"cpu": 2**25, "cuda": 2**32}  # multiplications of all scores that a search saves
_FUSED_DEPTH = 14  # most levels near the root that fused kernels compute with all of their nodes
_FUSED_FROM = 2**15  # smallest K that fused kernels search
_PREFERS_ALL = 2**21  # largest K of which a GPU computes all classes rather than search twice
_NARROW = 512  # most features of which three times as many rows cost less than two steps


class LayerTree(SearchTree):
    """The trees at some hidden states, (M, D): scores of nodes are computed where a search goes."""

    def __init__(self, layer: "TreeLinear", states: Tensor) -> None:
        head = layer.head
        super().__init__(states, head.num_categories, head.activation, layer._constants(states))
        self.layer = layer
        self.states = states
        self.levels_at_once = 3 if layer.in_features <= _NARROW else 1
        self.prefers_all = states.is_cuda and self.num_categories <= _PREFERS_ALL
        self.fused = layer._fused(states)

    def first_scores(self, rows: Tensor, count: int) -> Tensor:
        """Scores of the first nodes, breadth first, (R,) -> (R, count)."""
        layer = self.layer
        scores = at_least_float32(layer._linear(self.states[rows], layer.weight[:count], None))
        return scores if layer.bias is None else scores + layer.bias[:count].to(scores.dtype)

    def first_depth(self, width: int) -> int:
        """Depth of the level where a beam begins, with all of its nodes.

        Fused kernels compute many nodes near the root at once, and three levels below them.
        """
        depth = super().first_depth(width)
        if self.fused is None:
            return depth
        return max(depth, min(_FUSED_DEPTH, self.num_levels - 3))

    def first_leaves(self, rows: Tensor, count: int) -> Tensor:
        """Log-probabilities below the first nodes, as if the tree ended there, (R, count + 1)."""
        if self.fused is None or count >= 2 ** (_FUSED_DEPTH + 1):
            return super().first_leaves(rows, count)
        constants = None if self.constants is None else self.constants[:, :count].contiguous()
        logs = tree_log_probs(self.first_scores(rows, count), self.activation, constants)
        return torch.where(logs == LOG_ZERO, log_never(logs.dtype), logs)

    def descend(
        self, rows: Tensor, values: Tensor, heap: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, int]:
        """Log-probabilities and heap numbers some levels further down, and their depth."""
        if self.fused is None:
            return super().descend(rows, values, heap, depth)
        from catnat.kernels.triton_search import LEVELS, descend

        return *descend(self.fused, self.states, rows, values, heap), depth + LEVELS

    def scores_at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Scores of nodes, from their indices, (R,) and (R, n) -> (R, n)."""
        layer, states = self.layer, self.states
        size = max(1, CHUNK // (nodes.shape[1] * layer.in_features))
        parts = []
        with without_autocast(states):
            for row, node in zip(rows.split(size), nodes.split(size), strict=True):
                state = states[row][:, :, None]
                parts.append(torch.bmm(layer.weight[node].to(states.dtype), state)[:, :, 0])
        scores = at_least_float32(torch.cat(parts))
        return scores if layer.bias is None else scores + layer.bias[nodes].to(scores.dtype)


def topk(layer: "TreeLinear", states: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the k likeliest classes, and these, (M, D) -> (M, k) each, sorted.

    By search where that is faster than all classes, a few rows at a time.
    """
    K, D = layer.num_categories, layer.in_features
    device = states.device.type
    cost = K * (D + 64) * max(1, len(states) // 64 if states.is_cuda else len(states))
    is_large = cost > _SEARCH_COST.get(device, math.inf)
    if layer._fused(states) is not None:
        is_large = K >= _FUSED_FROM
    if len(states) and is_large and FEW * k <= K - layer.num_frequent:
        values, places = _search(layer, states, k)
        return values, layer._classes_at(places)
    size = max(64, CHUNK // K) if K <= 2**22 else max(1, LARGE_CHUNK // K)
    parts = [layer.log_probs(part).topk(k, -1) for part in states.split(size)]
    values, classes = (torch.cat(part) for part in zip(*parts, strict=True))
    return values, classes


def _search(layer: "TreeLinear", states: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities and places of the k likeliest classes, (M, k) each.

    The classes of the shortlist come first: the tree is searched above the k-th of these alone.
    """
    tree = LayerTree(layer, states)
    rows = torch.arange(len(states), device=states.device)
    if layer.shortlist is None:
        values, leaves = best_leaves(tree, rows, k)
        return floored_sums(values), leaves
    F = layer.num_frequent
    block = layer._block(states)
    log_rare = block[:, -1:]
    frequent = block[:, :-1].topk(min(k, F), 1)
    floor = None
    if k <= F:
        floor = frequent.values[:, -1] - log_rare[:, 0]
        if can_branch_on(floor):
            rows = (~(floor >= 0)).nonzero()[:, 0]  # elsewhere no rare class is likely enough
            floor = floor[rows]
    places = torch.zeros((len(states), k), dtype=torch.long, device=states.device)
    values = torch.full(places.shape, -torch.inf, dtype=block.dtype, device=states.device)
    if len(rows):
        below, leaves = best_leaves(tree, rows, k, floor)
        values[rows] = floored_sums(below).to(values.dtype)
        places[rows] = leaves
    values = torch.cat((frequent.values, values + log_rare), 1)
    places = torch.cat((frequent.indices, places + F), 1)
    best = values.topk(k, 1)
    return best.values, places.gather(1, best.indices)
