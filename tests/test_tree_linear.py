"""TreeLinear: the same numbers as a linear layer and a head, by way of few rows."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from cases_fresh import one_server, run_fresh
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from catnat import CatnatHead, TreeLinear
from catnat.ops import path_scores as ops
from catnat.optim import RowAdam
from catnat.tree_search import leaf_paths

ROOT = Path(__file__).resolve().parent.parent
HEADS = ("sigmoid", "natural", "cauchy")


class CauchyHead(CatnatHead, name="cauchy"):
    """A head of one's own: a(s) = 1/2 + arctan(s) / pi."""

    def log_split(self, x):
        return torch.log(0.5 - torch.atan(x) / math.pi), torch.log(0.5 + torch.atan(x) / math.pi)


def layer_and_data(K, head="natural", rows=7, width=6, dtype=torch.float64, **options):
    torch.manual_seed(K)
    layer = TreeLinear(width, K, head, torch.randperm(K), dtype=dtype, **options)
    return layer, torch.randn(rows, width, dtype=dtype), torch.randint(K, (rows,))


def by_linear_and_head(layer, hidden):
    leaves = layer.head.log_probs(F.linear(hidden, layer.weight, layer.bias))
    return leaves if layer.order is None else leaves[..., layer.order]


def without_kernels(monkeypatch):
    monkeypatch.setattr(ops, "_kernels", lambda: None)


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


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@NEEDS_CUDA
@pytest.mark.parametrize(
    ("K", "head", "options", "reduction", "dtype", "sparse"),
    [  # few: each compiles its kernels
        (3000, "sigmoid", {"order": torch.randperm(3000)}, "mean", torch.float32, True),
        (3000, "sigmoid", {"order": torch.randperm(3000)}, "none", torch.bfloat16, False),
        (2**14, "natural", {"bias": False}, "mean", torch.bfloat16, True),
        (70_000, "natural", {"tail": 0.05}, "sum", torch.float32, True),
    ],
)
def test_on_cuda_the_fused_loss_is_that_of_a_linear_layer(
    K, head, options, reduction, dtype, sparse
):
    torch.manual_seed(0)
    layer = TreeLinear(72, K, head, sparse=sparse, device="cuda", dtype=dtype, **options)
    hidden = torch.randn(300, 72, device="cuda", dtype=dtype).requires_grad_()
    target = torch.randint(K, (300,), device="cuda")
    target[:40], target[40:50] = target[0], -100
    parameters = [hidden, *layer.parameters()]
    loss = layer.nll(hidden, target, reduction=reduction)
    found = torch.autograd.grad(loss.mean(), parameters)
    copies = [x.detach().double().requires_grad_() for x in parameters]
    scores = F.linear(*copies[:2], *copies[2:])
    full = layer.head.log_probs(scores)
    full = full if layer.order is None else full[:, layer.order]
    known = F.nll_loss(full, target, reduction=reduction)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(loss.double(), known, **close)
    for ours, theirs in zip(found, torch.autograd.grad(known.mean(), copies), strict=True):
        assert ours.is_sparse == (sparse and ours.shape != hidden.shape)
        ours = (ours.to_dense() if ours.is_sparse else ours).double()
        assert (ours - theirs).norm() <= close["rtol"] / 2 * theirs.norm() + 1e-7


@NEEDS_CUDA
@pytest.mark.parametrize("sparse", [False, True])
def test_on_cuda_the_gradient_of_the_fused_loss_has_a_gradient(sparse):
    layer, hidden, target = layer_and_data(1000, rows=8, width=16, dtype=torch.float32)
    layer.sparse = sparse
    results = []
    for device in ("cpu", "cuda"):
        layer = layer.to(device)
        given = hidden.to(device).requires_grad_()
        loss = layer.nll(given, target.to(device))
        (grad,) = torch.autograd.grad(loss, given, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), given)[0].cpu())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


