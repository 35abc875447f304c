"""The kernels of TreeLinear: on a CUDA device, and in Triton's interpreter."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import run_interpreted
from cases_tree_linear import layer_and_data

from catnat import TreeLinear
from catnat.heads.nodes import leaf_paths
from catnat.kernels import dispatch

NEEDS_CUDA = pytest.mark.gpu


@NEEDS_CUDA
@pytest.mark.parametrize(
    ("K", "head", "options", "reduction", "dtype"),
    [  # few: each compiles its kernels
        (3000, "sigmoid", {"order": torch.randperm(3000)}, "mean", torch.float32),
        (3000, "sigmoid", {"order": torch.randperm(3000)}, "none", torch.bfloat16),
        (2**14, "natural", {"bias": False}, "mean", torch.bfloat16),
        (70_000, "natural", {"tail": 0.05}, "sum", torch.float32),
        (3000, "sigmoid", {"frequent": range(90, 190)}, "mean", torch.float32),
    ],
)
def test_on_cuda_the_fused_loss_is_that_of_a_linear_layer(K, head, options, reduction, dtype):
    torch.manual_seed(0)
    layer = TreeLinear(72, K, head, device="cuda", dtype=dtype, **options)
    hidden = torch.randn(300, 72, device="cuda", dtype=dtype).requires_grad_()
    target = torch.randint(K, (300,), device="cuda")
    target[:40], target[40:50], target[50:80] = target[0], -100, 95
    parameters = [hidden, *layer.parameters()]
    assert layer._fused(hidden) is not None
    loss = layer.nll(hidden, target, reduction=reduction)
    found = torch.autograd.grad(loss.mean(), parameters)
    exact = copy.deepcopy(layer).double()
    copies = [hidden.detach().double().requires_grad_(), *exact.parameters()]
    known = F.nll_loss(exact.log_probs(copies[0]), target, reduction=reduction)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(loss.double(), known, **close)
    for ours, theirs in zip(found, torch.autograd.grad(known.mean(), copies), strict=True):
        assert (ours.double() - theirs).norm() <= close["rtol"] / 2 * theirs.norm() + 1e-7


@NEEDS_CUDA
def test_on_cuda_the_gradient_of_the_fused_loss_has_a_gradient():
    layer, hidden, target = layer_and_data(1000, rows=8, width=16, dtype=torch.float32)
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
    layer = TreeLinear(16, 5000, device="cuda")
    hidden = torch.randn(4, 16, device="cuda").requires_grad_()
    target = torch.tensor([3, -100, 4999, -100], device="cuda")
    layer.nll(hidden, target).backward()
    on_paths = leaf_paths(target[[0, 2]], 5000)[0].unique()
    assert torch.equal(layer.weight.grad.any(1).nonzero()[:, 0], on_paths)
    assert (hidden.grad[[1, 3]] == 0).all() and (hidden.grad[[0, 2]] != 0).any(1).all()
    nobody = torch.full_like(target, -100)
    hidden.grad = layer.weight.grad = None
    layer.nll(hidden, nobody, reduction="sum").backward()
    assert layer.nll(hidden, nobody).isnan() and layer.nll(hidden, nobody, reduction="sum") == 0
    assert (hidden.grad == 0).all() and (layer.weight.grad == 0).all()
    target[0] = 5000
    assert layer.nll(hidden, target).isnan()
    found = layer.nll(hidden, target, reduction="none").isnan()
    assert found.tolist() == [True, False, False, False]
    assert layer.log_prob(hidden, target).isnan().tolist() == [True, True, False, True]


@NEEDS_CUDA
@pytest.mark.parametrize(("sparse", "frequent"), [(False, 0), (True, 0), (False, 200)])
def test_on_cuda_a_layer_learns_and_draws_as_on_the_cpu(sparse, frequent):
    options = {"sparse": sparse, "frequent": frequent}
    here, hidden, target = layer_and_data(3000, rows=50, width=40, dtype=torch.float32, **options)
    there = TreeLinear(40, 3000, "natural", here.order, device="cuda", **options)
    there.load_state_dict(here.state_dict())
    for layer, device in ((here, "cpu"), (there, "cuda")):
        kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
        optimizer = kind(list(layer.parameters()), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            layer.nll(hidden.to(device), target.to(device)).backward()
            optimizer.step()
    torch.testing.assert_close(there.weight.cpu(), here.weight, rtol=1e-3, atol=1e-4)
    hidden, target = hidden.cuda(), target.cuda()
    best = there.log_probs(hidden).topk(5).values
    torch.testing.assert_close(there.topk(hidden, 5).values, best, rtol=1e-4, atol=1e-4)
    assert there.sample(hidden, (3,)).shape == (3, 50)
    drawn = there.sample(hidden[0], (40_000,)).bincount(minlength=3000) / 40_000
    probs = there.log_probs(hidden[0]).exp()
    assert (drawn - probs).abs().max() < 5 * (probs.max() / 40_000).sqrt()
    known = there.nll(hidden, target)
    with torch.autocast("cuda", torch.bfloat16):
        half = there.nll(hidden, target)
    torch.testing.assert_close(half, known, rtol=0.05, atol=0.05)


TRITON = """
import torch
from catnat import TreeLinear
from catnat.kernels import triton_layer
from catnat.output_layer import draws

