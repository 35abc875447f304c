"""TreeLinear: the same numbers as a linear layer and a head, by way of few rows."""

import re
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from cases import CauchyHead
from cases_tree_linear import by_linear_and_head, layer_and_data
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from catnat import TreeLinear
from catnat.heads.nodes import leaf_paths

HEADS = ("sigmoid", "natural", "cauchy")


class Cauchy(CauchyHead, name="cauchy"):
    """A head of one's own, by its name."""


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("K", "frequent"), [(2, 0), (3, 1), (5, 0), (8, 3), (37, [5, 30, 2]), (1000, 256)]
)
def test_all_log_probabilities_are_those_of_a_linear_layer_and_a_head(K, frequent, head):
    layer, hidden, target = layer_and_data(K, head, frequent=frequent)
    ones = torch.ones(7, dtype=torch.float64)
    torch.testing.assert_close(layer.log_probs(hidden).exp().sum(-1), ones)
    full = by_linear_and_head(layer, hidden)
    torch.testing.assert_close(layer.log_probs(hidden), full)
    chosen = full.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(layer.log_prob(hidden, target), chosen)
    torch.testing.assert_close(layer(hidden, target), -chosen.mean())


def test_values_are_broadcast_against_hidden_states():
    layer, hidden, _ = layer_and_data(5)
    every = layer.log_prob(hidden, torch.arange(5)[:, None])
    torch.testing.assert_close(every, layer.log_probs(hidden).T)
    assert layer.log_prob(hidden[0], torch.tensor(3)).shape == ()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nll_means_what_cross_entropy_means(reduction):
    layer, hidden, target = layer_and_data(11, rows=8)
    hidden, target = hidden.view(2, 4, -1), target.view(2, 4)
    target[0, 1] = -7
    options = {"reduction": reduction, "ignore_index": -7}
    full = layer.log_probs(hidden).movedim(-1, 1)
    expected = F.cross_entropy(full, target, **options)
    torch.testing.assert_close(layer.nll(hidden, target, **options), expected)


def test_frequent_classes_have_a_softmax_and_the_others_a_tree_in_their_order():
    order = [3, 1, 5, 4, 0, 2]
    layer = TreeLinear(3, 6, order=order, frequent=[4, 1])
    hidden = torch.randn(2, 3)
    found = layer.log_probs(hidden).exp()
    block = layer.shortlist(hidden).softmax(-1)
    torch.testing.assert_close(found[:, [4, 1]], block[:, :2])
    leaves = layer.head.probs(layer.scores(hidden)) * block[:, 2:]
    torch.testing.assert_close(found[:, [5, 0, 3, 2]], leaves)  # leaves 2, 3, 4, 5 of the order
    layer.set_order(None)
    torch.testing.assert_close(layer.log_probs(hidden).exp()[:, [0, 2, 3, 5]], leaves)
    first = TreeLinear(3, 6, "natural", frequent=2, bias=False)
    assert list(first.state_dict()) == ["weight", "order", "shortlist.weight"]
    torch.testing.assert_close(first.log_probs(hidden), by_linear_and_head(first, hidden))
    assert (first.head.tail, TreeLinear(3, 6, "natural", tail=0).head.tail) == (0.05, 0)


@pytest.mark.parametrize("frequent", [0, 5, [7, 1]])
def test_biases_from_counts_give_the_frequencies_of_the_classes(frequent):
    layer, hidden, _ = layer_and_data(11, "sigmoid", frequent=frequent)
    counts = torch.randint(50, (11,))
    counts[frequent if isinstance(frequent, list) else slice(frequent)] += 50
    layer.start_from_counts(counts)
    for name, parameter in layer.named_parameters():
        if "weight" in name:
            torch.nn.init.zeros_(parameter)
    shares = (counts + 1).double() / (counts + 1).sum()
    torch.testing.assert_close(layer.log_probs(hidden)[0].exp(), shares)


@pytest.mark.parametrize("frequent", [0, 4])
def test_the_fisher_matrix_is_a_block_and_a_diagonal(frequent):
    layer = TreeLinear(11 if frequent else 10, 11, frequent=frequent, dtype=torch.float64)
    weights = [layer.weight] if layer.shortlist is None else [layer.shortlist.weight, layer.weight]
    rows = torch.eye(layer.in_features, dtype=torch.float64).split([len(w) for w in weights])
    for weight, row in zip(weights, rows, strict=True):
        weight.data.copy_(row)
    scores = torch.randn(layer.in_features, dtype=torch.float64)
    moves = torch.autograd.functional.jacobian(layer.log_probs, scores)
    expected = moves.T @ (layer.log_probs(scores).exp()[:, None] * moves)
    block, diagonal = layer.fisher(scores)
    parts = [diagonal.diag()] if block is None else [block, diagonal.diag()]
    torch.testing.assert_close(torch.block_diag(*parts), expected)


