"""Estimators by exhaustive enumeration, so that bias and variance are exact, and by frequency."""

import itertools
import math

import pytest
import torch
from cases import both_floats
from scipy.stats import chisquare

from catnat import make_head
from catnat.estimators import gumbel_rao, reinmax, score_function_surrogate, straight_through_gumbel

K = 3
FLOOR = -1000.0


def loss_table(weight):
    """Loss of each category: the weight of a network comes into it, so both gradients exist."""
    return torch.stack([weight**2, 3 - weight, 10 * weight.sin()]) + 5


@pytest.fixture
def parameters():
    scores = torch.tensor([0.3, -1.1, 0.7], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    return scores, weight


def true_gradients(scores, weight):
    expectation = (scores.softmax(0) * loss_table(weight)).sum()
    return torch.autograd.grad(expectation, (scores, weight))


def every_estimate(scores, weight, M, baseline):
    """Probability (K^M,) of each tuple of M samples, and its gradient estimate (K^M, K + 1)."""
    probabilities = []
    estimates = []
    for z in map(torch.tensor, itertools.product(range(K), repeat=M)):
        log_probs = scores.log_softmax(0)[z]
        surrogate = score_function_surrogate(loss_table(weight)[z], log_probs, baseline)
        gradients = torch.autograd.grad(surrogate, (scores, weight))
        estimates.append(torch.cat([g.flatten() for g in gradients]))
        probabilities.append(log_probs.detach().sum().exp())
    return torch.stack(probabilities), torch.stack(estimates)


# --- score function ---


@pytest.mark.parametrize(
    ("M", "baseline"),
    [
        (2, None),
        (3, None),
        (1, 0.0),
        (1, 6.5),
        (2, 6.5),
        (1, torch.tensor([6.5])),
        (2, torch.tensor([1.0, 9.0])),
    ],
)
def test_the_expected_gradient_is_the_true_one(parameters, M, baseline):
    probabilities, estimates = every_estimate(*parameters, M, baseline)
    expected = torch.cat([g.flatten() for g in true_gradients(*parameters)])
    torch.testing.assert_close(probabilities @ estimates, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("M", [2, 3])
def test_leaving_one_out_has_less_variance_than_no_baseline(parameters, M):
    def variance(baseline):
        probabilities, estimates = every_estimate(*parameters, M, baseline)
        estimates = estimates[:, :K]  # of the scores; the weight has no score-function term
        return probabilities @ estimates.square() - (probabilities @ estimates).square()

    assert (variance(None) < 0.5 * variance(0.0)).all()


def test_the_value_is_the_mean_loss_to_the_last_bit():
    losses = torch.randn(5, 3, 2) * 100
    log_probs = torch.randn(5, 3, 2) - 1000
    for baseline in (None, 125.0, torch.randn(3, 2)):
        value = score_function_surrogate(losses, log_probs, baseline)
        assert torch.equal(value, losses.mean(0))


def test_the_surrogate_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match=r"M = 1; pass baseline"):
        score_function_surrogate(torch.zeros(1, 4), torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"\(2, 4\) and \(2,\)"):
        score_function_surrogate(torch.zeros(2, 4), torch.zeros(2))


# --- straight-through Gumbel ---


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 1e6])
@both_floats
def test_frequencies_are_the_probabilities(temperature, dtype):
    probs = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01], dtype=dtype)
    draws = straight_through_gumbel(
        probs.log().expand(100_000, 5), temperature, generator=generator()
    )
    counts = draws.double().sum(0)
    assert chisquare(counts, 100_000 * probs.double() / probs.double().sum()).pvalue > 0.01


@pytest.mark.parametrize("worst", [0.0, 1e3])
def test_impossible_categories_lose_even_to_the_worst_noise(worst, monkeypatch):
    """Noise as kind as it can be to the floored category and as unkind to the other."""
    exponential = torch.tensor([worst, 1e3])
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda x, **_: x.copy_(exponential))
    draw = straight_through_gumbel(torch.tensor([FLOOR, 0.0]), 1.0)
    assert draw.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_the_gradient_is_that_of_the_relaxed_sample(temperature):
    log_probs = torch.randn(4, 5, dtype=torch.float64).log_softmax(-1).requires_grad_()
    direction = torch.randn(4, 5, dtype=torch.float64)
    gradients = {}
    for hard in (True, False):
        y = straight_through_gumbel(log_probs, temperature, hard=hard, generator=generator(3))
        (gradients[hard],) = torch.autograd.grad((y * direction).sum(), log_probs)
    assert torch.equal(gradients[True], gradients[False])

    noise = -torch.empty_like(log_probs).exponential_(generator=generator(3)).log()
    relaxed = ((log_probs + noise) / temperature).softmax(-1)
    (expected,) = torch.autograd.grad((relaxed * direction).sum(), log_probs)
    torch.testing.assert_close(gradients[True], expected)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("lowest", [-1e3, -1e30, -3e38])