@NEEDS_CUDA
def test_on_cuda_ignored_targets_move_nothing_and_impossible_ones_are_nan():
    layer = TreeLinear(16, 5000, sparse=True, device="cuda")
    hidden = torch.randn(4, 16, device="cuda").requires_grad_()
    target = torch.tensor([3, -100, 4999, -100], device="cuda")
    layer.nll(hidden, target).backward()
    on_paths = leaf_paths(target[[0, 2]], 5000)[0].unique()
    rows = layer.weight.grad.coalesce().indices()[0]
    assert torch.equal(rows[255:], on_paths[on_paths >= 255])
    assert (hidden.grad[[1, 3]] == 0).all() and (hidden.grad[[0, 2]] != 0).any(1).all()
    nobody = torch.full_like(target, -100)
    hidden.grad = layer.weight.grad = None
    layer.nll(hidden, nobody).backward()
    assert layer.nll(hidden, nobody).isnan() and layer.nll(hidden, nobody, reduction="sum") == 0
    assert (hidden.grad == 0).all() and (layer.weight.grad.to_dense() == 0).all()
    target[0] = 5000
    assert layer.nll(hidden, target).isnan()
    found = layer.nll(hidden, target, reduction="none").isnan()
    assert found.tolist() == [True, False, False, False]
    assert layer.log_prob(hidden, target).isnan().tolist() == [True, True, False, True]


