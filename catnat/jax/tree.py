"""Sums along the binary tree over K categories; :mod:`catnat.tree` describes the tree.

The internal nodes have the heap numbers 1..K-1 and the score indices 0..K-2, the leaves have the
heap numbers K..2K-1. The children of node j are 2j (bit 0) and 2j + 1 (bit 1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.jit
def path_sums(left: Array, right: Array) -> tuple[Array, Array]:
    """Sum edge values from the root down to every internal node and every leaf.

    Args:
        left: value of the edge to the bit-0 child of each node, (*, K-1).
        right: value of the edge to the bit-1 child of each node, (*, K-1).

    Returns:
        Sums at the internal nodes, (*, K-1), and at the leaves, (*, K).
    """
    below_root = [2**level - 1 for level in range(1, left.shape[-1].bit_length())]
    levels = (jnp.split(each, below_root, -1) for each in (left, right))
    here = jnp.zeros_like(left[..., :1])  # values at the nodes and leaves of a level
    nodes = []
    for low, high in zip(*levels, strict=True):
        inner, leaves = jnp.split(here, [low.shape[-1]], -1)
        nodes.append(inner)
        children = jnp.stack((inner + low, inner + high), -1)
        children = children.reshape(*inner.shape[:-1], 2 * inner.shape[-1])
        here = jnp.concatenate((leaves, children), -1)
    return jnp.concatenate(nodes, -1), here


def subtree_sums(leaves: Array) -> tuple[Array, Array]:
    """Sum leaf values over both subtrees of every node: the transpose of :func:`path_sums`.

    Args:
        leaves: (*, K).

    Returns:
        Sums over the leaves below the two children of each node, (*, K-1) each.
    """
    nodes = jnp.zeros_like(leaves[..., 1:])
    _, transpose = jax.vjp(lambda left, right: path_sums(left, right)[1], nodes, nodes)
    left, right = transpose(leaves)
    return left, right


def right_shares(num_categories: int) -> np.ndarray:
    """Share of each node's leaves that lie below its bit-1 child, (K-1,) in float64.

    >>> right_shares(3).round(2).tolist()
    [0.33, 0.5]
    """
    K = num_categories
    heap = np.arange(K, 2 * K)  # the leaves, then their ancestors
    levels = (np.bincount(heap >> up, minlength=2 * K) for up in range(K.bit_length() + 1))
    below = sum(levels, start=np.zeros(2 * K))  # leaves below every heap number
    share: np.ndarray = below[3::2] / below[1:K]
    return share
