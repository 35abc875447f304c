"""Trees, their paths and sparsemax in plain torch: what the C and Triton kernels must agree with.

These functions take every device and dtype, work under ``torch.func`` and ``torch.compile``, and
are differentiable any number of times. The kernels' backward passes are here too, as functions of
the gradient, because a second derivative goes through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from catnat.splits import Split
from catnat.tree import path_sums, subtree_sums


def tree_log_probs(scores: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Log-probability of every leaf, (*, K-1) -> (*, K)."""
    return path_sums(*split.log_split(scores, constants))[1]


def tree_vjp(scores: Tensor, grad: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Gradient in the scores, (*, K-1), from the gradient in the log-probabilities, (*, K)."""
    left, right = subtree_sums(grad)
    left_slope, right_slope = split.slopes(scores, constants)
    return right * right_slope - left * left_slope


def tree_log_prob(scores: Tensor, leaf: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Log-probability of one leaf per row: (*, K-1) and (*), which broadcast -> (*)."""
    shape = torch.broadcast_shapes(scores.shape[:-1], leaf.shape)
    node, right_hand, inside = _path(leaf.expand(shape), K := scores.shape[-1] + 1)
    left, right = split.log_split(take(scores, node), _at(constants, node))
    logs = torch.where(inside, torch.where(right_hand, right, left), 0.0).sum(-1)
    return logs * _one_or_nan(leaf, K, logs.dtype)


def tree_path_vjp(
    scores: Tensor, leaf: Tensor, grad: Tensor, split: Split, constants: Tensor | None
) -> Tensor:
    """Gradient in the scores, (B, K-1), from that in the log-probabilities of leaves, (N, B)."""
    node, right_hand, inside = _path(leaf, K := scores.shape[-1] + 1)  # (N, B, H) each
    left, right = split.slopes(take(scores, node), _at(constants, node))
    slopes = torch.where(inside, torch.where(right_hand, right, -left), 0.0)
    steps = slopes * (grad * _one_or_nan(leaf, K, grad.dtype))[..., None]
    place = _flat_index(scores, node).reshape(-1)
    zeros = torch.zeros_like(scores).reshape(-1)
    return zeros.index_add(0, place, steps.reshape(-1)).view(scores.shape)


def _path(leaf: Tensor, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes above each leaf, from the leaf up, (*) -> (*, H) each.

    Returns:
        Index of the node's score; whether the path goes right there; whether there is a node: a
        leaf of the upper level has one less above it. A leaf that does not exist counts as leaf 0.
    """
    heap = torch.where((leaf >= 0) & (leaf < K), leaf, 0)[..., None] + K
    level = torch.arange((K - 1).bit_length(), device=leaf.device)
    parent = heap >> (level + 1)
    return (parent - 1).clamp_min(0), (heap >> level) & 1 == 1, parent > 0


def _one_or_nan(leaf: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """1 for a leaf, NaN for a number that is none."""
    return torch.where((leaf >= 0) & (leaf < K), 1.0, torch.nan).to(dtype)


def tree_sample(scores: Tensor, uniforms: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """One leaf per row of uniforms: (*, K-1) and (*, H), which broadcast -> (*).

    -1 where a score on the way is NaN.
    """
    K = scores.shape[-1] + 1
    heap = torch.ones(uniforms.shape[:-1], dtype=torch.int64, device=scores.device)
    lost = torch.zeros_like(heap, dtype=torch.bool)
    for level in range(uniforms.shape[-1]):
        inside = heap < K
        node = torch.where(inside, heap - 1, 0)[..., None]
        left, _ = split.log_split(take(scores, node), _at(constants, node))
        left = left[..., 0].double()
        # u < 1 always, and 0 <= u: a split that is certain always goes its way.
        child = 2 * heap + (uniforms[..., level] >= left.exp())
        heap = torch.where(inside, child, heap)
        lost = lost | (inside & left.isnan())
    return torch.where(lost, -1, heap - K)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Elements of the last dimension, x (*, S) and index (*, H), which broadcast -> (*, H).

    The gradient has the size of x, however many rows of index meet one row of x.
    """
    if x.shape[:-1] == index.shape[:-1]:
        return x.gather(-1, index)
    flat = _flat_index(x, index)
    return x.reshape(-1).index_select(0, flat.reshape(-1)).view(flat.shape)


def _flat_index(x: Tensor, index: Tensor) -> Tensor:
    """Index into ``x.reshape(-1)`` of elements of the last dimension, arguments as in take."""
    rows = torch.arange(x.shape[:-1].numel(), device=x.device).view(*x.shape[:-1], 1)
    return rows * x.shape[-1] + index


def _at(constants: Tensor | None, node: Tensor) -> Tensor | None:
    """The constants of some nodes, (R, S) and (*, H) -> (R, *, H)."""
    if constants is None:
        return None
    return constants.index_select(1, node.reshape(-1)).view(len(constants), *node.shape)


def sparsemax_probs(scores: Tensor) -> Tensor:
    """Projection of the scores onto the simplex (Martins and Astudillo, 2016), (*, K) -> (*, K).

    p_k = max(s_k - tau, 0), with tau such that the p_k sum to 1; tau is found by sorting. In
    float64, so that probabilities just above 0 keep their relative accuracy.
    """
    z = scores.double()
    z = z - z.amax(-1, keepdim=True).detach()
    ranked = z.sort(-1, descending=True).values.clamp_min(-2)  # lower ones never matter
    beyond = ranked.cumsum(-1) - 1
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (rank * ranked > beyond).sum(-1, keepdim=True)
    excess = z - beyond.gather(-1, (size - 1).clamp_min(0)) / size
    return torch.where(excess <= 0, 0.0, excess).to(scores.dtype)  # not clamp: NaN's gradient


def sparsemax_vjp(scores: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from the gradient in the log-probabilities, (*, K) -> (*, K)."""
    probs = sparsemax_probs(scores)
    support = ~(probs <= 0)
    pulled = torch.where(support, grad / torch.where(support, probs, 1.0), 0.0)
    mean = pulled.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
    return torch.where(support, pulled - mean, 0.0)