@pytest.mark.parametrize("sparse", [False, True])
def test_ignored_targets_read_and_move_nothing(sparse):
    layer, hidden, target = layer_and_data(1000, rows=4, sparse=sparse)
    hidden[1] = torch.nan
    target[1] = -100
    hidden.requires_grad_()
    layer.nll(hidden, target).backward()
    grad = layer.weight.grad.to_dense()
    assert grad.isfinite().all() and (hidden.grad[1] == 0).all()
    on_paths = leaf_paths(layer.order[target[[0, 2, 3]]], 1000)[0].unique()
    assert set(grad.any(1).nonzero()[:, 0].tolist()) <= set(on_paths.tolist())
    assert layer.nll(hidden, torch.full((4,), -100)).isnan()
    assert layer.nll(hidden, torch.full((4,), -100), reduction="sum") == 0


@pytest.mark.parametrize(("head", "frequent"), [("sigmoid", 0), ("natural", 64), ("cauchy", 9)])
def test_dense_and_sparse_gradients_are_those_of_a_linear_layer(head, frequent):
    options = {"dtype": torch.float32, "frequent": frequent}
    layer, hidden, target = layer_and_data(300, head, rows=40, **options)
    hidden.requires_grad_()
    wanted = [hidden, *layer.parameters()]
    full = by_linear_and_head(layer, hidden)
    expected = torch.autograd.grad(-full.gather(1, target[:, None]).mean(), wanted)
    for sparse in (False, True):
        layer.sparse = sparse
        found = torch.autograd.grad(layer.nll(hidden, target), wanted)
        assert [g.is_sparse for g in found][:3] == [False, sparse, sparse]
        for ours, known in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.to_dense(), known)


def test_sparse_adam_takes_sparse_gradients_and_moves_the_rows_in_use_alone():
    layer, hidden, target = layer_and_data(1000, sparse=True, dtype=torch.float32)
    before, start = layer.weight.detach().clone(), layer(hidden, target).item()
    optimizer = torch.optim.SparseAdam(list(layer.parameters()), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        layer(hidden, target).backward()
        optimizer.step()
    moved = (layer.weight != before).any(1).nonzero()[:, 0]
    assert torch.equal(moved, leaf_paths(layer.order[target], 1000)[0].unique())
    assert layer(hidden, target).item() < start


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("K", "frequent"), [(5, 0), (8, 3)])
def test_gradients_of_every_path_in_float64(head, K, frequent):
    layer, hidden, target = layer_and_data(K, head, rows=3, width=2, frequent=frequent)
    names = [name for name, _ in layer.named_parameters()]
    inputs = [x.detach().clone().requires_grad_() for x in (hidden, *layer.parameters())]

    def called(*given):
        return lambda hidden, *values: functional_call(
            layer, dict(zip(names, values, strict=True)), (hidden, *given)
        )

    for given in ((target,), ()):  # the loss, and all log-probabilities
        assert gradcheck(called(*given), inputs)
    assert gradgradcheck(called(target), inputs)


@pytest.mark.parametrize(("head", "frequent"), [("sigmoid", 0), ("natural", 0), ("sigmoid", 300)])
def test_samples_follow_the_probabilities_by_chi_square(head, frequent):
    layer, hidden, _ = layer_and_data(1000, head, rows=2, frequent=frequent)
    assert layer.sample(hidden[0]).shape == ()
    noise = torch.Generator().manual_seed(3)
    n = 100_000
    samples = layer.sample(hidden, (n,), noise)
    assert samples.shape == (n, 2)
    for column, probs in zip(samples.T, layer.log_probs(hidden).exp(), strict=True):
        counts = column.bincount(minlength=1000).double()
        common = probs * n >= 5
        found = torch.cat((counts[common], counts[~common].sum()[None]))
        expected = torch.cat((probs[common], probs[~common].sum()[None])) * n
        found, expected = found[expected > 0], expected[expected > 0]
        expected *= found.sum() / expected.sum()
        assert scipy.stats.chisquare(found.numpy(), expected.detach().numpy()).pvalue > 1e-4
    again = layer.sample(hidden, (n,), torch.Generator().manual_seed(3))
    assert torch.equal(samples, again)


@pytest.mark.parametrize("head", ["sigmoid", "natural"])
@pytest.mark.parametrize(("K", "k", "frequent"), [(50, 50, 7), (5000, 70, 0)])
def test_topk_agrees_with_the_full_sort(head, K, k, frequent):
    layer, hidden, _ = layer_and_data(K, head, rows=3, dtype=torch.float32, frequent=frequent)
    broken = layer.topk(torch.cat((hidden, torch.full_like(hidden[:1], torch.nan))), 4)
    assert broken.values[3].isnan().all() and not broken.values[:3].isnan().any()
    values, indices = layer.topk(hidden.view(3, 1, -1), k)
    full = layer.log_probs(hidden)
    torch.testing.assert_close(values[:, 0], full.sort(-1, descending=True).values[:, :k])
    torch.testing.assert_close(full.gather(1, indices[:, 0]), values[:, 0])
    assert all(len(set(row)) == k for row in indices[:, 0].tolist())


