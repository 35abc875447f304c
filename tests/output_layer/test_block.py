"""The kernels of the softmax over frequent classes: on a CUDA device, and in the interpreter."""

import copy

import pytest
import torch
from cases import run_interpreted

from catnat import TreeLinear

NEEDS_CUDA = pytest.mark.gpu

INTERPRETED = """
import torch
from contextlib import nullcontext
torch.cuda.device_of = lambda x: nullcontext()
from catnat.kernels.triton_block import block_nll, block_nll_plainly, takes

torch.manual_seed(0)
cases = (
    (24, 19, True, torch.float32),
    (8, 8, False, torch.float32),
    (16, 11, True, torch.bfloat16),
)
for columns, used, has_bias, dtype in cases:
    logits = (3 * torch.randn(7, columns)).to(dtype).requires_grad_()
    bias = torch.randn(used).to(dtype).requires_grad_() if has_bias else None
    column = torch.randint(used, (7,))
    assert takes(logits, bias)
    inputs = [x for x in (logits, bias) if x is not None]
    weights = torch.randn(7)
    weights[2] = 0
    found = block_nll(logits, bias, column, used)
    known = block_nll_plainly(logits, bias, column, used)
    torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    theirs = torch.autograd.grad((known * weights).sum(), inputs)
    bound = 1e-5 if dtype == torch.float32 else 0.03
    for a, b in zip(ours, theirs):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)
    assert not ours[0][:, used:].any() and not ours[0][2].any()

logits = torch.randn(3, 8, requires_grad=True)
bias = torch.randn(5, requires_grad=True)
column = torch.tensor([0, 4, 2])


def second(function):
    (first,) = torch.autograd.grad(
        function(logits, bias, column, 5).square().sum(), logits, create_graph=True
    )
    return torch.autograd.grad(first.square().sum(), (logits, bias))


for a, b in zip(second(block_nll), second(block_nll_plainly)):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
broken = torch.randn(3, 8)
broken[1, 2] = torch.nan
broken[2, 7] = torch.nan  # padding
assert block_nll(broken, bias, column, 5).isnan().tolist() == [False, True, False]
broken.requires_grad_()
losses = block_nll(broken, bias, column, 5)
torch.where(torch.tensor([True, False, True]), losses, 0.0).sum().backward()
assert broken.grad.isfinite().all() and not broken.grad[1].any()
"""


def test_the_kernels_agree_with_plain_torch_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(INTERPRETED)


@NEEDS_CUDA
@pytest.mark.parametrize("frequent", [5, 4096])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_gradients_are_those_of_float64(frequent, bias, dtype):
    torch.manual_seed(0)
    layer = TreeLinear(64, 20_000, bias=bias, frequent=frequent, device="cuda", dtype=dtype)
    hidden = torch.randn(500, 64, device="cuda", dtype=dtype).requires_grad_()
    target = torch.randint(2 * frequent, (500,), device="cuda")
    target[7] = -100
    exact = copy.deepcopy(layer).double()
    wide = hidden.detach().double().requires_grad_()
    loss = layer(hidden, target)
    known = exact(wide, target)
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(loss.double(), known, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(loss, (hidden, *layer.parameters()))
    theirs = torch.autograd.grad(known, (wide, *exact.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error < tolerance
    with torch.autocast("cuda", torch.bfloat16):
        half = layer(hidden, target)
    torch.testing.assert_close(half.double(), known, rtol=0.03, atol=0.03)
