"""Random classes of a :class:`catnat.TreeLinear`, by few rows of its weight."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from catnat.checks import require_integer_within, require_positive, require_within
from catnat.distributions import draw, gumbel
from catnat.heads.nodes import walk_down
from catnat.heads.search import draw_leaves
from catnat.kernels.reference import constants_at
from catnat.numerics import at_least_float32, uniform
from catnat.output_layer.search import CHUNK, LARGE_CHUNK, LayerTree, topk

if TYPE_CHECKING:
    from catnat.output_layer.tree_linear import TreeLinear

_MULTINOMIAL_LIMIT = 2**24  # torch.multinomial takes no more classes
_NUCLEUS = 64  # classes that are looked at first for a nucleus


def sample(
    layer: "TreeLinear", states: Tensor, repeats: int, generator: torch.Generator | None
) -> Tensor:
    """Random places, (M, D) -> (repeats, M): a draw of the softmax, then a walk to a leaf.

    -1 where a score that matters is NaN.
    """
    leaf = _walk(layer, states, repeats, generator)
    place = torch.where(leaf < 0, -1, leaf + layer.num_frequent).view(repeats, len(states))
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
    size = max(1, CHUNK // layer.in_features)

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
    size = max(1, (LARGE_CHUNK if states.is_cuda else CHUNK) // layer.num_categories)
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
