"""TreeLinear finds its likeliest classes and draws from them by few rows of its weight."""

import copy
import itertools

import pytest
import torch
from cases import run_interpreted
from cases_tree_linear import layer_and_data
from scipy.stats import chisquare

from catnat import TreeLinear
from catnat.output_layer import draws, search

NEEDS_CUDA = pytest.mark.gpu


@pytest.fixture
def always_search(monkeypatch):
    monkeypatch.setattr(search, "_SEARCH_COST", {"cpu": 0})
    monkeypatch.setattr(search, "FEW", 1)


def sharpened(layer, scale):
    for parameter in layer.parameters():
        parameter.data *= scale
    return layer


@pytest.mark.parametrize("head", ["sigmoid", "natural"])
@pytest.mark.parametrize("frequent", [0, 3, 40, 400])
@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
def test_topk_is_that_of_all_classes(head, frequent, scale, always_search):
    layer, hidden, _ = layer_and_data(1001, head, rows=12, frequent=frequent)
    sharpened(layer, scale)
    full = layer.log_probs(hidden)
    for k in (1, 5, 60):
        values, classes = layer.topk(hidden.view(3, 4, -1), k)
        assert values.shape == classes.shape == (3, 4, k)
        torch.testing.assert_close(values.view(12, k), full.topk(k).values)
        torch.testing.assert_close(full.gather(1, classes.view(12, k)), values.view(12, k))
        assert all(len(set(row)) == k for row in classes.view(12, k).tolist())


@pytest.mark.parametrize("bias", [True, False])
def test_a_search_reads_few_rows_of_the_weight(bias, always_search):
    layer, hidden, _ = layer_and_data(20_000, "sigmoid", rows=1, frequent=20, bias=bias)
    sharpened(layer, 5.0)
    _, classes = layer.topk(hidden, 3)
    want = layer.topk(hidden, 3)
    tree = search.LayerTree(layer, hidden)
    read = set(range(63))
    at = tree.scores_at
    tree.scores_at = lambda rows, nodes: (read.update(nodes.flatten().tolist()), at(rows, nodes))[1]
    search.best_leaves(tree, torch.arange(1), 3)
    assert len(read) < 1500
    unread = torch.ones(len(layer.weight), dtype=torch.bool)
    unread[list(read)] = False
    layer.weight.data[unread] = torch.nan
    found = layer.topk(hidden, 3)
    assert torch.equal(found.indices, classes) and torch.equal(found.values, want.values)


def test_a_shortlist_that_is_likelier_than_all_rare_classes_is_all_that_is_read(always_search):
    layer, hidden, _ = layer_and_data(500, "sigmoid", frequent=50)
    layer.shortlist.bias.data[-1] = -30
    layer.weight.data.fill_(torch.nan)
    values, classes = layer.topk(hidden, 4)
    block = layer.shortlist(hidden).log_softmax(1)[:, :-1].topk(4)
    torch.testing.assert_close(values, block.values)
    assert torch.equal(classes, layer.classes[block.indices])


def test_more_classes_than_multinomial_takes():
    K = 2**24 + 5
    layer = TreeLinear(1, K, bias=False, uniform_at_zero=False, frequent=3)
    layer.weight.data *= 8
    hidden = torch.ones(2, 1)
    values, classes = layer.topk(hidden, 5)
    torch.testing.assert_close(layer.log_prob(hidden[:1], classes[0]), values[0])
    drawn = layer.sample(hidden, top_k=5)
    assert (drawn[:, None] == classes).any(1).all()
    values, log_probs = layer.sample_without_replacement(hidden, 4)
    assert values.shape == log_probs.shape == (4, 2)
    assert all(len(set(column)) == 4 for column in values.T.tolist())
    alone = TreeLinear(1, K, bias=False, uniform_at_zero=False)
    likeliest = alone.topk(hidden[:1], 1).indices[0]
    assert alone.sample(hidden[:1], temperature=1e-3) == likeliest


