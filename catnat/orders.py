"""Orders of classes on the leaves of a tree: ``order[k]`` is the leaf of class k.

Classes below a common node share all splits above this node, so a layer learns faster and better
if they are alike. The functions here build orders from what is known of the classes:

- :func:`by_frequency`, from counts alone;
- :func:`by_embedding`, from a vector for each class: a trained embedding, weights of a softmax,
  singular vectors of the matrix that says which words of a text follow which
  (``examples/language_model`` does that).

:class:`catnat.TreeLinear` takes an order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from catnat.checks import require_at_least
from catnat.tree import levels, subtree_sums

_CHUNK = 2**21  # numbers of vectors that are worked on together: they stay in a cache


def by_frequency(counts: Tensor) -> Tensor:
    """Order by falling counts, (K,) -> (K,): the most frequent classes get the shortest paths.

    >>> by_frequency(torch.tensor([5, 1, 9]))
    tensor([1, 2, 0])
    """
    if counts.dim() != 1 or len(counts) < 2:
        raise ValueError(f"expected a count for each class, got shape {tuple(counts.shape)}")
    if bool((counts < 0).any()) or bool(counts.isnan().any()):
        raise ValueError(f"counts must be >= 0, got {float(counts.min()):g}")
    return counts.argsort(descending=True, stable=True).argsort()


def by_embedding(vectors: Tensor, rounds: int = 8, seed: int = 0) -> Tensor:
    """Order by similarity, (K, D) -> (K,): classes with near vectors share a subtree.

    From the root down, the classes of each node are split across the direction in which their
    vectors differ most (the first principal component), into as many as the two subtrees hold.
    All nodes of a level are split at once.

    Args:
        vectors: a vector for each class.
        rounds: of the power iteration that finds the direction.
        seed: of the random vectors that it starts from.
    """
    if vectors.dim() != 2 or len(vectors) < 2 or not vectors.shape[1]:
        raise ValueError(f"expected vectors (K, D) with K >= 2, got shape {tuple(vectors.shape)}")
    if not bool(vectors.isfinite().all()):
        raise ValueError("vectors must be finite")
    require_at_least(1, rounds=rounds)
    vectors, size = vectors.detach(), vectors.detach().abs().max()
    vectors = (vectors / torch.where(size > 0, size, 1)).float()  # whatever their scale
    K, device = len(vectors), vectors.device
    generator = torch.Generator(device).manual_seed(seed)
    left, right = (n.long().to(device) for n in subtree_sums(torch.ones(K, dtype=torch.float64)))
    members = torch.arange(K, device=device)[None]  # (nodes, places), -1 where there is no class
    for first, last in levels(K):
        if members.shape[1] <= 2:
            break
        inner = last - first
        sizes = torch.ones(2, members.shape[0], dtype=torch.long, device=device)
        sizes[0, :inner], sizes[1, :inner] = left[first - 1 : last - 1], right[first - 1 : last - 1]
        sizes[1, inner:] = 0
        members = _split_level(vectors, members, sizes, rounds, generator)
    ranked = members.flatten()
    return _leaves_from_left(K, device)[ranked[ranked >= 0].argsort()]


def _split_level(
    vectors: Tensor, members: Tensor, sizes: Tensor, rounds: int, generator: torch.Generator
) -> Tensor:
    """The members of the children of each node, (n, m) -> (2n, largest child)."""
    n, m = members.shape
    start = torch.randn(vectors.shape[1], device=vectors.device, generator=generator)
    at_once = max(1, _CHUNK // (m * vectors.shape[1]))
    ranked = []
    for each in members.split(at_once):
        inside = each >= 0
        points = vectors[each.clamp_min(0)]  # (n, m, D)
        along = _principal(points, inside, start, rounds)
        best = along.masked_fill(~inside, torch.inf).argsort(dim=-1, stable=True)
        ranked.append(each.gather(1, best))
    order = torch.cat(ranked)
    place = torch.arange(int(sizes.max()), device=order.device)
    to_left = torch.where(place < sizes[0, :, None], order[:, : len(place)], -1)
    at = (sizes[0, :, None] + place).clamp_max(m - 1)
    to_right = torch.where(place < sizes[1, :, None], order.gather(1, at), -1)
    return torch.stack((to_left, to_right), 1).view(2 * n, -1)


def _principal(points: Tensor, inside: Tensor, start: Tensor, rounds: int) -> Tensor:
    """Coordinates along the first principal component of each node, (n, m, D) -> (n, m)."""
    weight = inside.to(points.dtype)[:, :, None]
    mean = (points * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
    points = (points - mean) * weight
    direction = start.expand(len(points), -1)[:, :, None]  # (n, D, 1)
    for _ in range(rounds):
        direction = torch.bmm(points.mT, torch.bmm(points, direction))
        size = direction.norm(dim=1, keepdim=True)
        direction = direction / torch.where(size > 0, size, 1.0)
    return torch.bmm(points, direction)[:, :, 0]


def _leaves_from_left(num_categories: int, device: torch.device) -> Tensor:
    """The leaves from left to right: the deepest ones, which have the highest numbers, first."""
    K = num_categories
    deepest = 2 ** (K - 1).bit_length() - K  # the first leaf of the last level
    return torch.arange(K, device=device).roll(-deepest)
