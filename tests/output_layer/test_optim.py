"""RowAdam: the rule of SparseAdam, for the rows that have a gradient."""

import copy

import pytest
import torch
from cases import run_interpreted

from catnat import TreeLinear
from catnat.optim import RowAdam, update_rows_plainly

NEEDS_CUDA = pytest.mark.gpu


def with_gradients(shape, used, sparse, dtype=torch.float64):
    """A gradient of some rows, one of them used twice."""
    rows = torch.tensor([*used, used[0]])
    values = torch.randn(len(rows), *shape[1:], dtype=dtype)
    grad = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=True)
    return grad if sparse else grad.to_dense()


@pytest.mark.parametrize("ours_sparse", [True, False])
@pytest.mark.parametrize("shape", [(50, 7), (50,), (9, 2, 3)])
def test_the_rule_is_that_of_sparse_adam_to_the_last_bit(shape, ours_sparse):
    torch.manual_seed(0)
    start = torch.randn(shape, dtype=torch.float64)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6}
    optimizer, known = RowAdam([ours], **options), torch.optim.SparseAdam([theirs], **options)
    for step in range(6):
        used = torch.randperm(shape[0])[: step + 1].tolist()
        theirs.grad = with_gradients(shape, used, sparse=True)
        ours.grad = theirs.grad if ours_sparse else theirs.grad.to_dense()
        for each in (optimizer, known):
            each.step()
        assert torch.equal(ours, theirs)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[ours][moment], known.state[theirs][moment])
    # The states are interchangeable.
    optimizer.load_state_dict(copy.deepcopy(known.state_dict()))
    theirs.grad = with_gradients(shape, [1, 2], sparse=True)
    ours.grad = theirs.grad.clone()
    optimizer.step()
    known.step()
    assert torch.equal(ours, theirs)


def test_where_every_row_has_a_gradient_it_is_adam():
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    theirs = copy.deepcopy(ours)
    # Adam divides epsilon by the root of the second correction; a tiny one does not matter.
    optimizers = RowAdam([ours], eps=1e-30), torch.optim.Adam([theirs], eps=1e-30)
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn_like(ours)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_rows_without_a_gradient_and_their_moments_stay():
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = RowAdam([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = copy.deepcopy((weight.data, optimizer.state[weight]))
    weight.grad = torch.zeros_like(weight)
    weight.grad[3, 1] = -1
    optimizer.step()
    for now, then in (
        (weight, before[0]),
        *((optimizer.state[weight][m], before[1][m]) for m in ("exp_avg", "exp_avg_sq")),
    ):
        assert (now != then).any(1).tolist() == [False, False, False, True, False]
    weight.grad = None
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 3


@pytest.mark.parametrize("sparse", [False, True])
def test_a_layer_learns_with_it_alone(sparse):
    torch.manual_seed(0)
    layer = TreeLinear(8, 500, frequent=20, sparse=sparse)
    hidden, target = torch.randn(64, 8), torch.randint(500, (64,))
    optimizer = RowAdam(layer.parameters(), lr=0.05)
    losses = []
    before = layer.weight.detach().clone()
    for _ in range(20):
        optimizer.zero_grad()
        loss = optimizer.step(lambda: backward(layer, hidden, target))
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    assert (layer.weight == before).all(1).any()  # nodes that no target passes


def backward(layer, hidden, target):
    loss = layer(hidden, target)
    loss.backward()
    return loss


def test_dense_and_sparse_gradients_of_a_layer_make_one_step():
    torch.manual_seed(0)
    layers = [TreeLinear(8, 500, sparse=False, dtype=torch.float64)]
    layers.append(copy.deepcopy(layers[0]))
    layers[1].sparse = True
    hidden, target = torch.randn(64, 8, dtype=torch.float64), torch.randint(500, (64,))
    for layer in layers:
        optimizer = RowAdam(layer.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            backward(layer, hidden, target)
            optimizer.step()
    torch.testing.assert_close(layers[0].weight, layers[1].weight)
    torch.testing.assert_close(layers[0].bias, layers[1].bias)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0}, "lr must be positive, got 0"),
        ({"betas": (1.0, 0.9)}, "beta1 must lie in .0, 1., got 1.0"),
        ({"eps": -1}, "eps must be positive, got -1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RowAdam([torch.nn.Parameter(torch.zeros(2))], **options)


@pytest.mark.parametrize("option", ["weight_decay", "amsgrad", "maximize"])
def test_options_that_a_group_brings_are_refused_if_they_have_no_effect(option):
    weight = torch.nn.Parameter(torch.zeros(2))
    RowAdam([{"params": [weight], option: 0, "name": "bias"}])
    with pytest.raises(ValueError, match=f"RowAdam has no {option}, got 0.1"):
        RowAdam([{"params": [weight], option: 0.1}])


def test_a_gradient_without_sparse_rows_is_refused():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match="sparse rows, got one with 2 sparse dimensions"):
        RowAdam([weight]).step()


# ---------------------------------------------------------------------------------- kernels

INTERPRETED = """
import torch
from contextlib import nullcontext
torch.cuda.device_of = lambda x: nullcontext()
from catnat.kernels import triton_rows
from catnat.optim import update_rows_plainly

torch.manual_seed(0)
triton_rows._COLUMNS = 16  # so that a row takes several rounds
for shape in ((40, 7), (40, 37), (70,), (5, 2, 3)):
    start = [torch.randn(shape), torch.randn(shape), torch.rand(shape)]
    rows = torch.randperm(shape[0])[:4]
    grad = torch.randn(4, *shape[1:])
    numbers = 0.02, 0.9, 0.99, 1e-6
    dense = torch.zeros(shape).index_copy_(0, rows, grad)
    expected = [x.clone() for x in start]
    update_rows_plainly(expected[0], grad, rows, *expected[1:], *numbers)
    for given, chosen in ((grad, rows), (dense, None)):
        found = [x.clone() for x in start]
        triton_rows.update_rows(found[0], given, chosen, *found[1:], *numbers)
        for ours, known, old in zip(found, expected, start):
            torch.testing.assert_close(ours, known)
            left = torch.ones(shape[0], dtype=torch.bool)
            left[rows] = False
            assert torch.equal(ours[left], old[left])
"""


def test_the_kernel_agrees_with_plain_torch_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(INTERPRETED)


@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3000, 96), (3000, 5000), (70_001,)])
@pytest.mark.parametrize("sparse", [True, False])
def test_on_cuda_the_kernel_agrees_with_plain_torch(shape, sparse, dtype):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype))
    optimizer = RowAdam([weight], lr=0.02)
    expected = [weight.detach().double(), *(torch.zeros(shape).cuda().double() for _ in range(2))]
    for step in range(1, 4):
        used = torch.randperm(shape[0])[:200]
        values = torch.randn(200, *shape[1:]).to(dtype)
        grad = torch.sparse_coo_tensor(used[None], values, shape).cuda().coalesce()
        weight.grad = grad if sparse else grad.to_dense()
        optimizer.step()
        size = 0.02 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        rows, values = grad.indices()[0], grad.values().double()
        update_rows_plainly(expected[0], values, rows, *expected[1:], size, 0.9, 0.999, 1e-8)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    state = optimizer.state[weight]
    for ours, known in zip((weight, state["exp_avg"], state["exp_avg_sq"]), expected, strict=True):
        torch.testing.assert_close(ours.double(), known, rtol=tolerance, atol=tolerance)
