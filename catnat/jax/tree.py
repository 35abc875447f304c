"""Sums along the binary tree over K categories; :mod:`catnat.tree` describes the tree.

The internal nodes have the heap numbers 1..K-1 and the score indices 0..K-2, the leaves have the
heap numbers K..2K-1. The children of node j are 2j (bit 0) and 2j + 1 (bit 1).
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def levels(num_categories: int) -> Iterator[tuple[int, int]]:
    """Heap numbers ``first..last - 1`` of the internal nodes of each level, from the root down.

    >>> list(levels(5))
    [(1, 2), (2, 4), (4, 5)]
    """
    first = 1
    while first < num_categories:
        yield first, min(2 * first, num_categories)
        first *= 2


@jax.jit
def path_sums(left: Array, right: Array) -> tuple[Array, Array]:
    """Sum edge values from the root down to every internal node and every leaf.

    Args:
        left: value of the edge to the bit-0 child of each node, (*, K-1).
        right: value of the edge to the bit-1 child of each node, (*, K-1).

    Returns:
        Sums at the internal nodes, (*, K-1), and at the leaves, (*, K).
    """
    here = jnp.zeros_like(left[..., :1])  # values at heap nodes first..2*first-1
    nodes = []
    for first, last in levels(left.shape[-1] + 1):
        inner, leaves = here[..., : last - first], here[..., last - first :]
        nodes.append(inner)
        edges = jnp.stack((left[..., first - 1 : last - 1], right[..., first - 1 : last - 1]), -1)
        children = (inner[..., None] + edges).reshape(*inner.shape[:-1], 2 * (last - first))
        here = jnp.concatenate((leaves, children), -1)
    return jnp.concatenate(nodes, -1), here


@jax.jit
def subtree_sums(leaves: Array) -> tuple[Array, Array]:
    """Sum leaf values over both subtrees of every node: the adjoint of :func:`path_sums`.

    Args:
        leaves: (*, K).

    Returns:
        Sums over the leaves below the two children of each node, (*, K-1) each.
    """
    left, right = [], []
    here = leaves
    for first, last in reversed(list(levels(leaves.shape[-1]))):
        shallow = 2 * first - last
        pairs = here[..., shallow:].reshape(*here.shape[:-1], last - first, 2)
        left.append(pairs[..., 0])
        right.append(pairs[..., 1])
        here = jnp.concatenate((left[-1] + right[-1], here[..., :shallow]), -1)
    return jnp.concatenate(left[::-1], -1), jnp.concatenate(right[::-1], -1)


def right_shares(num_categories: int) -> np.ndarray:
    """Share of each node's leaves that lie below its bit-1 child, (K-1,) in float64.

    >>> right_shares(3).round(2).tolist()
    [0.33, 0.5]
    """
    leaves = np.ones(2 * num_categories)  # below each heap node
    for first, last in reversed(list(levels(num_categories))):
        nodes = np.arange(first, last)
        leaves[nodes] = leaves[2 * nodes] + leaves[2 * nodes + 1]
    nodes = np.arange(1, num_categories)
    share: np.ndarray = leaves[2 * nodes + 1] / leaves[nodes]
    return share
