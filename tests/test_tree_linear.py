"""TreeLinear: the same numbers as a linear layer and a head, by way of few rows."""

import math

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from cases_fresh import one_server, run_fresh
from cases_tree_linear import by_linear_and_head, layer_and_data, without_kernels
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from catnat import CatnatHead, TreeLinear
from catnat.ops import path_scores as ops
from catnat.tree_search import leaf_paths

HEADS = ("sigmoid", "natural", "cauchy")


class CauchyHead(CatnatHead, name="cauchy"):
    """A head of one's own: a(s) = 1/2 + arctan(s) / pi."""

    def log_split(self, x):
        return torch.log(0.5 - torch.atan(x) / math.pi), torch.log(0.5 + torch.atan(x) / math.pi)


@pytest.mark.parametrize("upper", [0, 2, 8])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("K", [2, 3, 5, 8, 37, 1000])
def test_all_log_probabilities_are_those_of_a_linear_layer_and_a_head(K, head, upper):
    layer, hidden, target = layer_and_data(K, head, upper_levels=upper)
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
    assert layer.log_prob(hidden[:0], torch.tensor([], dtype=torch.long)).shape == (0,)


def test_without_order_class_k_is_leaf_k_and_paths_are_those_of_the_tree():
    layer = TreeLinear(3, 6, bias=False)
    hidden = torch.randn(2, 3)
    torch.testing.assert_close(layer.log_probs(hidden), by_linear_and_head(layer, hidden))
    assert list(layer.state_dict()) == ["weight"]
    for K in (2, 5, 8, 13):
        nodes, bits, inside = leaf_paths(torch.arange(K), K)
        for k in range(K):
            steps = [(K + k) >> h for h in range((K + k).bit_length() - 1, 0, -1)]
            assert nodes[k][inside[k]].tolist() == [step - 1 for step in steps]
            assert bits[k][inside[k]].tolist() == [b == "1" for b in bin(K + k)[3:]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_means_what_cross_entropy_means(reduction, smoothing, weighted):
    layer, hidden, target = layer_and_data(11, rows=8)
    hidden, target = hidden.view(2, 4, -1), target.view(2, 4)
    target[0, 1] = -7
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": -7}
    options["weight"] = torch.rand(11, dtype=torch.float64) if weighted else None
    full = layer.log_probs(hidden).movedim(-1, 1)
    expected = F.cross_entropy(full, target, **options)
    torch.testing.assert_close(layer.nll(hidden, target, **options), expected)


@pytest.mark.parametrize("sparse", [False, True])
def test_ignored_targets_read_and_move_nothing(sparse):
    layer, hidden, target = layer_and_data(1000, rows=4, sparse=sparse, upper_levels=0)
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


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kernels", [True, False])
def test_dense_and_sparse_gradients_are_those_of_a_linear_layer(head, kernels, monkeypatch):
    if not kernels:
        without_kernels(monkeypatch)
        monkeypatch.setattr(ops, "_CHUNK", 64)
    layer, hidden, target = layer_and_data(300, head, rows=40, dtype=torch.float32)
    hidden.requires_grad_()
    wanted = [hidden, layer.weight, layer.bias]
    full = by_linear_and_head(layer, hidden)
    expected = torch.autograd.grad(-full.gather(1, target[:, None]).mean(), wanted)
    dense = torch.autograd.grad(layer.nll(hidden, target), wanted)
    layer.sparse = True
    sparse = torch.autograd.grad(layer.nll(hidden, target), wanted)
    assert not dense[1].is_sparse and sparse[1].is_sparse and sparse[2].is_sparse
    assert sparse[1].is_coalesced() and sparse[1].indices().shape[1] < 299
    torch.testing.assert_close(dense, expected)
    for found, known in zip(sparse, expected, strict=True):
        torch.testing.assert_close(found.coalesce().to_dense() if found.is_sparse else found, known)
    rows = sparse[1].indices()[0]
    assert torch.equal(rows, rows.unique())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("K", [5, 8])
def test_gradients_of_every_path_in_float64(head, K):
    layer, hidden, target = layer_and_data(K, head, rows=3, width=2, upper_levels=1)
    weight = torch.rand(K, dtype=torch.float64)
    inputs = [x.detach().clone().requires_grad_() for x in (hidden, layer.weight, layer.bias)]

    def of(function):
        def run(hidden, *parameters):
            given = dict(zip(("weight", "bias"), parameters, strict=True))
            saved = {name: layer._parameters[name] for name in given}
            layer._parameters.update(given)
            try:
                return function(hidden)
            finally:
                layer._parameters.update(saved)

        return run

    assert gradcheck(of(lambda h: layer.log_prob(h, target)), inputs)
    assert gradgradcheck(of(lambda h: layer.log_prob(h, target)), inputs)
    assert gradcheck(of(lambda h: layer.nll(h, target, weight, label_smoothing=0.1)), inputs)
    assert gradcheck(of(layer.log_probs), inputs)


def test_torch_func_takes_the_layer():
    layer, hidden, target = layer_and_data(9)
    jacobian = torch.func.jacrev(lambda h: layer.log_prob(h, target))(hidden)
    hidden.requires_grad_()
    (grad,) = torch.autograd.grad(layer.log_prob(hidden, target).sum(), hidden)
    torch.testing.assert_close(jacobian.sum(0), grad)


@pytest.mark.parametrize("head", ["sigmoid", "natural"])
def test_samples_follow_the_probabilities_by_chi_square(head):
    layer, hidden, _ = layer_and_data(1000, head, rows=2)
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
@pytest.mark.parametrize("scale", [0.3, 6.0])  # a flat distribution, and one that is not
@pytest.mark.parametrize(("K", "k"), [(50, 50), (5000, 1), (5000, 70), (4096, 5), (70_001, 10)])
def test_topk_agrees_with_the_full_sort(head, scale, K, k):
    layer, hidden, _ = layer_and_data(K, head, rows=3, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.mul_(scale)
    values, indices = layer.topk(hidden.view(3, 1, -1), k)
    full = layer.log_probs(hidden)
    torch.testing.assert_close(values[:, 0], full.sort(-1, descending=True).values[:, :k])
    torch.testing.assert_close(full.gather(1, indices[:, 0]), values[:, 0])
    assert all(len(set(row)) == k for row in indices[:, 0].tolist())


def test_topk_looks_at_few_nodes_where_some_classes_are_likely(monkeypatch):
    layer, hidden, _ = layer_and_data(100_000, "sigmoid", rows=2, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.mul_(10)
    monkeypatch.setattr(layer, "log_probs", None)  # the way out, which computes all
    assert layer.topk(hidden, 3).indices.shape == (2, 3)


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


def test_a_state_dict_restores_the_layer_with_its_order():
    layer, hidden, target = layer_and_data(13)
    assert list(layer.state_dict()) == ["weight", "bias", "order"]
    other = TreeLinear(6, 13, "natural", dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other.nll(hidden, target), layer.nll(hidden, target))
    noise = [torch.Generator().manual_seed(1) for _ in range(2)]
    drawn = [each.sample(hidden, (5,), n) for each, n in zip((layer, other), noise, strict=True)]
    assert torch.equal(*drawn)
    with pytest.raises(RuntimeError, match="order"):
        layer.load_state_dict(TreeLinear(6, 13, "natural").state_dict())
    linear = torch.nn.Linear(6, 12)
    TreeLinear(6, 13).load_state_dict(linear.state_dict())


@pytest.mark.parametrize("sparse", [False, True])
def test_half_precision_is_close_to_float32(sparse):
    layer, hidden, target = layer_and_data(500, rows=20, dtype=torch.float32, sparse=sparse)
    expected = layer.nll(hidden, target)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.nll(hidden, target).dtype == torch.float32
        torch.testing.assert_close(
            layer.nll(hidden.bfloat16(), target), expected, rtol=2e-2, atol=0
        )
    nodes = leaf_paths(target, 500)[0]  # what a GPU computes under autocast
    mixed = ops.path_scores(hidden.bfloat16(), layer.weight, layer.bias, nodes, 8, sparse)
    known = ops.path_scores(hidden, layer.weight, layer.bias, nodes, 8, sparse)
    torch.testing.assert_close(mixed, known, rtol=0.05, atol=0.05)
    mixed.sum().backward()
    grad, layer.weight.grad = layer.weight.grad, None
    assert grad.dtype == torch.float32
    known.sum().backward()
    dense = [g.to_dense() for g in (grad, layer.weight.grad)]
    torch.testing.assert_close(*dense, rtol=0.05, atol=0.05)
    layer.bfloat16()
    loss = layer.nll(hidden.bfloat16(), target)
    loss.backward()
    assert loss.dtype == torch.float32 and layer.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_compiled_layer_learns_the_same(sparse):
    layer, hidden, target = layer_and_data(40, dtype=torch.float32, sparse=sparse)
    layer(hidden, target).backward()
    grad, layer.weight.grad = layer.weight.grad, None
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=not sparse)
    compiled(hidden, target).backward()
    assert layer.weight.grad.is_sparse == sparse
    torch.testing.assert_close(layer.weight.grad.to_dense(), grad.to_dense())


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_checkpointing_gives_the_same_gradient(sparse):
    layer, hidden, target = layer_and_data(40, sparse=sparse)
    hidden.requires_grad_()
    layer(hidden, target).backward()
    grads = hidden.grad.clone(), layer.weight.grad.to_dense()
    hidden.grad = layer.weight.grad = None
    checkpoint(layer, hidden, target, use_reentrant=False).backward()
    torch.testing.assert_close((hidden.grad, layer.weight.grad.to_dense()), grads)


DDP = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from catnat import TreeLinear

def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    for sparse in (False, True):
        torch.manual_seed(0)
        layer = TreeLinear(4, 50, "natural", sparse=sparse)
        hidden, target = torch.randn(12, 4), torch.randint(50, (12,))
        layer(hidden, target).backward()
        alone, layer.weight.grad = layer.weight.grad.to_dense(), None
        mine = slice(6 * rank, 6 * rank + 6)
        both = DistributedDataParallel(layer)  # kept: it adds up gradients while it lives
        both(hidden[mine], target[mine]).backward()
        assert layer.weight.grad.is_sparse == sparse
        torch.testing.assert_close(layer.weight.grad.to_dense(), alone)
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, (sys.argv[1],), 2, start_method="fork")
"""


@one_server
def test_two_processes_have_the_gradient_of_one(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    done = run_fresh(script, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer: layer.nll(torch.zeros(2, 3), torch.zeros(2).long()), "4 features.*(2, 3)"),
        (lambda layer: layer.sample(torch.zeros(2, 5)), "4 features.*(2, 5)"),
        (lambda layer: layer.nll(torch.zeros(2, 4).long(), torch.zeros(2).long()), "torch.int64"),
        (lambda layer: layer.nll(torch.zeros(2, 4), torch.tensor([0, 9])), "0..8, got 9"),
        (lambda layer: layer.nll(torch.zeros(2, 4), torch.tensor([-1, 0])), "0..8, got -1"),
        (lambda layer: layer.nll(torch.zeros(2, 4), torch.zeros(3).long()), "(3,).*(2, 4)"),
        (lambda layer: layer.nll(torch.zeros(2, 4), torch.zeros(2)), "integers, got torch.float32"),
        (lambda layer: layer(torch.zeros(1, 4), torch.tensor([0]), 3), None),
        (lambda layer: layer.nll(torch.zeros(1, 4), torch.tensor([0]), reduction="max"), "'max'"),
        (lambda layer: layer.log_prob(torch.zeros(4), torch.tensor(9)), "0..8, got 9"),
        (lambda layer: layer.topk(torch.zeros(4), 10), "k must lie in 1..9, got 10"),
        (lambda layer: layer.sample(torch.full((4,), torch.nan)), "NaN"),
        (lambda layer: TreeLinear(4, 9, order=[0, 1, 2, 3, 4, 5, 6, 7, 7]), "no class has leaf 8"),
        (lambda layer: TreeLinear(4, 9, order=[0, 1, 2, 3, 4, 5, 6, 7, 9]), "0..8, got 9"),
        (lambda layer: TreeLinear(4, 9, order=range(8)), "order must hold 9 integers"),
        (lambda layer: TreeLinear(4, 9, order=torch.rand(9)), "torch.float32"),
        (lambda layer: TreeLinear(4, 9, "softmax"), "tree head.*'softmax'"),
        (lambda layer: TreeLinear(4, 9, "sparsemax"), "tree head.*'sparsemax'"),
        (lambda layer: TreeLinear(4, 9, "nature"), "unknown head 'nature'"),
        (lambda layer: TreeLinear(0, 9), "in_features must be at least 1, got 0"),
    ],
)
def test_wrong_input_gets_one_clear_error(call, message):
    with pytest.raises(
        (ValueError, TypeError), match=message and message.replace("(", r"\(").replace(")", r"\)")
    ):
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