@pytest.mark.parametrize("frequent", [0, 2, 4])
def test_draws_without_replacement_have_their_probabilities_by_chi_square(frequent):
    K, k, n = 6, 2, 20_000
    layer, hidden, _ = layer_and_data(K, "sigmoid", rows=1, frequent=frequent)
    noise = torch.Generator().manual_seed(1)
    values, log_probs = layer.sample_without_replacement(hidden.expand(n, -1), k, noise)
    torch.testing.assert_close(log_probs, layer.log_prob(hidden, values))
    probs = layer.log_probs(hidden)[0].exp().tolist()
    found, wanted = [], []
    for a, b in itertools.permutations(range(K), k):
        found.append(int(((values[0] == a) & (values[1] == b)).sum()))
        wanted.append(n * probs[a] * probs[b] / (1 - probs[a]))
    assert min(wanted) > 5 and chisquare(found, wanted).pvalue > 1e-4
    every = layer.sample_without_replacement(hidden, K)[0]
    assert sorted(every[:, 0].tolist()) == list(range(K))


def test_log_probabilities_of_draws_have_a_gradient():
    layer, hidden, _ = layer_and_data(40, frequent=5)
    values, log_probs = layer.sample_without_replacement(hidden.view(7, 1, -1), 3)
    assert values.shape == log_probs.shape == (3, 7, 1)
    log_probs.sum().backward()
    assert layer.weight.grad.abs().sum() > 0 and layer.shortlist.weight.grad.abs().sum() > 0


