"""natural with a tail: the paper's split in the middle, an exponential beyond."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES, CauchyHead, exact_log_probs

from catnat import make_head
from catnat.activations import CustomActivation
from catnat.kernels import cpu, reference
from catnat.numerics import LOG_ZERO, largest_score

TAILS = (1e-12, 0.005, 0.05, 0.4)
SIZES = (2, 3, 5, 8, 18)


@pytest.mark.parametrize("amplitude", [2 * math.pi, 1.3])
@pytest.mark.parametrize("K", [3, 8, 18])
@pytest.mark.parametrize("tail", TAILS)
def test_definition_in_sixty_digits(tail, K, amplitude):
    head = make_head("natural", K, tail=tail, amplitude=amplitude)
    scores = amplitude * (0.5 * torch.randn(6, K - 1, dtype=torch.float64)).float()
    exact = [
        [float(x) for x in exact_log_probs("natural", row.tolist(), tail=tail, amplitude=amplitude)]
        for row in scores
    ]
    want = torch.tensor(exact, dtype=torch.float64)
    assert (want[:, 0] < math.log(tail)).any() or tail < 1e-3
    for got, error in ((head.log_probs(scores.double()), 1e-12), (head.log_probs(scores), 2e-6)):
        assert ((got - want).abs() <= error * (1 + want.abs())).all()


@pytest.mark.parametrize("tail", [0.005, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_middle_is_the_papers_split_bit_for_bit(tail, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda: None)
    head, paper = make_head("natural", 2, tail=tail), make_head("natural", 2)
    scores = torch.linspace(-4, 4, 801, dtype=dtype)[:, None]
    middle = paper.probs(scores).amin(-1) > tail * (1 + 1e-6)
    assert 0.3 < middle.float().mean() < 0.8
    for method in ("log_probs", "information", "fisher_diagonal"):
        got, want = getattr(head, method)(scores), getattr(paper, method)(scores)
        assert torch.equal(got[middle], want[middle])
        assert not torch.equal(got[~middle], want[~middle])
    assert (head.information(scores)[middle] == 0.25).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["plain", "fused", "vmap"])
def test_no_score_is_without_gradient(dtype, how, monkeypatch):
    if how == "plain":
        monkeypatch.setattr(cpu, "library", lambda: None)
    head = make_head("natural", 4, tail=0.05)
    log_probs = torch.func.vmap(head.log_probs) if how == "vmap" else head.log_probs
    for size in (3.0, 3.2, 10.0, 1e3, 6e4):
        for sign in (1, -1):
            scores = torch.full((1, 3), sign * size, dtype=dtype, requires_grad=True)
            unlikely = 0 if sign > 0 else 3
            (grad,) = torch.autograd.grad(log_probs(scores)[0, unlikely], scores)
            path = [0, 1] if sign > 0 else [0, 2]
            want = -sign * head.activation.steepness
            assert grad[0, path].tolist() == pytest.approx([want, want], rel=1e-2)
            assert not head.saturated(scores.detach()).any()


@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("tail", TAILS)
def test_the_inverse_reaches_into_the_tail(tail, K):
    head = make_head("natural", K, tail=tail)
    for spread in (0.5, 4.0, 12.0):
        p = torch.softmax(spread * torch.randn(20, K, dtype=torch.float64), -1)
        back = head.log_probs(head.inverse(p))
        assert torch.allclose(back, p.log(), atol=1e-6, rtol=1e-6)
        assert torch.allclose(head.probs(head.inverse(p.float())), p.float(), atol=1e-5)


@pytest.mark.parametrize("tail", [0.05, 0.34, 0.45, 0.4999])
@pytest.mark.parametrize("K", [3, 5, 18, 1000])
def test_zero_scores_are_uniform_even_where_a_center_lies_in_the_tail(K, tail):
    head = make_head("natural", K, tail=tail)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 4e-6)):
        p = head.probs(torch.zeros(K - 1, dtype=dtype))
        assert (p * K - 1).abs().max() < tolerance


@pytest.mark.parametrize("options", [{"amplitude": 1e-15}, {"amplitude": 1e15}, {}])
@pytest.mark.parametrize("tail", [1e-30, 1e-12, 0.4999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_options_stay_finite(dtype, tail, options):
    head = make_head("natural", 5, tail=tail, **options)
    for size in (0.0, 1e-20, 1.0, 3.2, 1e4, torch.finfo(dtype).max):
        scores = torch.full((2, 4), size, dtype=dtype)
        scores[1] *= -1
        scores.requires_grad_()
        out = head.log_probs(scores)
        assert out.isfinite().all() and (out >= -4 * largest_score(out.dtype)).all()
        assert torch.allclose(out.exp().sum(-1).double(), torch.ones(2, dtype=torch.float64))
        (grad,) = torch.autograd.grad(out.sum(), scores)
        assert grad.isfinite().all()
        assert head.fisher_diagonal(scores.detach()).isfinite().all()


# ------------------------------------------------------------------- a split by its function alone


def explodes(x):
    """Not a number at infinity, with a gradient that is none either."""
    y = x.sinh()
    return torch.nn.functional.logsigmoid(-y + 0 * x), torch.nn.functional.logsigmoid(y - 0 * x)


@pytest.mark.parametrize("function", [CauchyHead(2).log_activation, explodes])
@pytest.mark.parametrize("how", ["plain", "vmap", "compiled"])
def test_a_custom_split_is_certain_at_infinite_scores(function, how):
    activation = CustomActivation(function)
    scores = torch.tensor([[math.inf, -math.inf, 0.5]])
    constants = activation.node_constants(torch.tensor([0.0, 1.0, -1.0]), torch.float32)

    def log_probs(s):
        return reference.tree_log_probs(s, activation, constants)

    def fisher(s):
        return activation.information(s, constants)

    if how == "vmap":
        log_probs, fisher = torch.func.vmap(log_probs), torch.func.vmap(fisher)
    if how == "compiled":
        torch._dynamo.reset()
        log_probs = torch.compile(log_probs, fullgraph=True, backend="aot_eager")
        fisher = torch.compile(fisher, fullgraph=True, backend="aot_eager")
    leaf = scores.clone().requires_grad_()
    out = log_probs(leaf)
    assert (out.exp() == 0).tolist() == [[True, True, False, False]]
    assert out[0, 0] == LOG_ZERO and out[0, 1] == LOG_ZERO
    (grad,) = torch.autograd.grad((out * torch.arange(1.0, 5.0)).sum(), leaf)
    assert grad[0, :2].tolist() == [0.0, 0.0] and grad[0, 2].isfinite() and grad[0, 2] != 0
    assert fisher(scores)[0, :2].tolist() == [0.0, 0.0] and fisher(scores)[0, 2] > 0
