"""Orders of classes on the leaves of a tree: ``order[k]`` is the leaf of class k.

Classes below a common node share all splits above this node, so a layer learns faster and better
if they are alike. These functions build orders from embeddings or text:

- :func:`by_embedding`, from a vector for each class: a trained embedding, weights of a softmax;
- :func:`by_cooccurrence`, from a text or another sequence of classes: those that follow the same
  classes share a subtree.

:class:`catnat.TreeLinear` takes an order.
"""

import operator
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from catnat.checks import require_within
from catnat.heads.nodes import levels, subtree_sums


class Listed(Protocol):
    """A tensor, or an array of NumPy."""

    def tolist(self) -> Any:
        """Its values."""


Frequent: TypeAlias = int | Sequence[int] | Listed
"""Frequent classes: the number of the first ones, or the classes themselves."""

_DIMENSIONS = 64  # of the vectors from a sequence
_ROUNDS = 8  # of the power iteration that finds a direction
_CHUNK = 2**21  # numbers of vectors that are worked on together: they stay in a cache


def by_embedding(vectors: Tensor, frequent: Frequent = 0) -> Tensor:
    """Order by similarity, (K, D) -> (K,): classes with near vectors share a subtree.

    From the root down, the classes of each node are split along the direction in which their
    vectors differ most (the first principal component), in the sizes of the two subtrees. All nodes
    of a level are split at once.

    Args:
        vectors: a vector for each class, (K, D).
        frequent: as in :class:`catnat.TreeLinear`: these classes come first, and the order of
            the others is made for a tree that holds them alone.
    """
    if vectors.dim() != 2 or len(vectors) < 2 or not vectors.shape[1]:
        raise ValueError(f"expected vectors (K, D) with K >= 2, got shape {tuple(vectors.shape)}")
    if not bool(vectors.isfinite().all()):
        raise ValueError("vectors must be finite")
    frequent_classes = checked_frequent(frequent, len(vectors))
    return _with_frequent(
        frequent_classes, len(vectors), lambda rare: _by_similarity(vectors[rare])
    )


def _by_similarity(vectors: Tensor) -> Tensor:
    """:func:`by_embedding` of all classes, (K, D) -> (K,)."""
    vectors = vectors.detach()
    largest = vectors.abs().max()
    vectors = (vectors / torch.where(largest > 0, largest, 1)).float()  # whatever their scale
    K, device = len(vectors), vectors.device
    generator = torch.Generator(device).manual_seed(0)
    leaves_below = torch.stack(subtree_sums(torch.ones(K, dtype=torch.long)), 1).to(device)
    members = torch.arange(K, device=device)[None]  # (nodes, places), -1 where there is no class
    for first, last in levels(K):
        if members.shape[1] <= 2:
            break
        sizes = members.new_tensor([1, 0]).repeat(len(members), 1)  # a leaf goes to the left
        sizes[: last - first] = leaves_below[first - 1 : last - 1]
        members = _split_level(vectors, members, sizes, generator)
    ranked = members.flatten()
    deepest = 2 ** (K - 1).bit_length() - K  # the first leaf of the last level, the leftmost one
    from_left = torch.arange(K, device=device).roll(-deepest)
    return from_left[ranked[ranked >= 0].argsort()]


def by_cooccurrence(
    tokens: Tensor,
    num_categories: int,
    frequent: Frequent = 0,
) -> Tensor:
    """Order by the preceding classes, (N,) -> (K,): similar classes share a subtree.

    It calls :func:`by_embedding` with vectors that are similar for classes that follow the same
    classes. These vectors are the leading left singular vectors, times the roots of the singular
    values, of the matrix of positive pointwise mutual information, log(P(a, b) / (P(a) P(b))) where
    it is positive, between a class b and the class a before it. They are computed by random
    projection with power iterations (Halko et al., 2011).

    Args:
        tokens: a sequence of classes, such as the words of a text.
        num_categories: number of classes (K).
        frequent: as in :class:`catnat.TreeLinear`: these classes come first, and the order of
            the others is made for a tree that holds them alone.
    """
    frequent_classes = checked_frequent(frequent, num_categories)
    if tokens.dim() != 1 or len(tokens) < 2 or tokens.is_floating_point():
        raise ValueError(f"expected a sequence of classes, got shape {tuple(tokens.shape)}")
    require_within(0, num_categories - 1, smallest=int(tokens.min()), largest=int(tokens.max()))
    return _with_frequent(
        frequent_classes,
        num_categories,
        lambda rare: _by_similarity(_vectors_of(tokens, rare.to(tokens.device))),
    )