def test_an_empty_batch_has_empty_results():
    layer, hidden, target = layer_and_data(K := 10, frequent=3)
    for none, classes in (
        (hidden[:0], target[:0]),
        (hidden[:0].view(2, 0, 6), target[:0][None][[0, 0]]),
    ):
        shape = none.shape[:-1]
        assert layer.log_probs(none).shape == layer(none).shape == (*shape, K)
        assert layer.log_prob(none, classes).shape == layer.sample(none).shape == shape
        assert layer.topk(none, 3).values.shape == layer.topk(none, 3).indices.shape == (*shape, 3)
        assert layer.sample(hidden, (0,)).shape == (0, len(hidden))
        assert layer.nll(none, classes, reduction="sum") == 0 and layer(none, classes).isnan()


def test_more_classes_than_float32_can_count():
    K = 2**24 + 3
    layer = TreeLinear(1, K, bias=False, sparse=True, uniform_at_zero=False)
    hidden = torch.randn(3, 1)
    target = torch.tensor([0, K // 2, K - 1])
    layer.nll(hidden, target).backward()
    assert layer.weight.grad.coalesce().indices().max() == K - 2
    samples = layer.sample(hidden)
    assert ((samples >= 0) & (samples < K)).all()
    for row, k in enumerate(target.tolist()):
        bits = [int(b) for b in bin(K + k)[3:]]
        above = [((K + k) >> h) - 1 for h in range(len(bits), 0, -1)]
        x = (layer.weight[above, 0] * hidden[row]).double()
        expected = F.logsigmoid(x * (2 * torch.tensor(bits) - 1)).sum()
        torch.testing.assert_close(layer.log_prob(hidden[row], target[row]), expected.float())


@pytest.mark.parametrize("frequent", [0, [8, 2, 5]])
def test_a_state_dict_restores_the_layer_with_its_order(frequent):
    layer, hidden, target = layer_and_data(13, frequent=frequent)
    assert list(layer.state_dict())[:3] == ["weight", "bias", "order"]
    other = TreeLinear(6, 13, "natural", dtype=torch.float64, frequent=layer.num_frequent)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other.nll(hidden, target), layer.nll(hidden, target))
    noise = [torch.Generator().manual_seed(1) for _ in range(2)]
    drawn = [each.sample(hidden, (5,), n) for each, n in zip((layer, other), noise, strict=True)]
    assert torch.equal(*drawn)
    linear = torch.nn.Linear(6, 12)
    TreeLinear(6, 13).load_state_dict(linear.state_dict())  # classes are sorted in both
    if not frequent:
        with pytest.raises(RuntimeError, match="order"):
            layer.load_state_dict(linear.state_dict())


@pytest.mark.parametrize("frequent", [0, [8, 2, 5]])
def test_a_layer_on_the_device_meta_computes_shapes_and_gets_its_order_back(frequent):
    real, hidden, _ = layer_and_data(13, frequent=frequent, dtype=torch.float32)
    with torch.device("meta"):
        layer = TreeLinear(6, 13, "natural", real.order.tolist(), frequent=frequent)
        states, target = torch.randn(3, 6), torch.zeros(3, dtype=torch.long)
    layer(states, target).backward()
    assert layer.weight.grad.shape == layer.weight.shape
    assert layer(states).shape == (3, 13) and layer.sample(states).shape == (3,)
    assert layer.topk(states, 2).indices.shape == (3, 2)
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer.order, real.order) and torch.equal(layer.classes, real.classes)
    torch.testing.assert_close(layer.log_probs(hidden), by_linear_and_head(layer, hidden))


def test_a_layer_is_not_an_embedding_and_keeps_its_weights_when_embeddings_are_drawn_again():
    layer = TreeLinear(4, 9)
    before = layer.weight.clone()
    assert not hasattr(layer, "padding_idx")

    def draw_embeddings(module):
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.zeros_(module.weight)

    layer.sparse = True
    torch.nn.Sequential(torch.nn.Embedding(3, 4), layer).apply(draw_embeddings)
    assert torch.equal(layer.weight, before)
    kinds = [type(module).__name__ for module in torch.nn.Sequential(layer).modules()]
    assert kinds == ["Sequential", "TreeLinear", "SigmoidHead"]


