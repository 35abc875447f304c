"""Losses against literal sums, and models small enough to enumerate."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from catnat.losses import bernoulli_nll, energy_score, importance_weighted_nll, kl_to_uniform


def double(*shape, **kwargs):
    return torch.randn(*shape, dtype=torch.float64, **kwargs)


def literal_energy_score(samples, target):
    """The formula, term by term, for (M, D) samples and a (D,) target."""
    M = len(samples)
    score = sum((x - target).square().sum().sqrt() for x in samples) / M
    for m, n in itertools.product(range(M), repeat=2):
        if m != n:
            score = score - (samples[m] - samples[n]).square().sum().sqrt() / (2 * M * (M - 1))
    return score


# --- energy score ---


@given(M=st.integers(2, 7), D=st.integers(1, 5), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_energy_score_is_the_double_loop_in_value_and_gradient(M, D, scale):
    torch.manual_seed(10 * M + D)
    samples = (double(M, D) * scale).requires_grad_()
    target = (double(D) * scale).requires_grad_()
    ours = energy_score(samples, target)
    literal = literal_energy_score(samples, target)
    torch.testing.assert_close(ours, literal, rtol=1e-12, atol=1e-12 * scale)
    for a, b in zip(
        torch.autograd.grad(ours, (samples, target)),
        torch.autograd.grad(literal, (samples, target)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,)])
def test_energy_score_works_elementwise_over_any_batch(batch):
    samples = double(4, *batch, 3)
    target = double(*batch, 3)
    score = energy_score(samples, target)
    assert score.shape == batch
    for index in itertools.product(*map(range, batch)):
        expected = literal_energy_score(samples[(slice(None), *index)], target[index])
        torch.testing.assert_close(score[index], expected)


def test_energy_score_has_right_first_and_second_derivatives():
    inputs = (double(4, 2, 3, requires_grad=True), double(2, 3, requires_grad=True))
    assert torch.autograd.gradcheck(energy_score, inputs)
    assert torch.autograd.gradgradcheck(energy_score, inputs)


def test_coincident_points_neither_attract_nor_repel():
    samples = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(energy_score(samples, torch.zeros(2)), samples)
    x = torch.tensor([1.0, 0.0])
    torch.testing.assert_close(grad, torch.stack([x / 3 - x / 6, x / 3 - x / 6, x / 3]))


def test_energy_score_does_not_suffer_from_a_common_offset():
    centered = torch.randn(8, 3, 4)
    target = torch.randn(3, 4)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        samples = (centered + 1e4).to(dtype).requires_grad_()
        energy_score(samples, (target + 1e4).to(dtype)).sum().backward()
        gradients.append(samples.grad.double())
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


def test_energy_score_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match=r"M = 1"):
        energy_score(torch.zeros(1, 5, 3), torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"\(4, 5, 3\) and \(5, 1\)"):
        energy_score(torch.zeros(4, 5, 3), torch.zeros(5, 1))


# --- terms of the ELBO ---


@pytest.mark.parametrize("event_dims", [0, 1, 2, 3])
def test_bernoulli_nll_is_minus_the_log_prob(event_dims):
    logits = double(2, 5, 3, 4)
    x = torch.rand(2, 5, 3, 4).bernoulli().double()
    bernoulli = torch.distributions.Bernoulli(logits=logits)
    expected = -torch.distributions.Independent(bernoulli, event_dims).log_prob(x)
    torch.testing.assert_close(bernoulli_nll(logits, x, event_dims), expected)


def test_bernoulli_nll_takes_grey_values_and_extreme_logits():
    logits = torch.tensor([-1e4, 0.0, 1e4], requires_grad=True)
    nll = bernoulli_nll(logits, torch.tensor([0.25, 0.25, 0.25]), event_dims=0)
    torch.testing.assert_close(nll, torch.tensor([2500.0, math.log(2), 7500.0]))
    nll.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([-0.25, 0.25, 0.75]))


def test_bernoulli_nll_shares_one_x_among_samples_but_never_broadcasts_events():
    logits = double(6, 2, 4)
    x = torch.rand(2, 4).double()
    nll = bernoulli_nll(logits, x, event_dims=1)
    expected = torch.stack([bernoulli_nll(row, x, event_dims=1) for row in logits])
    torch.testing.assert_close(nll, expected)
    with pytest.raises(ValueError, match=r"\(2, 1\).*\(6, 2, 4\)"):
        bernoulli_nll(logits, x[:, :1], event_dims=1)


def test_kl_to_uniform_is_that_of_torch():
    log_probs = double(2, 3, 5).log_softmax(-1).requires_grad_()
    uniform = torch.distributions.Categorical(logits=torch.zeros(5, dtype=torch.float64))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=log_probs.detach()), uniform
    )
    torch.testing.assert_close(kl_to_uniform(log_probs), expected)
    assert torch.autograd.gradcheck(kl_to_uniform, log_probs)


@pytest.mark.parametrize("floor", [-1000.0, -1e30, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_impossible_categories_add_nothing_to_the_kl(floor, dtype):
    log_probs = torch.tensor([math.log(0.5), floor, math.log(0.5), floor], dtype=dtype)
    log_probs.requires_grad_()
    kl = kl_to_uniform(log_probs)
    kl.backward()
    tolerance = torch.finfo(dtype).eps
    assert kl.item() == pytest.approx(math.log(2), abs=2 * tolerance)
    assert (log_probs.grad[1::2] == 0).all()
    assert log_probs.grad[0].item() == pytest.approx(0.5 * (1 - math.log(2)), abs=tolerance)


# --- importance-weighted likelihood ---


class NineLatents:
    """One x and nine values of z: p(x, z) is a table, q(z | x) another."""

    def __init__(self):
        self.log_joint = double(9) - 90
        self.log_q = double(9).log_softmax(0)
        self.nll = -self.log_joint.logsumexp(0)

    def log_weights(self, m):
        z = torch.multinomial(self.log_q.exp(), m, replacement=True)
        return (self.log_joint - self.log_q)[z]


def test_nll_is_exact_for_one_sample_when_q_is_the_posterior():
    model = NineLatents()
    model.log_q = model.log_joint + model.nll
    for num_samples in (1, 5, 130):
        torch.testing.assert_close(
            importance_weighted_nll(model.log_weights, num_samples), model.nll
        )


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 100, 1000])
def test_nll_does_not_depend_on_the_chunks_and_asks_for_no_more(chunk_size):
    weights = double(100, 2, 3) * 5 - 1000
    asked = []
    position = 0

    def log_weights(m):
        nonlocal position
        asked.append(m)
        position += m
        return weights[position - m : position]

    nll = importance_weighted_nll(log_weights, 100, chunk_size)
    torch.testing.assert_close(nll, math.log(100) - weights.logsumexp(0), rtol=1e-13, atol=0)
    assert sum(asked) == 100
    assert max(asked) == min(chunk_size, 100)


def test_nll_keeps_no_graph_and_refuses_nonsense():
    weights = torch.zeros(1, requires_grad=True)
    assert not importance_weighted_nll(lambda m: weights.expand(m, 1)).requires_grad
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        importance_weighted_nll(lambda m: torch.zeros(m), 0)
    with pytest.raises(ValueError, match=r"\(64, \*\), got \(3, 64\)"):
        importance_weighted_nll(lambda m: torch.zeros(3, m))