@NEEDS_CUDA
@pytest.mark.parametrize("sparse", [False, True])
def test_on_cuda_a_layer_learns_and_draws_as_on_the_cpu(sparse):
    here, hidden, target = layer_and_data(3000, rows=50, width=40, dtype=torch.float32)
    here.sparse = sparse
    there = TreeLinear(40, 3000, "natural", here.order, sparse=sparse, device="cuda")
    there.load_state_dict(here.state_dict())
    for layer, device in ((here, "cpu"), (there, "cuda")):
        optimizer = RowAdam(layer.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            layer.nll(hidden.to(device), target.to(device)).backward()
            optimizer.step()
    torch.testing.assert_close(there.weight.cpu(), here.weight, rtol=1e-3, atol=1e-4)
    hidden, target = hidden.cuda(), target.cuda()
    best = there.log_probs(hidden).topk(5).values
    torch.testing.assert_close(there.topk(hidden, 5).values, best, rtol=1e-4, atol=1e-4)
    assert there.sample(hidden, (3,)).shape == (3, 50)
    known = there.nll(hidden, target)
    with torch.autocast("cuda", torch.bfloat16):
        half = there.nll(hidden, target)
    torch.testing.assert_close(half, known, rtol=0.05, atol=0.05)
    assert there.nll(hidden, target + 3000).isnan()  # raising would wait for the device


def test_dense_gradients_never_wait_for_a_device(monkeypatch):
    """The device "meta" has shapes and no values: whoever asks for a value there fails."""
    monkeypatch.setattr(ops, "_segment_sums", lambda *tensors: None)  # a kernel on CUDA
    hidden, weight, grad = (torch.randn(size, device="meta") for size in ((6, 8), (99, 8), (6, 7)))
    nodes = torch.zeros(6, 7, dtype=torch.long, device="meta")
    of_weight, of_bias = ops._grad_of_all_rows(hidden, weight, nodes, grad, 3)
    assert of_weight.shape == (99, 8) and of_bias.shape == (99,)


TRITON = """
import torch
from catnat import TreeLinear
from catnat.ops import adam_rows, path_scores, triton_rows

torch.manual_seed(0)
path_scores._kernels = adam_rows._kernel = lambda: None


def learn(layer, hidden, target, fused, reduction):
    path_scores._has_triton = lambda *tensors: fused
    layer.zero_grad()
    hidden.grad = None
    loss = layer.nll(hidden, target, reduction=reduction)
    assert type(loss.grad_fn).__name__.startswith("_Loss") == (fused and reduction == "mean")
    loss.backward(torch.ones_like(loss) / loss.numel())
    return loss, hidden.grad, *(p.grad.to_dense() for p in layer.parameters())


close = {torch.float32: dict(rtol=1e-4, atol=1e-5), torch.bfloat16: dict(rtol=0.1, atol=0.05)}
cases = ((5, 3, "sigmoid", {}), (100, 20, "natural", {}), (64, 300, "natural", {"tail": 0.1}))
# Triton's interpreter is slow: bfloat16 or not, sparse or not, "none" or not, in all pairs.
few = {5: ((0, 0, 0), (1, 1, 1)), 100: ((0, 0, 1), (1, 1, 0)), 64: ((0, 1, 0), (1, 0, 1))}
for dtype, tolerance in close.items():
    for K, D, head, options in cases:
        for sparse in (False, True):
            order = torch.randperm(K) if sparse else None
            options |= {"bias": K != 64}
            layer = TreeLinear(D, K, head, order, sparse=sparse, upper_levels=2, **options)
            layer.to(dtype)
            hidden = torch.randn(24, D).to(dtype).requires_grad_()
            target = torch.randint(K, (24,))
            target[:20] = target[0]  # a frequent class: its kernel takes some tokens at a time
            target[21] = -100 if K == 100 else 0
            for reduction in ("mean", "none"):
                if (dtype == torch.bfloat16, sparse, reduction == "none") not in few[K]:
                    continue
                fused, plain = (
                    learn(layer, hidden, target, fused, reduction) for fused in (True, False)
                )
                for a, b in zip(fused, plain):
                    torch.testing.assert_close(a, b, **tolerance)
        if dtype == torch.float32:
            twice = []
            for fused in (True, False):
                path_scores._has_triton = lambda *tensors: fused
                loss = layer.nll(hidden, target)
                (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
                path_scores._has_triton = lambda *tensors: False
                twice.append(torch.autograd.grad(grad.square().sum(), hidden)[0])
            torch.testing.assert_close(*twice, **tolerance)
    hidden = torch.randn(6, 300).to(dtype)  # the other way, which heads of one's own take
    weight, nodes = torch.rand(40, 300).to(dtype), torch.randint(40, (6, 5))
    found = triton_rows.scores(hidden, weight, nodes)
    known = torch.einsum("md,mhd->mh", hidden.float(), weight[nodes].float())
    torch.testing.assert_close(found, known, **tolerance)
    sums, grad = hidden.clone(), torch.randn(6, 5)
    triton_rows.add_sums(sums, weight, nodes, grad)
    known = hidden.float() + torch.einsum("mh,mhd->md", grad, weight[nodes].float())
    torch.testing.assert_close(sums.float(), known, **tolerance)
    sums, known = hidden[:3].clone(), torch.zeros(3, 300)
    tokens, starts, ends = torch.tensor([1, 4, 5, 0, 2]), (0, 3, 4), (3, 4, 5)
    limits = torch.tensor(starts), torch.tensor(ends)
    triton_rows.segment_sums(sums, hidden, grad[0], tokens, *limits)
    for row, at in enumerate(map(slice, starts, ends)):
        known[row] = grad[0][at] @ hidden[tokens[at]].float()
    torch.testing.assert_close(sums.float(), known, **tolerance)
    for shape in ((7, 30), (7,)):
        ours = [torch.rand(shape).to(dtype) for _ in range(3)]
        theirs = [x.clone() for x in ours]
        grad = torch.randn(3, *shape[1:]).to(dtype)
        rest = torch.tensor([5, 0, 3]), grad, (0.9, 0.99), 0.1, 1.5, 1e-8
        triton_rows.adam_rows(*ours, *rest)
        adam_rows.adam_rows(*theirs, *rest)
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, **tolerance)
"""


@pytest.mark.skipif(not ops.HAS_TRITON, reason="Triton is not installed")
def test_triton_kernels_agree_with_plain_torch(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", TRITON]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
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