def _with_frequent(
    frequent: list[int], num_categories: int, order_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """An order that begins with the frequent classes.

    Args:
        frequent: the frequent classes.
        num_categories: number of classes (K).
        order_of: the order of the rare classes among themselves, from their mask, (K,).
    """
    rare = torch.ones(num_categories, dtype=torch.bool)
    rare[frequent] = False
    leaves = order_of(rare)
    order = torch.empty(num_categories, dtype=torch.long, device=leaves.device)
    order[frequent] = torch.arange(len(frequent), device=leaves.device)
    order[rare.to(leaves.device)] = leaves + len(frequent)
    return order


def _vectors_of(tokens: Tensor, rows: Tensor) -> Tensor:
    """The vectors of some classes, (N,), (K,) bool -> (rows, dimensions)."""
    K, device = len(rows), tokens.device
    pairs, counts = (tokens[1:].long() * K + tokens[:-1]).unique(return_counts=True)
    after, before = pairs // K, pairs % K
    of_after = tokens[1:].bincount(minlength=K).float()
    of_before = tokens[:-1].bincount(minlength=K).float()
    information = torch.log(counts * counts.sum() / (of_after[after] * of_before[before]))
    places = torch.stack((after, before))
    square = torch.sparse_coo_tensor(
        places, information.clamp_min(0), (K, K), check_invariants=False
    )
    matrix = square.index_select(0, rows.nonzero()[:, 0]).coalesce()
    transposed = matrix.mT.coalesce()
    generator = torch.Generator(device).manual_seed(0)
    width = min(len(matrix), _DIMENSIONS + 8)
    basis = torch.randn(K, width, device=device, generator=generator)
    for _ in range(3):
        basis = torch.linalg.qr(transposed @ torch.linalg.qr(matrix @ basis)[0])[0]
    left, singular, _ = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return left[:, :_DIMENSIONS] * singular[:_DIMENSIONS].sqrt()


def usual_frequent(num_categories: int) -> int:
    """The number of frequent classes where none is given."""
    return min(4096, num_categories // 2)


def checked_frequent(frequent: Frequent, num_categories: int) -> list[int]:
    """The frequent classes, after checking that each is a class and is named once."""
    listed = _as_python(frequent)
    if isinstance(listed, bool) or (isinstance(listed, Sequence) and any(map(_is_flag, listed))):
        shown = reprlib.repr(listed)
        raise ValueError(f"frequent must be a number of classes or classes, got {shown}")
    if not isinstance(listed, Sequence):
        number = operator.index(listed)
        require_within(0, num_categories - 2, frequent=number)
        return list(range(number))
    classes = [operator.index(name) for name in listed]
    require_within(0, num_categories - 2, number_of_frequent_classes=len(classes))
    for frequent_class in classes:
        require_within(0, num_categories - 1, frequent_class=frequent_class)
    if len(set(classes)) < len(classes):
        raise ValueError("frequent names a class twice")
    return classes


def is_number_of_classes(frequent: Frequent) -> bool:
    """Whether these are a number of classes, also one of NumPy or a tensor of dimension 0."""
    return not isinstance(_as_python(frequent), Sequence)


def _as_python(frequent: Frequent) -> Any:
    return frequent.tolist() if hasattr(frequent, "tolist") else frequent


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _split_level(
    vectors: Tensor, members: Tensor, sizes: Tensor, generator: torch.Generator
) -> Tensor:
    """The members of the children of each node, (n, m) and (n, 2) -> (2n, largest child)."""
    n, m = members.shape
    start = torch.randn(vectors.shape[1], device=vectors.device, generator=generator)
    ranked = []
    for part in members.split(max(1, _CHUNK // (m * vectors.shape[1]))):
        inside = part >= 0
        along = _principal(vectors[part.clamp_min(0)], inside, start)
        best = along.masked_fill(~inside, torch.inf).argsort(dim=-1, stable=True)
        ranked.append(part.gather(1, best))
    order = torch.cat(ranked)
    place = torch.arange(int(sizes.max()), device=order.device)
    begin = sizes.cumsum(1) - sizes  # of the two children, (n, 2)
    at = (begin.view(2 * n, 1) + place).clamp_max(m - 1)
    children = order.repeat_interleave(2, 0).gather(1, at)
    return torch.where(place < sizes.view(2 * n, 1), children, -1)


def _principal(points: Tensor, inside: Tensor, start: Tensor) -> Tensor:
    """Coordinates along the first principal component of each node, (n, m, D) -> (n, m)."""
    weight = inside.to(points.dtype)[:, :, None]
    mean = (points * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
    points = (points - mean) * weight
    direction = start.expand(len(points), -1)[:, :, None]  # (n, D, 1)
    for _ in range(_ROUNDS):
        direction = torch.bmm(points.mT, torch.bmm(points, direction))
        size = direction.norm(dim=1, keepdim=True)
        direction = direction / torch.where(size > 0, size, 1.0)
    return torch.bmm(points, direction)[:, :, 0]