def test_extreme_log_probs_and_temperatures_stay_finite(temperature, lowest):
    log_probs = torch.tensor([0.0, lowest, -50.0]).expand(100, 3).clone().requires_grad_()
    for hard in (True, False):
        y = straight_through_gumbel(log_probs, temperature, hard=hard)
        (grad,) = torch.autograd.grad((y * torch.arange(3.0)).sum(), log_probs)
        assert y.isfinite().all()
        assert grad.isfinite().all()


def test_the_temperature_may_be_a_tensor_and_must_be_positive():
    log_probs = torch.randn(4, 5).log_softmax(-1)
    number, tensor = (
        straight_through_gumbel(log_probs, t, hard=False, generator=generator())
        for t in (0.5, torch.tensor(0.5))
    )
    torch.testing.assert_close(number, tensor)
    # A value on the device is never looked at: the meta device has none to show.
    meta = straight_through_gumbel(log_probs.to("meta"), torch.tensor(0.5, device="meta"))
    assert meta.shape == (4, 5)
    for wrong in (0, 0.0, -1.5, math.nan):
        with pytest.raises(ValueError, match=f"temperature must be positive, got {wrong}"):
            straight_through_gumbel(log_probs, wrong)


@pytest.mark.parametrize("estimator", ["gumbel", "gumbel-rao", "relaxed"])
def test_a_temperature_can_be_learned_where_categories_are_impossible(estimator):
    q = make_head("softmax", 4)(torch.zeros(3, 4), mask=torch.tensor([True, True, False, True]))
    gradients = []
    for temperature in (0.7, 0.7 + 1e-3):
        x = torch.tensor(temperature, requires_grad=True)
        z = q.rsample(estimator=estimator, temperature=x, generator=generator(1))
        gradients += torch.autograd.grad(z[..., 0].square().sum(), x)
    assert gradients[0] != 0
    torch.testing.assert_close(*gradients, rtol=0.05, atol=1e-3)


def test_impossible_categories_have_no_share_of_a_relaxed_sample_at_any_temperature():
    for name in ("softmax", "sparsemax", "sigmoid", "natural"):
        head = make_head(name, 6)
        mask = torch.tensor([True, False, True, True, False, True])
        scores = torch.randn(50, head.num_scores, requires_grad=True)
        y = head(scores, mask=mask).rsample(estimator="relaxed", temperature=10_000.0)
        assert not y[:, ~mask].any()
        assert torch.allclose(y.sum(-1), torch.ones(50), atol=1e-5)
        assert torch.autograd.grad(y[:, 0].sum(), scores)[0].isfinite().all()


def test_reinmax_has_its_published_gradient_in_log_p():
    p = torch.softmax(torch.randn(7, 5, dtype=torch.float64), -1)
    log_p = p.log().requires_grad_()
    sample = torch.eye(5, dtype=torch.float64)[torch.randint(5, (7,))]
    g = torch.randn(7, 5, dtype=torch.float64)
    result = reinmax(log_p, sample)
    assert torch.equal(result, sample)
    (got,) = torch.autograd.grad(result, log_p, g)
    change = (g * sample).sum(-1, keepdim=True) - (g * p).sum(-1, keepdim=True)
    assert torch.allclose(got, p * g / 2 + change * sample / 2, atol=1e-15)


def test_the_mean_gradient_of_reinmax_is_that_of_a_quadratic_loss():
    """Exact to second order: for a quadratic function of the sample there is no bias at K = 2."""
    scores = torch.randn(2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2, dtype=torch.float64)
    loss = lambda d: d @ weight @ d  # noqa: E731
    log_p = torch.log_softmax(scores, -1)
    every = torch.eye(2, dtype=torch.float64)
    exact = sum(log_p[k].exp() * loss(every[k]) for k in range(2))
    (want,) = torch.autograd.grad(exact, scores, retain_graph=True)
    mean = sum(log_p[k].exp().detach() * loss(reinmax(log_p, every[k])) for k in range(2))
    (got,) = torch.autograd.grad(mean, scores)
    assert torch.allclose(got, want, atol=1e-12)


