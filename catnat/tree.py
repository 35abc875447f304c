"""The binary tree over K categories, for any K >= 2.

Nodes carry heap numbers: the root is 1, the children of node ``j`` are ``2j`` (bit 0) and
``2j + 1`` (bit 1). Internal nodes are ``1..K-1`` and own score ``j - 1``; leaves are ``K..2K-1``
and category ``k`` is leaf ``K + k``. For K a power of two this is the paper's breadth-first order.

The functions here are plain differentiable torch, so they work under ``torch.func`` and
``torch.compile``; :mod:`catnat.ops` holds faster ones for eager use.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def levels(num_categories: int) -> Iterator[tuple[int, int]]:
    """Heap ranges ``[first, last)`` of the internal nodes, one level after the other.

    >>> list(levels(5))
    [(1, 2), (2, 4), (4, 5)]
    """
    first = 1
    while first < num_categories:
        yield first, min(2 * first, num_categories)
        first *= 2


def path_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Sum edge values from the root down to every internal node and every leaf.

    Args:
        left: value of the edge to the bit-0 child of each node, (*, K-1).
        right: value of the edge to the bit-1 child of each node, (*, K-1).

    Returns:
        Sums at the internal nodes, (*, K-1), and at the leaves, (*, K).
    """
    K = left.shape[-1] + 1
    here = torch.zeros_like(left[..., :1])  # values at heap nodes first..2*first-1
    nodes = []
    for first, last in levels(K):
        inner, leaves = here[..., : last - first], here[..., last - first :]
        nodes.append(inner)
        children = torch.stack(
            (inner + left[..., first - 1 : last - 1], inner + right[..., first - 1 : last - 1]), -1
        ).flatten(-2)
        here = torch.cat((leaves, children), -1) if leaves.shape[-1] else children
    return torch.cat(nodes, -1), here


def subtree_sums(leaves: Tensor) -> tuple[Tensor, Tensor]:
    """Sum leaf values over both subtrees of every node: the adjoint of :func:`path_sums`.

    Args:
        leaves: (*, K).

    Returns:
        Sums over the leaves below the two children of each node, (*, K-1) each.

    >>> subtree_sums(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    (tensor([3., 1., 3.]), tensor([7., 2., 4.]))
    """
    left, right = [], []
    here = leaves
    for first, last in reversed(list(levels(leaves.shape[-1]))):
        shallow = 2 * first - last
        pairs = here.narrow(-1, shallow, 2 * (last - first))
        pairs = pairs.reshape(*pairs.shape[:-1], last - first, 2)
        left.append(pairs.select(-1, 0))
        right.append(pairs.select(-1, 1))
        sums = left[-1] + right[-1]
        here = torch.cat((sums, here.narrow(-1, 0, shallow)), -1) if shallow else sums
    return torch.cat(left[::-1], -1), torch.cat(right[::-1], -1)


def right_shares(num_categories: int) -> Tensor:
    """Share of each node's leaves that lie below its bit-1 child, (K-1,) in float64.

    These are the split probabilities of the uniform distribution; all 1/2 at K a power of two.

    >>> right_shares(3)
    tensor([0.3333, 0.5000], dtype=torch.float64)
    """
    left, right = subtree_sums(torch.ones(num_categories, dtype=torch.float64, device="cpu"))
    return right / (left + right)