def filtered(probs, temperature=1.0, top_k=None, top_p=None):
    """Probabilities after the filters, one class after another."""
    logs = (probs.log() / temperature).softmax(0)
    ranked = logs.argsort(descending=True)[: top_k or len(logs)]
    kept, mass = [], 0.0
    total = float(logs[ranked].sum())
    for k in ranked.tolist():
        if top_p is not None and mass >= top_p:
            break
        kept.append(k)
        mass += float(logs[k]) / total
    result = torch.zeros_like(probs)
    result[kept] = logs[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"temperature": 2.0, "top_p": 0.7},
        {"top_k": 6},
        {"top_k": 8, "temperature": 0.5, "top_p": 0.8},
        {"top_p": 0.5},
        {"top_p": 0.93},
        {"top_p": 1.0},
        {"top_k": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("frequent", [0, 9])
def test_filtered_draws_follow_the_filtered_probabilities(
    options, frequent, always_search, monkeypatch
):
    monkeypatch.setattr(draws, "_NUCLEUS", 2)
    layer, hidden, _ = layer_and_data(37, "sigmoid", rows=2, frequent=frequent)
    n = 20_000
    noise = torch.Generator().manual_seed(3)
    drawn = layer.sample(hidden, (n,), noise, **options)
    assert drawn.shape == (n, 2)
    for column, probs in zip(drawn.T, layer.log_probs(hidden).exp().detach(), strict=True):
        expected = n * filtered(probs, **options)
        counts = column.bincount(minlength=37).double()
        assert not counts[expected == 0].any()
        found, expected = counts[expected > 0], expected[expected > 0]
        assert len(found) == 1 or chisquare(found.numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature must be positive, got 0"),
        ({"top_k": 0}, "top_k must lie in 1..9, got 0"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1.1"),
    ],
)
def test_wrong_filters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TreeLinear(4, 9).sample(torch.zeros(4), **options)


@pytest.mark.parametrize("frequent", [0, 3])
def test_nan_is_an_error_and_comes_first(frequent, always_search):
    layer, hidden, _ = layer_and_data(200, "sigmoid", frequent=frequent)
    hidden[1] = torch.nan
    values = layer.topk(hidden, 4).values
    assert values[1].isnan().all() and not values[[0, 2, 3, 4, 5, 6]].isnan().any()
    for options in ({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 2.0}):
        with pytest.raises(ValueError, match="got NaN"):
            layer.sample(hidden, **options)
    with pytest.raises(ValueError, match="got NaN"):
        layer.sample_without_replacement(hidden, 2)


def test_empty_batches(always_search):
    layer, hidden, _ = layer_and_data(30, frequent=3)
    none = hidden[:0].view(2, 0, 6)
    assert layer.topk(none, 3).values.shape == (2, 0, 3)
    for options in ({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 2.0}):
        assert layer.sample(none, (4,), **options).shape == (4, 2, 0)
    assert layer.sample_without_replacement(none, 3)[0].shape == (3, 2, 0)


INTERPRETED = """
import torch
from contextlib import nullcontext
from catnat import TreeLinear
from catnat.heads import search as heads_search
from catnat.kernels import triton_layer
from catnat.output_layer import search
torch.cuda.device_of = lambda x: nullcontext()
torch.manual_seed(0)
search._FUSED_FROM = 0
search.FEW = 1
heads_search.BEAM = 8
triton_layer.UPPER = 2
cases = (
    (100, 20, "sigmoid", {}, torch.float32, 4),
    (100, 7, "natural", {"tail": 0}, torch.float32, 14),
    (64, 520, "natural", {"bias": False}, torch.bfloat16, 14),
    (203, 7, "sigmoid", {"frequent": [5, 93, 8]}, torch.float32, 4),
)
for K, D, head, options, dtype, depth in cases:
    search._FUSED_DEPTH = depth  # several steps, or one
    layer = TreeLinear(D, K, head, torch.randperm(K), dtype=dtype, **options)
    layer.weight.data *= 3
    hidden = torch.randn(2, D).to(dtype)
    tree = triton_layer.FusedTree(
        layer.weight, layer.bias, layer.head.activation, layer._constants(hidden)
    )
    assert tree.takes(hidden)
    full = layer.log_probs(hidden)
    layer._fused = lambda states: tree
    if dtype == torch.float32:
        for computes_all in (False, True):
            search._PREFERS_ALL = K if computes_all else 0
            values, classes = layer.topk(hidden, 3)
            torch.testing.assert_close(values, full.topk(3).values, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(full.gather(1, classes), values, rtol=1e-4, atol=1e-4)
    else:
        values = layer.topk(hidden, 3).values
        torch.testing.assert_close(values, full.topk(3).values, rtol=0.05, atol=0.2)
"""


def test_the_kernel_of_the_search_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(INTERPRETED)


@NEEDS_CUDA
@pytest.mark.parametrize("scale", [1.0, 6.0])  # a beam does not certify the first, and the second
@pytest.mark.parametrize(
    ("K", "head", "options", "dtype"),
    [
        (40_000, "sigmoid", {}, torch.float32),
        (2**17, "natural", {"frequent": 100}, torch.float32),
        (2**17 + 3, "sigmoid", {"frequent": 4000}, torch.bfloat16),
        (300_007, "natural", {"bias": False}, torch.bfloat16),
    ],
)
def test_on_cuda_topk_is_that_of_all_classes(K, head, options, dtype, scale):
    torch.manual_seed(0)
    layer = TreeLinear(96, K, head, device="cuda", dtype=dtype, **options)
    sharpened(layer, scale)
    hidden = torch.randn(9, 96, device="cuda").to(dtype)
    assert layer._fused(hidden) is not None
    exact = copy.deepcopy(layer).double()
    full = exact.log_probs(hidden.double())
    values, classes = layer.topk(hidden, 10)
    tolerance = 1e-3 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(values.double(), full.topk(10).values, rtol=0.01, atol=tolerance)
    found = full.gather(1, classes)
    torch.testing.assert_close(found, values.double(), rtol=0.01, atol=tolerance)
    assert all(len(set(row)) == 10 for row in classes.tolist())
    assert (layer.sample(hidden, (50,), top_k=10)[:, :, None] == classes).any(2).all()
    once = layer.sample(hidden[:1].expand(20_000, -1)).bincount(minlength=K) / 20_000
    probs = full[0].exp()
    rounding = 0.01 if dtype == torch.float32 else 0.05  # of the scores
    assert (once - probs).abs().max() < rounding + 5 * (probs.max() / 20_000).sqrt()
    drawn, log_probs = layer.sample_without_replacement(hidden, 5)
    torch.testing.assert_close(log_probs, layer.log_prob(hidden, drawn))


@NEEDS_CUDA
def test_on_cuda_a_search_for_more_classes_than_the_second_dimension_of_a_grid_has_programs():
    torch.manual_seed(0)
    layer = sharpened(TreeLinear(16, 2**20 + 3, device="cuda"), 4.0)
    hidden = torch.randn(2, 16, device="cuda")
    known = layer.log_probs(hidden).topk(40_000).values
    torch.testing.assert_close(layer.topk(hidden, 40_000).values, known, rtol=1e-4, atol=1e-4)
