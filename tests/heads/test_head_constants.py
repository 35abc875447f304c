"""Options of heads and what is derived from them: fixed, shown, on the right device."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import GRID, CauchyHead, make, slow
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from catnat import CatnatHead, NaturalHead, SigmoidHead


class Learned(CatnatHead):
    """A split with a slope for the whole head and a shift for every node, both learned."""

    def __init__(self, num_categories, **options):
        super().__init__(num_categories, **options)
        self.log_slope = nn.Parameter(torch.tensor(0.3))
        self.shift = nn.Parameter(torch.linspace(-1, 1, self.num_scores))

    def log_activation(self, x):
        y = self.log_slope.exp() * x + self.shift
        return nn.functional.logsigmoid(-y), nn.functional.logsigmoid(y)


class Sharp(CatnatHead):
    """A split with a plain number."""

    sharp = 2.0

    def log_activation(self, x):
        return tuple(nn.functional.logsigmoid(sign * (self.sharp * x + 1)) for sign in (-1, 1))


def assert_uniform(head):
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        p = head.probs(torch.zeros(3, head.num_scores, dtype=dtype))
        assert (p - 1 / head.num_categories).abs().max() < tolerance


# ------------------------------------------------------------------------------------ never stale


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (NaturalHead(5), "center"),
        (NaturalHead(5), "amplitude"),
        (NaturalHead(5), "activation"),
        (SigmoidHead(4), "uniform_at_zero"),
        (CauchyHead(5), "center"),
    ],
)
def test_an_option_of_a_finished_head_cannot_change(head, name):
    before = getattr(head, name)
    with pytest.raises(AttributeError, match=f"{name} of a .* cannot change; make another head"):
        setattr(head, name, 1.0)
    assert getattr(head, name) == before
    p = torch.softmax(torch.randn(3, head.num_categories), -1)
    assert torch.allclose(head.probs(head.inverse(p)), p, atol=1e-6)
    assert getattr(copy.deepcopy(head), name) is not None


@pytest.mark.parametrize("K", [2, 4, 5, 18])
def test_a_split_with_parameters_stays_uniform_at_zero_when_they_move(K):
    head = Learned(K)
    assert_uniform(head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    for _ in range(3):
        loss = head.log_probs(torch.randn(8, K - 1))[:, 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert_uniform(head)
    with torch.no_grad():
        head.shift.data.fill_(2.0)  # an optimizer that torch does not see
    assert_uniform(head)
    p = torch.softmax(torch.randn(3, K, dtype=torch.float64), -1)
    assert torch.allclose(head.probs(head.inverse(p)), p, atol=1e-9)


def test_the_gradient_of_a_split_with_parameters_knows_that_the_center_moves():
    head = Learned(5).double()
    zero = torch.zeros(4, dtype=torch.float64)
    grads = torch.autograd.grad(head.log_probs(zero)[1], list(head.parameters()))
    assert all(grad.abs().max() < 1e-7 for grad in grads)  # uniform whatever the parameters
    scores = torch.randn(2, 4, dtype=torch.float64)

    def loss(slope, shift):
        values = {"log_slope": slope, "shift": shift}
        return torch.func.functional_call(head, values, (scores,)).logits[:, 1].sum()

    parameters = tuple(p.detach().requires_grad_() for p in head.parameters())
    assert torch.autograd.gradcheck(loss, parameters, atol=1e-5)


@pytest.mark.parametrize("K", [4, 5])
def test_a_split_with_a_plain_number_follows_it(K):
    head = Sharp(K)
    assert_uniform(head)
    head.sharp = 5.0
    assert_uniform(head)
    assert torch.equal(
        head.log_probs(torch.ones(K - 1)), copy.deepcopy(head).log_probs(torch.ones(K - 1))
    )


# ------------------------------------------------------------------------------- where they are


@pytest.mark.parametrize("K", [4, 5])
@pytest.mark.parametrize("name", GRID)
def test_a_head_is_built_on_the_device_of_the_context(name, K):
    with torch.device("meta"):
        head = make(name, K)
    assert all(buffer.device.type == "meta" for buffer in head.buffers())
    scores = torch.randn(2, head.num_scores)
    want = make(name, K).log_probs(scores)
    assert torch.equal(head.to_empty(device="cpu").log_probs(scores), want)
    with torch.device("meta"):
        head = make(name, K)
    assert torch.equal(head.log_probs(scores), want)  # the constants follow the scores
    assert head.log_probs(scores.to("meta")).device.type == "meta"
    assert torch.equal(head.log_probs(scores), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*GRID, "own"])
def test_a_head_built_in_inference_mode_can_be_trained(name, dtype):
    with torch.inference_mode():
        head = CauchyHead(5) if name == "own" else make(name, 5)
        head.log_probs(torch.zeros(head.num_scores, dtype=dtype))
        head.to("cpu")
    scores = torch.randn(3, head.num_scores, dtype=dtype, requires_grad=True)
    head.log_probs(scores)[:, 0].sum().backward()
    assert scores.grad.isfinite().all() and scores.grad.any()


@pytest.mark.parametrize(("make", "K"), [(CauchyHead, 5), slow(Learned, 4)])
def test_a_head_of_ones_own_compiles_and_exports_before_an_eager_call(make, K):
    want = make(K).probs(torch.ones(2, K - 1))
    torch._dynamo.reset()
    compiled = torch.compile(make(K).probs, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(torch.ones(2, K - 1)), want, atol=1e-6)
    exported = torch.export.export(Probs(make(K)), (torch.zeros(2, K - 1),))
    assert torch.allclose(exported.module()(torch.ones(2, K - 1)), want, atol=1e-6)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert make(K).probs(torch.zeros(2, K - 1)).shape == (2, K)
    head = make(K)
    with FakeTensorMode(allow_non_fake_inputs=True):
        head.probs(torch.zeros(2, K - 1))
    assert torch.allclose(head.probs(torch.ones(2, K - 1)), want)  # nothing fake was kept


class Probs(nn.Module):
    """The probabilities of a head."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, scores):
        return self.head.probs(scores)