# --- Gumbel-Rao ---


def test_gumbel_rao_is_the_mean_of_the_relaxations_that_agree_with_the_sample():
    """Value and gradient for every D, against Gumbel noise of which only what agrees is kept."""
    log_probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    noise = -torch.empty(400_000, K, dtype=torch.float64).exponential_(generator=generator()).log()
    perturbed = log_probs + noise
    relaxed = (perturbed / 0.7).softmax(-1)
    for category, one_hot in enumerate(torch.eye(K, dtype=torch.float64)):
        agrees = perturbed.argmax(-1) == category
        want_mean = relaxed[agrees].mean(0)
        (want,) = torch.autograd.grad(want_mean @ weight, log_probs, retain_graph=True)
        drawn = gumbel_rao(log_probs, one_hot, 0.7, 200_000, generator(1))
        assert torch.equal(drawn, one_hot)
        (got,) = torch.autograd.grad(drawn @ weight, log_probs)
        torch.testing.assert_close(got, want, rtol=0, atol=8e-3)


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "sigmoid", "natural"])
def test_gumbel_rao_has_the_mean_of_gumbel_and_less_variance(name):
    head = make_head(name, 5)
    scores = torch.randn(head.num_scores, dtype=torch.float64, generator=generator())
    scores = scores.expand(60_000, -1).clone().requires_grad_()
    matrix = torch.randn(5, 5, dtype=torch.float64, generator=generator(1))
    gradients = {}
    for estimator, options in {"gumbel": {}, "gumbel-rao": {"num_draws": 8}}.items():
        z = head(scores).rsample(
            estimator=estimator, temperature=0.5, generator=generator(2), **options
        )
        (gradients[estimator],) = torch.autograd.grad((z @ matrix).square().sum(), scores)
    gumbel, rao = gradients.values()
    error = ((gumbel.var(0) + rao.var(0)) / len(scores)).sqrt()
    assert ((gumbel.mean(0) - rao.mean(0)).abs() < 4 * error + 1e-12).all()
    assert rao.var(0).sum() < 0.8 * gumbel.var(0).sum()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1.0, 1e30])
def test_gumbel_rao_stays_finite_and_never_draws_what_is_impossible(dtype, temperature):
    mask = torch.tensor([True, False, True, True, False, True])
    for name in ("softmax", "sparsemax", "sigmoid", "natural"):
        head = make_head(name, 6)
        scores = (50 * torch.randn(200, head.num_scores, generator=generator())).to(dtype)
        scores.requires_grad_()
        z = head(scores, mask=mask).rsample(estimator="gumbel-rao", temperature=temperature)
        assert z.dtype == torch.promote_types(dtype, torch.float32)
        assert set(z.unique().tolist()) == {0.0, 1.0} and not z[:, ~mask].any()
        (gradient,) = torch.autograd.grad((z * torch.arange(6.0)).sum(), scores)
        assert gradient.isfinite().all()


def test_impossible_categories_get_no_gradient_of_gumbel_rao():
    log_probs = torch.tensor([0.0, FLOOR, -200.0], requires_grad=True)
    one_hot = torch.tensor([1.0, 0.0, 0.0])
    z = gumbel_rao(log_probs, one_hot, 1e4, 64)
    (gradient,) = torch.autograd.grad(z[1] + 2 * z[2], log_probs)
    assert gradient[1] == 0 and gradient[2] > 0, "a possible one has a share at this temperature"


def test_gumbel_rao_under_vmap_draws_different_noise_for_every_model():
    head = make_head("sigmoid", 4)
    scores = torch.zeros(2, 100, 3, requires_grad=True)

    def loss(scores):
        z = head(scores).rsample(estimator="gumbel-rao", temperature=torch.tensor(0.5))
        return (z * torch.arange(1.0, 5.0)).square().sum()

    losses = torch.func.vmap(loss, randomness="different")(scores)
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    assert losses[0] != losses[1] and (gradient[0] != gradient[1]).any(-1).all()


def test_gumbel_rao_refuses_what_it_cannot_use():
    q = make_head("sigmoid", 4)(torch.zeros(3))
    for options, message in (
        ({"num_draws": 0}, "num_draws must be at least 1, got 0"),
        ({"temperature": 0.0}, r"temperature must be positive, got 0\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            q.rsample(estimator="gumbel-rao", **options)