torch.manual_seed(0)
triton_layer.UPPER = 2


def fuse(layer, fused):
    tree = triton_layer.FusedTree(
        layer.weight, layer.bias, layer.head.activation, layer._constants(layer.weight)
    )
    assert tree.takes(layer.weight)
    layer._fused = lambda hidden: tree if fused else None


close = {torch.float32: dict(rtol=1e-4, atol=1e-5), torch.bfloat16: dict(rtol=0.1, atol=0.05)}


def learn(layer, hidden, target, fused, reduction):
    fuse(layer, fused)
    layer.zero_grad()
    hidden.grad = None
    loss = layer.nll(hidden, target, reduction=reduction)
    loss.backward(torch.ones_like(loss) / loss.numel())
    return loss, hidden.grad, *(p.grad for p in layer.parameters())


cases = (
    (5, 3, "sigmoid", {}, torch.float32, "mean"),
    (100, 20, "natural", {}, torch.float32, "none"),
    (100, 20, "natural", {}, torch.bfloat16, "mean"),
    (64, 300, "natural", {"tail": 0.1, "bias": False}, torch.float32, "mean"),
    (37, 1100, "sigmoid", {}, torch.bfloat16, "sum"),
    (100, 20, "sigmoid", {"frequent": [5, 93, 8]}, torch.float32, "mean"),
)
for K, D, head, options, dtype, reduction in cases:
    layer = TreeLinear(D, K, head, torch.randperm(K), dtype=dtype, **options)
    hidden = torch.randn(24, D).to(dtype).requires_grad_()
    target = torch.randint(K, (24,))
    target[:17] = target[0]  # a frequent class: its kernel takes some tokens at a time
    target[21] = -100
    fused, plain = (learn(layer, hidden, target, way, reduction) for way in (True, False))
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b, **close[dtype])
    classes = torch.tensor([0, K, -1, K - 1])
    fuse(layer, True)
    assert layer._log_prob(hidden[:4], classes).isnan().tolist() == [False, True, True, False]
    walks = []
    for way in (True, False):
        fuse(layer, way)
        draws.uniform = lambda shape, *_: torch.full(shape, 0.45, dtype=torch.float64)
        walks.append(draws._walk(layer, hidden.detach(), 1, None))
    assert (walks[0] != walks[1]).sum() <= (0 if dtype == torch.float32 else 2), walks
    if dtype == torch.float32:
        twice = []
        for way in (True, False):
            fuse(layer, way)
            (grad,) = torch.autograd.grad(layer.nll(hidden, target), hidden, create_graph=True)
            twice.append(torch.autograd.grad(grad.square().sum(), hidden)[0])
        torch.testing.assert_close(*twice, **close[dtype])
"""


@pytest.mark.skipif(not dispatch.HAS_TRITON, reason="Triton is not installed")
@pytest.mark.slow
def test_triton_kernels_agree_with_plain_torch():
    run_interpreted(TRITON)
