"""The binary tree over K categories, for any K >= 2: nodes, bits and paths.

Category k is a leaf. Its bits b_1, ..., b_H, the most significant first, lead from the root to the
leaf: bit 1 takes probability a(s) of a node with score s, bit 0 takes 1 - a(s), and

    p_k = prod_h a_h^{b_h} (1 - a_h)^{1 - b_h}

over the nodes on the path (the paper's category probability). For K = 2^H, b_1..b_H is k in binary.
Nodes are numbered breadth first: the node at level h that is reached by the prefix b_1..b_{h-1}
has the score with index 2^{h-1} - 1 + int(prefix).

For any other K the tree is the complete one with heap numbers, which is the same tree at K = 2^H:

- the root is node 1, and the children of node j are 2j (bit 0) and 2j + 1 (bit 1);
- internal nodes are 1..K-1, and node j has the score with index j - 1;
- leaves are K..2K-1, and category k is leaf K + k.

If K is not a power of two, the leaves have different depths, and a = 1/2 at every node does not
give the uniform distribution. Each node therefore has a center C with which zero scores give the
uniform distribution (an option of the heads turns this off): a is then the share of its leaves
below its bit-1 child.

Example, K = 5: node 1 has the children 2 and 3, node 2 the children 4 and 5, node 3 the leaves 6
and 7, node 4 the leaves 8 and 9; leaves 5, 6, 7, 8, 9 are the categories 0, 1, 2, 3, 4.

The functions are plain differentiable torch and work under ``torch.func`` and ``torch.compile``;
:mod:`catnat.kernels` has faster versions.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Sides = tuple[Tensor, Tensor]
"""Values of the bit-0 and of the bit-1 child of each node."""


def levels(num_categories: int) -> Iterator[tuple[int, int]]:
    """Heap numbers ``first..last - 1`` of the internal nodes of each level, from the root down.

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
    values = torch.zeros_like(left[..., :1])  # at heap nodes first..2*first-1
    nodes = []
    for first, last in levels(K):
        inner = values[..., : last - first]
        leaves = values[..., last - first :]
        nodes.append(inner)
        level = slice(first - 1, last - 1)
        children = torch.stack((inner + left[..., level], inner + right[..., level]), -1).flatten(
            -2
        )
        values = torch.cat((leaves, children), -1) if leaves.shape[-1] else children
    return torch.cat(nodes, -1), values


def subtree_sums(leaves: Tensor) -> Sides:
    """Sum leaf values over both subtrees of every node: the adjoint of :func:`path_sums`.

    Args:
        leaves: (*, K).

    Returns:
        Sums over the leaves below the two children of each node, (*, K-1) each.

    >>> subtree_sums(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    (tensor([3., 1., 3.]), tensor([7., 2., 4.]))
    """
    left = []
    right = []
    values = leaves
    for first, last in reversed(list(levels(leaves.shape[-1]))):
        shallow = 2 * first - last
        left.append(values[..., shallow::2])
        right.append(values[..., shallow + 1 :: 2])
        sums = left[-1] + right[-1]
        values = torch.cat((sums, values[..., :shallow]), -1) if shallow else sums
    return torch.cat(left[::-1], -1), torch.cat(right[::-1], -1)


def leaf_paths(leaf: Tensor, num_categories: int) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes above each leaf, from the leaf up, (*) -> (*, H) each.

    Returns:
        Index of the node's score; whether the path takes the bit-1 child; whether the node exists,
        because a leaf of the upper level has one node less above it. An invalid leaf counts as
        leaf 0.

    >>> nodes, bits, inside = leaf_paths(torch.tensor(3), 5)
    >>> nodes.tolist(), bits.tolist(), inside.tolist()
    ([3, 1, 0], [False, False, False], [True, True, True])
    """
    K = num_categories
    heap = torch.where((leaf >= 0) & (leaf < K), leaf, 0)[..., None] + K
    level = torch.arange((K - 1).bit_length(), device=leaf.device)
    parent = heap >> (level + 1)
    return (parent - 1).clamp_min(0), (heap >> level) & 1 == 1, parent > 0


def walk_down(
    num_categories: int,
    start: Tensor,
    goes_right: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> Tensor:
    """One leaf for each walk from the root, (*) int64; -1 if a score on the path was NaN.

    Args:
        num_categories: K.
        start: any tensor with the shape (*) and the device of the walks.
        goes_right: function of the indices of the nodes' scores, (*), and the level, 0 at the root.
            It returns whether each walk takes the bit-1 child, and whether the score is NaN. Walks
            that have ended before the last level pass node 0, and their result is ignored.
    """
    heap = torch.ones_like(start, dtype=torch.int64)
    lost = torch.zeros_like(start, dtype=torch.bool)
    for level in range((num_categories - 1).bit_length()):
        inside = heap < num_categories
        right, is_nan = goes_right(torch.where(inside, heap - 1, 0), level)
        heap = torch.where(inside, 2 * heap + right, heap)
        lost = lost | (inside & is_nan)
    return torch.where(lost, -1, heap - num_categories)
