"""Orders of classes on leaves."""

import pytest
import torch

from catnat import TreeLinear
from catnat.output_layer.orders import by_cooccurrence, by_embedding

SIZES = (2, 3, 5, 8, 37, 100, 1000)


def is_permutation(order, K):
    return torch.equal(order.sort().values, torch.arange(K))


@pytest.mark.parametrize("K", SIZES)
def test_every_order_is_a_permutation(K):
    torch.manual_seed(K)
    assert is_permutation(by_embedding(torch.randn(K, 4)), K)
    assert is_permutation(by_embedding(torch.zeros(K, 4)), K)
    x = torch.randn(K, 4)
    TreeLinear(3, K, order=by_embedding(x))
    assert all(torch.equal(by_embedding(x), by_embedding(x * 2.0**n)) for n in (-66, 33, 100))


@pytest.mark.parametrize("K", SIZES)
def test_every_node_splits_vectors_on_a_line_into_smaller_and_larger_ones(K):
    torch.manual_seed(0)
    x = torch.randn(K)
    heap = by_embedding(x[:, None] * torch.tensor([[3.0, 4.0]])) + K
    above = heap[:, None] >> torch.arange(K.bit_length() + 1)  # every node above each class
    for node in range(1, K):
        left, right = (x[(above == child).any(1)] for child in (2 * node, 2 * node + 1))
        assert left.max() < right.min() or right.max() < left.min()


def test_clusters_become_subtrees():
    torch.manual_seed(1)
    centers = 10 * torch.randn(16, 8)
    cluster = torch.arange(16).repeat(32)[torch.randperm(512)]
    order = by_embedding(centers[cluster] + 0.1 * torch.randn(512, 8))
    nodes = (order + 512) >> 5  # heap numbers, five levels above the leaves
    pure = [len(set(cluster[nodes == node].tolist())) == 1 for node in nodes.unique()]
    assert sum(pure) >= 14  # a median may cut through a cluster; it hardly ever does


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: by_embedding(torch.zeros(4)), r"\(K, D\).*\(4,\)"),
        (lambda: by_embedding(torch.full((4, 2), torch.nan)), "finite"),
    ],
)
def test_wrong_input_gets_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_classes_that_follow_the_same_classes_share_a_subtree_by_cooccurrence():
    torch.manual_seed(0)
    first = torch.randint(2, (4000,))  # class 0 comes before 2..5, class 1 before 6..9
    second = 2 + 4 * first + torch.randint(4, (4000,))
    tokens = torch.stack((first, second), 1).flatten()
    order = by_cooccurrence(tokens, 10, frequent=2)
    assert order[:2].tolist() == [0, 1] and sorted(order.tolist()) == list(range(10))
    halves = (order[2:] - 2) // 4
    assert (halves[:4] == halves[0]).all() and (halves[4:] == 1 - halves[0]).all()
    moved = by_cooccurrence(tokens, 10, frequent=[9, 0])
    assert moved[[9, 0]].tolist() == [0, 1]
    with pytest.raises(ValueError, match="largest"):
        by_cooccurrence(tokens, 9)


def test_an_order_by_embedding_begins_with_the_frequent_classes():
    torch.manual_seed(0)
    vectors = torch.randn(40, 3)
    order = by_embedding(vectors, frequent=[7, 30])
    assert is_permutation(order, 40)
    assert order[[7, 30]].tolist() == [0, 1]
    rare = [k for k in range(40) if k not in (7, 30)]
    assert torch.equal(order[rare] - 2, by_embedding(vectors[rare]))