@pytest.mark.parametrize("sparse", [False, True])
def test_half_precision_is_close_to_float32(sparse):
    options = {"rows": 20, "dtype": torch.float32, "sparse": sparse, "frequent": 30}
    layer, hidden, target = layer_and_data(500, **options)
    expected = layer.nll(hidden, target)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer.nll(hidden.bfloat16(), target)
        one, every = layer.log_prob(hidden, target), layer.log_probs(hidden)
        torch.testing.assert_close(one, every.gather(1, target[:, None])[:, 0])
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, expected, rtol=2e-2, atol=0)
    layer.bfloat16()
    loss = layer.nll(hidden.bfloat16(), target)
    loss.backward()
    assert loss.dtype == torch.float32 and layer.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)


def test_a_compiled_layer_and_a_checkpointed_one_learn_the_same():
    layer, hidden, target = layer_and_data(40, dtype=torch.float32, frequent=8)
    hidden.requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    again = partial(checkpoint, layer, use_reentrant=False)
    grads = []
    for way in (layer, compiled, again):
        hidden.grad = layer.weight.grad = None
        way(hidden, target).backward()
        grads.append((hidden.grad, layer.weight.grad))
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer: layer.sample(torch.zeros(2, 5)), "4 features.*(2, 5)"),
        (lambda layer: layer.nll(torch.zeros(2, 4), torch.tensor([0, 9])), "0 to 8, got 9"),
        (lambda layer: layer.nll(torch.zeros(2, 4), torch.zeros(3).long()), "(3,).*(2, 4)"),
        (lambda layer: layer.topk(torch.zeros(4), 10), "k must lie in 1..9, got 10"),
        (lambda layer: layer.sample(torch.full((4,), torch.nan)), "NaN"),
        (
            lambda layer: TreeLinear(4, 9, order=[0, 1, 2, 3, 4, 5, 6, 7, 9]),
            "permutation of 0..8",
        ),
        (lambda layer: TreeLinear(4, 9, "softmax"), "tree head.*'softmax'"),
        (lambda layer: TreeLinear(4, 9, frequent=8), "0..7, got 8"),
        (lambda layer: TreeLinear(4, 9, frequent=-1), "frequent must lie in 0..7, got -1"),
        (lambda layer: TreeLinear(4, 9, frequent=True), "number of classes or classes, got True"),
        (lambda layer: TreeLinear(4, 9, frequent=np.array([True, False])), "got [True, False]"),
        (lambda layer: TreeLinear(4, 9, frequent=[3, 9]), "0..8, got 9"),
        (lambda layer: TreeLinear(4, 9, frequent=[3, 3]), "twice"),
        (lambda layer: layer.start_from_counts(torch.ones(8)), "9 counts.*(8,)"),
    ],
)
def test_wrong_input_gets_one_clear_error(call, message):
    with pytest.raises(ValueError, match=re.sub(r"([()[\]])", r"\\\1", message)):
        call(TreeLinear(4, 9))


def test_all_log_probabilities_are_exported_for_any_number_of_rows():
    class AllClasses(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = TreeLinear(8, 20)

        def forward(self, x):
            return self.layer.log_probs(x)

    model, x = AllClasses(), torch.randn(7, 8)
    rows = {"x": {0: torch.export.Dim("rows")}}
    exported = torch.export.export(model, (torch.randn(5, 8),), dynamic_shapes=rows)
    assert torch.allclose(exported.module()(x), model(x))


@pytest.mark.parametrize(("K", "frequent"), [(4, 2), (11, 0), (11, [4, 9])])
def test_path_estimates_have_the_right_mean_and_gradient(K, frequent):
    layer, hidden, _ = layer_and_data(K, "sigmoid", rows=2, frequent=frequent)
    other = TreeLinear(6, K, order=layer.order, frequent=frequent, dtype=torch.float64)
    one, two = hidden.clone().requires_grad_()
    every = torch.arange(K)  # the mean over all classes is exact
    for reference in (None, other):
        logs = layer.log_probs(one)
        probs = logs.exp()
        kl = (probs * (logs - (reference or layer).log_probs(two))).sum()
        estimates = {kl: layer.path_kl(one, two, every, reference)}
        estimates[-(probs * logs).sum()] = layer.path_entropy(one, every)
        for exact, estimate in estimates.items():
            assert (estimate >= 0).all()
            mean = (probs.detach() * estimate).sum()
            torch.testing.assert_close(mean, exact)
            grads = [torch.autograd.grad(x, one, retain_graph=True)[0] for x in (mean, exact)]
            torch.testing.assert_close(*grads)
    for stranger in (TreeLinear(6, 12), TreeLinear(6, K, frequent=1)):
        with pytest.raises(ValueError, match="the same order"):
            layer.path_kl(one, two, every, stranger)
    with pytest.raises(ValueError, match=f"from 0 to {K - 1}, got {K}"):
        layer.path_entropy(one, torch.tensor(K))
