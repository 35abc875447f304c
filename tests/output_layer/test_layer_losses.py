"""Losses of the output layer: smoothed labels, class weights, z-loss, soft cap, distillation."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases_tree_linear import layer_and_data
from torch import nn

from catnat import TreeLinear


@pytest.mark.parametrize("frequent", [0, [2]])
def test_smoothed_labels_are_smoothed_at_each_split(frequent):
    layer, hidden, _ = layer_and_data(4 + len(frequent or []), "sigmoid", rows=6, frequent=frequent)
    epsilon, rare = 0.3, layer.classes[layer.num_frequent :]
    scores = layer.scores(hidden)
    # Four leaves: nodes 0; 1 and 2 below it. Leaf 2 is right at node 0, left at node 2.
    for leaf, path in enumerate(
        [[(0, 0), (1, 0)], [(0, 0), (1, 1)], [(0, 1), (2, 0)], [(0, 1), (2, 1)]]
    ):
        expected = 0.0
        for node, right in path:
            target = torch.full((6,), (1 - epsilon) * right + epsilon / 2, dtype=torch.float64)
            expected = expected + F.binary_cross_entropy_with_logits(
                scores[:, node], target, reduction="none"
            )
        if frequent:
            logits = layer.shortlist(hidden)
            expected = expected + F.cross_entropy(
                logits, torch.ones(6).long(), reduction="none", label_smoothing=epsilon
            )
        target = rare[leaf].expand(6)
        found = layer.nll(hidden, target, reduction="none", label_smoothing=epsilon)
        torch.testing.assert_close(found, expected)
    if frequent:
        found = layer.nll(hidden, torch.full((6,), 2), label_smoothing=epsilon)
        zeros = torch.zeros(6).long()
        torch.testing.assert_close(found, F.cross_entropy(logits, zeros, label_smoothing=epsilon))


@pytest.mark.parametrize("frequent", [0, 5])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.rand(30)}])
def test_a_target_that_is_no_class_is_nan_where_it_cannot_be_read(frequent, options):
    layer, hidden, _ = layer_and_data(30, rows=4, frequent=frequent)

    def loss(hidden, target):
        return layer.nll(hidden, target, reduction="none", **options)

    found = torch.func.vmap(loss)(hidden, torch.tensor([3, 30, -1, -100]))
    assert found.isnan().tolist() == [False, True, True, False]
    assert found[3] == 0


@pytest.mark.parametrize("frequent", [0, 5])
def test_no_smoothing_is_the_limit_of_little_and_ignored_targets_move_nothing(frequent):
    layer, hidden, target = layer_and_data(30, rows=8, frequent=frequent)
    target[3] = -100
    hidden[3] = torch.nan
    hidden.requires_grad_()
    exact = layer.nll(hidden, target)
    little = layer.nll(hidden, target, label_smoothing=1e-12)
    torch.testing.assert_close(little, exact)
    options = {"label_smoothing": 0.1, "weight": torch.rand(30), "z_loss": 0.1 if frequent else 0.0}
    loss = layer.nll(hidden, target, **options)
    loss.backward()
    assert all(x.grad.isfinite().all() for x in (hidden, *layer.parameters()))
    counted = target != -100
    alone = layer.nll(hidden[counted], target[counted], **options)
    torch.testing.assert_close(loss, alone)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_mean_what_cross_entropy_means(reduction):
    layer, hidden, target = layer_and_data(11, rows=8, frequent=3)
    target[1] = -100
    weight = torch.rand(11, dtype=torch.float64)
    expected = F.nll_loss(layer.log_probs(hidden), target, weight, reduction=reduction)
    found = layer.nll(hidden, target, weight=weight, reduction=reduction)
    torch.testing.assert_close(found, expected)


def test_z_loss_is_the_squared_normalizer_of_the_softmax():
    layer, hidden, target = layer_and_data(11, rows=8, frequent=3)
    penalty = layer.shortlist(hidden).logsumexp(-1).square()
    plain = layer.nll(hidden, target, reduction="none")
    found = layer.nll(hidden, target, reduction="none", z_loss=0.5)
    torch.testing.assert_close(found, plain + 0.5 * penalty)


def test_a_soft_cap_bounds_the_logits_of_the_softmax():
    torch.manual_seed(0)
    layer = TreeLinear(6, 30, frequent=5, soft_cap=4.0, dtype=torch.float64)
    nn.init.normal_(layer.shortlist.weight, std=10)
    hidden, target = torch.randn(9, 6, dtype=torch.float64), torch.arange(9)
    block = (4 * (layer.shortlist(hidden) / 4).tanh()).log_softmax(-1)
    logs = layer.log_probs(hidden)
    torch.testing.assert_close(logs[:, :5], block[:, :5])
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(layer.nll(hidden, target), F.nll_loss(logs, target))
    assert (logs[:, :5].amax(1) - logs[:, :5].amin(1) < 8).all()
    counts = torch.tensor([40.0, 30, 20, 10, 8] + 25 * [1])
    layer.start_from_counts(counts)
    shares = (counts.double() + 1) / (counts.double() + 1).sum()
    zero = torch.zeros(6, dtype=torch.float64)
    torch.testing.assert_close(layer.log_probs(zero).exp(), shares)
    with pytest.raises(ValueError, match="soft_cap must be above"):
        layer.start_from_counts(counts * torch.tensor([1e9] + 29 * [1]))
    even = TreeLinear(256, 2000, frequent=100, soft_cap=30.0)
    every = even.nll(torch.zeros(2000, 256), torch.arange(2000))
    assert abs(every.item() - math.log(2000)) < 0.01


@pytest.mark.parametrize("frequent", [0, 6])
def test_distillation_is_unbiased_in_value_and_gradient(frequent):
    layer, hidden, _ = layer_and_data(13, "sigmoid", rows=2, frequent=frequent)
    teacher = 2 * torch.randn(2, 13, dtype=torch.float64)
    logs = teacher.log_softmax(-1)
    exact = (logs.exp() * (logs - layer.log_probs(hidden))).sum(-1)
    wanted = list(layer.parameters())
    expected = torch.autograd.grad(exact.sum(), wanted)
    noise = torch.Generator().manual_seed(0)
    n = 20_000
    estimate = layer.distill(hidden, teacher, n, noise)
    torch.testing.assert_close(estimate, exact, rtol=0.02, atol=0)
    for found, known in zip(torch.autograd.grad(estimate.sum(), wanted), expected, strict=True):
        assert (found - known).norm() < 0.03 * known.norm()
    assert (layer.distill(hidden, layer.log_probs(hidden), 3).abs() < 1e-12).all()
    single = layer.distill(hidden[0], teacher[0])
    assert single.shape == () and single >= 0


def test_distillation_trains_a_layer():
    layer, hidden, _ = layer_and_data(40, "sigmoid", rows=200, frequent=8, dtype=torch.float32)
    teacher = nn.Linear(6, 40)(hidden).detach()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        loss = layer.distill(hidden, teacher, 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer, h, y: layer.nll(h, torch.rand(7, 9)), "needs all scores: distill"),
        (lambda layer, h, y: layer.nll(h, y, z_loss=0.1), "frequent classes; the layer has none"),
        (lambda layer, h, y: layer.nll(h, y, label_smoothing=1.5), r"0\.\.1, got 1.5"),
        (lambda layer, h, y: layer.nll(h, y, weight=torch.ones(8)), r"9 classes, got shape \(8,\)"),
        (lambda layer, h, y: layer.distill(h, torch.zeros(7, 8)), r"\(7, 9\), got shape \(7, 8\)"),
        (lambda layer, h, y: TreeLinear(4, 9, frequent=3, soft_cap=-1), "positive, got -1"),
    ],
)
def test_wrong_input_gets_one_clear_error(call, message):
    layer, hidden, target = layer_and_data(9)
    with pytest.raises(ValueError, match=message):
        call(layer, hidden, target)
