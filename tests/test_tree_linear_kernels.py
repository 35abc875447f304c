"""The kernels of TreeLinear: on a CUDA device, and in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases_tree_linear import layer_and_data

from catnat import TreeLinear
from catnat.ops import dispatch
from catnat.ops import path_scores as ops
from catnat.optim import RowAdam
from catnat.tree_search import leaf_paths

ROOT = Path(__file__).resolve().parent.parent
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


@NEEDS_CUDA
def test_on_cuda_kept_launches_take_other_sizes_dtypes_and_addresses():
    torch.manual_seed(0)
    layer = TreeLinear(18, 3000, "natural", sparse=True, device="cuda")
    exact = TreeLinear(18, 3000, "natural", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    hidden, target = torch.randn(320, 18, device="cuda"), torch.randint(3000, (320,), device="cuda")
    cases = [(0, 320, torch.int64), (0, 304, torch.int64), (0, 5, torch.int64)]
    cases += [(0, 320, torch.int32), (1, 320, torch.int64), (0, 1, torch.int64)]
    for first, last, dtype in (*cases, cases[0], cases[4]):  # a first row of 1: not aligned
        rows = hidden[first:last].clone() if not first else hidden[first:last]
        classes = target.to(dtype)[first:last]
        found = layer.nll(rows.requires_grad_(), classes)
        gradients = torch.autograd.grad(found, [rows, *layer.parameters()])
        same = rows.detach().cpu().double().requires_grad_()
        known = exact.nll(same, classes.long().cpu())
        torch.testing.assert_close(found.cpu().double(), known, rtol=1e-4, atol=1e-5)
        wanted = torch.autograd.grad(known, [same, *exact.parameters()])
        for ours, theirs in zip(gradients, wanted, strict=True):
            ours = (ours.to_dense() if ours.is_sparse else ours).cpu().double()
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


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
few = {5: ((0, 0, 0), (1, 1, 0)), 100: ((0, 1, 1), (1, 0, 1)), 64: ()}
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
                kind = (dtype == torch.bfloat16, sparse, reduction == "none")
                if not every and kind not in few[K]:
                    continue
                fused, plain = (
                    learn(layer, hidden, target, fused, reduction) for fused in (True, False)
                )
                for a, b in zip(fused, plain):
                    torch.testing.assert_close(a, b, **tolerance)
        if dtype == torch.float32 and (every or K == 100):
            twice = []
            for fused in (True, False):
                path_scores._has_triton = lambda *tensors: fused
                loss, order = layer.nll(hidden, target), layer.order
                layer.set_order(None)  # the gradient is that of the order that the loss had
                (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
                layer.set_order(order)
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
    for shape in ((7, 30), (7,), (7, 2, 3)):
        ours = [torch.rand(shape).to(dtype) for _ in range(3)]
        theirs = [x.clone() for x in ours]
        grad = torch.randn(3, *shape[1:]).to(dtype)
        rest = torch.tensor([5, 0, 3]), grad, (0.9, 0.99), 0.1, 1.5, 1e-8
        for mine, triton in ((ours, True), (theirs, False)):
            adam_rows._has_triton = lambda param: triton
            adam_rows.adam_rows(*mine, *rest)
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, **tolerance)
"""


@pytest.mark.skipif(not dispatch.HAS_TRITON, reason="Triton is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
def test_triton_kernels_agree_with_plain_torch(every):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", f"every = {every}\n{TRITON}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
