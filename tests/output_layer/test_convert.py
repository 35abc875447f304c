"""Layers from a trained softmax, and from counts."""

import numpy as np
import pytest
import torch
from torch import nn

from catnat import TreeLinear
from catnat.heads.nodes import subtree_sums
from catnat.output_layer.convert import expanded, refined
from catnat.output_layer.orders import by_cooccurrence


def softmax_and_states(K=40, D=6, rows=400, spread=1.0):
    torch.manual_seed(0)
    linear = nn.Linear(D, K, dtype=torch.float64)
    nn.init.normal_(linear.weight, std=spread)
    nn.init.normal_(linear.bias)
    return linear, torch.randn(rows, D, dtype=torch.float64)


def divergence(linear, layer, hidden):
    """The mean KL divergence from the softmax."""
    logs = linear(hidden).log_softmax(-1)
    return (logs.exp() * (logs - layer.log_probs(hidden))).sum(-1).mean().item()


@pytest.mark.parametrize("frequent", [0, 7, [30, 2]])
@pytest.mark.parametrize("fitted", [0, 255])
def test_at_one_hidden_state_a_layer_is_the_softmax_and_has_its_first_derivative(frequent, fitted):
    linear, hidden = softmax_and_states()
    point = hidden[:1].requires_grad_()
    layer = TreeLinear.from_linear(linear, point, frequent=frequent, fitted=fitted)
    expected, found = linear(point).log_softmax(-1), layer.log_probs(point)
    torch.testing.assert_close(found, expected)
    for k in (0, 2, 17, 39):
        grads = [
            torch.autograd.grad(x[0, k], point, retain_graph=True)[0] for x in (found, expected)
        ]
        torch.testing.assert_close(*grads)


def test_an_expansion_is_that_of_automatic_differentiation_at_the_weighted_mean():
    linear, hidden = softmax_and_states(K=11, rows=50)
    reach = torch.rand(50, dtype=torch.float64)
    scores = expanded(linear.weight.detach(), linear.bias.detach(), reach, hidden)

    def exact(states):
        left, right = subtree_sums(linear(states).softmax(-1))
        return right.log() - left.log()

    left, right = subtree_sums(linear(hidden).softmax(-1).detach())
    weights = reach[:, None] * left * right / (left + right)
    means = weights.T @ hidden / weights.sum(0)[:, None]
    for node, mean in enumerate(means):
        slope = torch.autograd.functional.jacobian(lambda h, n=node: exact(h)[n], mean)
        torch.testing.assert_close(scores.weight[node], slope)
        value = scores.weight[node] @ mean + scores.bias[node]
        torch.testing.assert_close(value, exact(mean)[node].detach())
    # Least squares with its ridge: no other linear score has a smaller penalized error.
    fitted = refined(scores, linear.weight.detach(), linear.bias.detach(), reach, hidden, 5)
    assert torch.equal(fitted.weight[5:], scores.weight[5:])
    target = exact(hidden).detach()
    for node in range(5):
        errors = [
            (
                weights[:, node] * (hidden @ x.weight[node] + x.bias[node] - target[:, node]) ** 2
            ).sum()
            for x in (scores, fitted)
        ]
        assert errors[1] < errors[0]


@pytest.mark.parametrize("frequent", [0, 12])
def test_a_layer_is_near_the_softmax_at_all_hidden_states_and_least_squares_are_nearer(frequent):
    linear, hidden = softmax_and_states(K=60, rows=3000, spread=0.7)
    sample, others = hidden.split((2000, 1000))
    kls = [
        divergence(linear, TreeLinear.from_linear(linear, sample, frequent, fitted=n), others)
        for n in (0, 59)
    ]
    untrained = divergence(linear, TreeLinear(6, 60, dtype=torch.float64), others)
    assert kls[1] < 0.95 * kls[0] < 0.25 * untrained


def test_a_number_of_frequent_classes_means_the_likeliest_ones():
    linear, hidden = softmax_and_states()
    layer = TreeLinear.from_linear(linear, hidden.view(20, 20, 6), frequent=5)
    shares = linear(hidden).softmax(-1).mean(0)
    assert layer.classes[:5].tolist() == shares.topk(5).indices.tolist()
    torch.testing.assert_close(layer.shortlist.weight[:5], linear.weight[layer.classes[:5]])
    half = TreeLinear.from_linear(linear.to(torch.bfloat16), hidden, frequent=5)
    assert half.weight.dtype == half.shortlist.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_number_is_one_of_numpy_or_of_a_tensor_too(kind):
    linear, hidden = softmax_and_states()
    layer = TreeLinear.from_linear(linear, hidden, frequent=kind(5))
    shares = linear(hidden).softmax(-1).mean(0)
    assert layer.classes[:5].tolist() == shares.topk(5).indices.tolist()
    counts = torch.randperm(40)
    layer = TreeLinear.from_counts(counts, 4, frequent=kind(5))
    assert layer.classes[:5].tolist() == counts.topk(5).indices.tolist()


def test_counts_give_the_frequent_classes_the_order_and_the_biases():
    torch.manual_seed(0)
    text = (torch.rand(5000) ** 3 * 50).long()[torch.randperm(5000)]
    text = torch.randperm(50)[text]
    counts = torch.bincount(text, minlength=50)
    layer = TreeLinear.from_counts(counts, 4, frequent=8)
    assert counts[layer.classes].diff().max() <= 0
    like = TreeLinear.from_counts(counts, 4, frequent=8, cooccurrence=text, head="natural")
    frequent = counts.topk(8).indices
    assert torch.equal(like.order, by_cooccurrence(text, 50, frequent))
    shares = (counts + 1) / (counts + 1).sum()
    for each in (layer, like):
        found = each.log_probs(torch.zeros(4)).exp()
        torch.testing.assert_close(found, shares, rtol=1e-4, atol=1e-5)


def test_without_a_number_half_of_few_classes_are_frequent():
    linear, hidden = softmax_and_states()
    assert TreeLinear.from_linear(linear, hidden).num_frequent == linear.out_features // 2
    assert TreeLinear.from_counts(torch.ones(9), 4).num_frequent == 4
    assert TreeLinear.from_counts(torch.ones(10_000), 4).num_frequent == 4096


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda linear, h: TreeLinear.from_linear(linear, h[:, :5], 3), "6 features"),
        (lambda linear, h: TreeLinear.from_linear(linear, h[:0], 3), "got none"),
        (lambda linear, h: TreeLinear.from_linear(linear, h, 4096), "0..38, got 4096"),
        (lambda linear, h: TreeLinear.from_linear(linear, h, 3, head="natural"), "got natural"),
        (lambda linear, h: TreeLinear.from_linear(linear, h, 3, bias=False), "bias=False"),
        (lambda linear, h: TreeLinear.from_linear(linear, h, 3, fitted=-1), "at least 0, got -1"),
        (lambda linear, h: TreeLinear.from_counts(torch.ones(9), 4, 4096), "0..7, got 4096"),
    ],
)
def test_wrong_input_gets_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(*softmax_and_states())
