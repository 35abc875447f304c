"""Likeliest classes and random ones of a :class:`catnat.TreeLinear`, by few rows of its weight."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from catnat.checks import require_integer_within, require_positive, require_within
from catnat.distributions import draw, gumbel
from catnat.heads.nodes import walk_down
from catnat.heads.search import SearchTree, best_leaves, draw_leaves
from catnat.kernels.dispatch import tree_log_probs
from catnat.kernels.reference import constants_at
from catnat.numerics import (
    LOG_ZERO,
    at_least_float32,
    can_branch_on,
    floored_sums,
    log_never,
    uniform,
    without_autocast,
)

if TYPE_CHECKING:
    from catnat.output_layer.tree_linear import TreeLinear

_CHUNK = 2**24  # numbers that are held at once
_LARGE_CHUNK = 2**28  # where a single row has many numbers
_SEARCH_COST = {"cpu": 2**25, "cuda": 2**32}  # multiplications of all scores that a search saves
_FUSED_DEPTH = 14  # most levels near the root that fused kernels compute with all of their nodes
_FUSED_FROM = 2**15  # smallest K that fused kernels search
_PREFERS_ALL = 2**21  # largest K of which a GPU computes all classes rather than search twice
_NARROW = 512  # most features of which three times as many rows cost less than two steps
_FEW = 16  # a search is for fewer than 1 / 16 of the classes
_MULTINOMIAL_LIMIT = 2**24  # torch.multinomial takes no more classes
_NUCLEUS = 64  # classes that are looked at first for a nucleus


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
        size = max(1, _CHUNK // (nodes.shape[1] * layer.in_features))
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
    if len(states) and is_large and _FEW * k <= K - layer.num_frequent:
        values, places = _search(layer, states, k)
        return values, layer._classes_at(places)
    size = max(64, _CHUNK // K) if K <= 2**22 else max(1, _LARGE_CHUNK // K)
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


def sample(
    layer: "TreeLinear", states: Tensor, repeats: int, generator: torch.Generator | None
) -> Tensor:
    """Random places, (M, D) -> (repeats, M): a draw of the softmax, then a walk to a leaf.

    -1 where a score that matters is NaN.
    """
    leaf = _walk(layer, states, repeats, generator)
    place = torch.where(leaf < 0, -1, leaf + layer.num_frequent).view(repeats, -1)
    if layer.shortlist is None:
        return place
    column = _draw_column(layer, states, repeats, generator)
    return torch.where(column < layer.num_frequent, column, place)


def _draw_column(
    layer: "TreeLinear", states: Tensor, repeats: int, generator: torch.Generator | None
) -> Tensor:
    """Random columns of the softmax, (M, D) -> (repeats, M); -1 where a logit is NaN or infinite.

    On CUDA one draw is the largest of the logits with Gumbel noise: few kernels, for a call whose
    time is that of its launches.
    """
    if states.is_cuda and repeats == 1:
        logits = layer._logits(states)
        noise = torch.empty_like(logits).exponential_(generator=generator)
        largest, column = (logits - noise.log_()).max(1)
        return torch.where(largest.isfinite(), column, -1)[None]
    probs = layer._block(states).exp()
    is_nan = probs.isnan().any(-1)
    probs = torch.where(is_nan[:, None], 1.0, probs)
    column = draw(probs, torch.Size((repeats,)), generator)
    return torch.where(is_nan, -1, column)


def _walk(
    layer: "TreeLinear", states: Tensor, repeats: int, generator: torch.Generator | None
) -> Tensor:
    """Leaves that random walks from the root reach, (M, D) -> (repeats M,); -1 for NaN."""
    head = layer.head
    rows = torch.arange(len(states), device=states.device).repeat(repeats)
    uniforms = uniform((head.num_scores.bit_length(), len(rows)), states, generator)
    fused = layer._fused(states)
    if fused is not None:
        from catnat.kernels.triton_search import sample

        return sample(fused, states, rows, uniforms)
    constants = layer._constants(states)
    dtype = at_least_float32(states[:0]).dtype
    size = max(1, _CHUNK // layer.in_features)

    def goes_right(nodes: Tensor, level: int) -> tuple[Tensor, Tensor]:
        parts = [
            (states[row] * layer.weight[node].to(states.dtype)).sum(-1, dtype=dtype)
            for row, node in zip(rows.split(size), nodes.split(size), strict=True)
        ]
        scores = torch.cat(parts)
        if layer.bias is not None:
            scores = scores + layer.bias[nodes].to(scores.dtype)
        right = head.activation.log_activation(scores, constants_at(constants, nodes))[1]
        return uniforms[level] < right.double().exp(), right.isnan()

    return walk_down(head.num_categories, rows, goes_right)


def sample_different(
    layer: "TreeLinear", states: Tensor, k: int, generator: torch.Generator | None
) -> Tensor:
    """k places without replacement, (M, D) -> (k, M), in the order of the draws; -1 for NaN."""
    tree = LayerTree(layer, states)
    rows = torch.arange(len(states), device=states.device)
    count = min(k, tree.num_categories)
    F = layer.num_frequent
    if layer.shortlist is None:
        places, perturbed = draw_leaves(tree, rows, count, generator)
    else:
        block = layer._block(states)
        noisy = gumbel(block, generator)  # the root of the tree is one event of the softmax
        start = block[:, -1].double(), noisy[:, -1]
        leaves, perturbed = draw_leaves(tree, rows, count, generator, start)
        columns = torch.arange(F, device=states.device).expand(len(states), -1)
        best = torch.cat((noisy[:, :-1], perturbed), 1).topk(k, 1)
        places = torch.cat((columns, leaves + F), 1).gather(1, best.indices)
        perturbed = best.values
    return torch.where(perturbed.isnan(), -1, places).T


def sample_filtered(
    layer: "TreeLinear",
    states: Tensor,
    repeats: int,
    generator: torch.Generator | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Tensor:
    """Random classes among the likeliest ones, (M, D) -> (repeats, M).

    ``top_k`` and a ``top_p`` at temperature 1 search. Another temperature without ``top_k`` needs
    all log-probabilities.
    """
    require_positive(temperature=temperature)
    if top_p is not None:
        require_within(0, 1, "(]", top_p=top_p)
    if top_k is not None:
        require_integer_within(1, layer.num_categories, top_k=top_k)
        logs, classes = topk(layer, states, top_k)
        return _draw_ranked(logs / temperature, classes, repeats, generator, top_p)
    if temperature == 1 and top_p is not None:
        return _sample_nucleus(layer, states, repeats, generator, top_p)
    parts = []
    size = max(1, (_LARGE_CHUNK if states.is_cuda else _CHUNK) // layer.num_categories)
    for part in states.split(size):
        logs = layer.log_probs(part) / temperature
        if top_p is not None:
            logs, classes = logs.sort(1, descending=True)
            parts.append(_draw_ranked(logs, classes, repeats, generator, top_p))
            continue
        is_nan = logs.isnan().any(1)
        if layer.num_categories < _MULTINOMIAL_LIMIT:
            drawn = draw(logs.nan_to_num().softmax(1), torch.Size((repeats,)), generator)
        else:
            noisy = [gumbel(logs, generator).argmax(1) for _ in range(repeats)]
            drawn = torch.stack(noisy)
        parts.append(torch.where(is_nan, -1, drawn))
    return torch.cat(parts, 1)


def _sample_nucleus(
    layer: "TreeLinear",
    states: Tensor,
    repeats: int,
    generator: torch.Generator | None,
    top_p: float,
) -> Tensor:
    """Draws from the fewest classes that have the probability ``top_p`` together.

    The likeliest classes are searched for, more and more of them, until they have it.
    """
    K = layer.num_categories
    drawn = torch.empty((repeats, len(states)), dtype=torch.long, device=states.device)
    rows = torch.arange(len(states), device=states.device)
    count = min(_NUCLEUS, K)
    while len(rows):
        logs, classes = topk(layer, states[rows], count)
        is_enough = ~(logs.double().exp().sum(1) < top_p) | (count == K)  # NaN is enough
        chosen = rows[is_enough]
        drawn[:, chosen] = _draw_ranked(
            logs[is_enough], classes[is_enough], repeats, generator, top_p, is_share=True
        )
        rows = rows[~is_enough]
        count = min(8 * count, K)
    return drawn


def _draw_ranked(
    logs: Tensor,
    classes: Tensor,
    repeats: int,
    generator: torch.Generator | None,
    top_p: float | None,
    is_share: bool = False,
) -> Tensor:
    """Draws from sorted classes, (M, k) each -> (repeats, M); -1 where a logarithm is NaN.

    Args:
        logs: log-probabilities, which need not be normalized, from the largest one on.
        classes: the classes.
        repeats: number of draws.
        generator: random number generator; None is torch's own.
        top_p: the probability of the first classes that are kept; None keeps all.
        is_share: whether the log-probabilities are those of a part of the classes.
    """
    probs = logs.double().exp() if is_share else logs.double().softmax(1)
    is_nan = probs.isnan().any(1)
    probs = torch.where(is_nan[:, None], 1.0, probs)
    if top_p is not None:
        before = probs.cumsum(1) - probs
        before[:, 0] = 0
        probs = torch.where(before < top_p, probs, 0.0)
    column = draw(probs, torch.Size((repeats,)), generator)
    drawn = classes.gather(1, column.T).T
    return torch.where(is_nan, -1, drawn)
