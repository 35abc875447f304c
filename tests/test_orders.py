"""Orders of classes on leaves."""

import pytest
import torch

from catnat import TreeLinear
from catnat.orders import by_cooccurrence, by_embedding, by_frequency

SIZES = (2, 3, 5, 8, 37, 100, 1000)


def is_permutation(order, K):
    return torch.equal(order.sort().values, torch.arange(K))


def node_of(order, K, above):
    """Heap number of the node so many levels above the leaf of each class."""
    return (order + K) >> above


@pytest.mark.parametrize("K", SIZES)
def test_every_order_is_a_permutation(K):
    torch.manual_seed(K)
    assert is_permutation(by_frequency(torch.randint(5, (K,))), K)
    assert is_permutation(by_embedding(torch.randn(K, 4)), K)
    assert is_permutation(by_embedding(torch.zeros(K, 4)), K)
    tokens = torch.randint(K, (5 * K,))
    assert is_permutation(by_cooccurrence(tokens, K, dims=8), K)
    TreeLinear(3, K, order=by_embedding(torch.randn(K, 4)))


def test_the_most_frequent_classes_come_first_and_have_the_shortest_paths():
    counts = torch.tensor([5, 1, 9, 9, 2])
    assert by_frequency(counts).tolist() == [2, 4, 0, 1, 3]
    depth = (by_frequency(counts) + 5).double().log2().floor()
    assert depth[2] == depth[3] == 2


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
    centres = 10 * torch.randn(16, 8)
    cluster = torch.arange(16).repeat(32)[torch.randperm(512)]
    order = by_embedding(centres[cluster] + 0.1 * torch.randn(512, 8))
    nodes = node_of(order, 512, 5)
    pure = [len(set(cluster[nodes == node].tolist())) == 1 for node in nodes.unique()]
    assert sum(pure) >= 14  # a median may cut through a cluster; it hardly ever does


def test_an_order_does_not_depend_on_the_size_of_chunks(monkeypatch):
    torch.manual_seed(2)
    vectors = torch.randn(300, 5)
    whole = by_embedding(vectors)
    monkeypatch.setattr("catnat.orders._CHUNK", 64)
    assert torch.equal(by_embedding(vectors), whole)


def test_classes_that_follow_the_same_classes_share_a_subtree():
    torch.manual_seed(3)
    group = torch.randperm(64) % 4  # a class of group g is followed by one of group g + 1
    members = [(group == g).nonzero()[:, 0] for g in range(4)]
    draws = torch.randint(16, (8000,))
    tokens = torch.stack([members[t % 4][draws[t]] for t in range(8000)])
    nodes = node_of(by_cooccurrence(tokens, 64, dims=8), 64, 4)
    assert all(len(set(group[nodes == node].tolist())) == 1 for node in nodes.unique())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("head", ["sigmoid", "natural"])
def test_a_layer_moved_to_its_own_order_stays_the_same(head, bias):
    torch.manual_seed(4)
    layer = TreeLinear(5, 30, head, by_frequency(torch.arange(30)), bias, dtype=torch.float64)
    hidden = torch.randn(200, 5, dtype=torch.float64)
    before = layer.log_probs(hidden)
    layer.reorder(layer.order, hidden, ridge=1e-12)
    torch.testing.assert_close(layer.log_probs(hidden), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head", ["sigmoid", "natural"])
def test_a_layer_moved_to_another_order_keeps_most_of_what_it_learned(head):
    torch.manual_seed(5)
    layer = TreeLinear(8, 300, head)
    with torch.no_grad():
        layer.weight.mul_(4)
    hidden = torch.randn(500, 8)
    seen, unseen = hidden[:400], hidden[400:]
    before = layer.log_probs(unseen).detach()
    order = by_embedding(torch.randn(300, 4))
    untrained = TreeLinear(8, 300, head, order)
    layer.reorder(order, seen)
    assert torch.equal(layer.order, order)

    def divergence(other):
        return float((before.exp() * (before - other.log_probs(unseen).detach())).sum(-1).mean())

    assert divergence(layer) < 0.6 * divergence(untrained)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: by_frequency(torch.tensor([3, -1])), "counts must be >= 0, got -1"),
        (lambda: by_frequency(torch.zeros(2, 2)), r"count for each class.*\(2, 2\)"),
        (lambda: by_embedding(torch.zeros(4)), r"\(K, D\).*\(4,\)"),
        (lambda: by_embedding(torch.full((4, 2), torch.nan)), "finite"),
        (lambda: by_cooccurrence(torch.tensor([0, 1, 5]), 5), r"0\.\.4, got 5"),
        (lambda: by_cooccurrence(torch.tensor([0.0, 1.0]), 5), "torch.float32"),
        (lambda: by_cooccurrence(torch.tensor([1]), 5), r"\(1,\)"),
    ],
)
def test_wrong_input_gets_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
