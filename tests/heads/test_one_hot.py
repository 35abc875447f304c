"""Straight-through samples, and the distribution over one-hot vectors."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, HEADS, random_scores, slow
from torch.distributions import Independent, OneHotCategorical, kl_divergence

from catnat import HeadOneHotCategorical, make_head


def made(name: str, *batch: int, K: int = 5):
    head = make_head(name, K)
    scores = torch.randn(*batch, head.num_scores, dtype=torch.float64).requires_grad_()
    return head(scores), scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HEADS)
def test_a_straight_through_sample_is_exactly_one_hot(name, dtype):
    head = make_head(name, 5)
    q = head(random_scores(head).to(dtype).requires_grad_())
    x = q.rsample((100,), estimator="straight-through")
    assert x.shape == (100, 4, 5) and x.dtype == q.probs.dtype
    assert ((x == 0) | (x == 1)).all() and (x.sum(-1) == 1).all()
    assert torch.allclose(
        q.rsample((20_000,), estimator="straight-through").mean(0), q.probs, atol=0.02
    )


@pytest.mark.parametrize("name", HEADS)
def test_its_gradient_is_that_of_the_probabilities(name):
    q, scores = made(name, 4)
    weight = torch.randn(7, 4, 5, dtype=torch.float64)
    (got,) = torch.autograd.grad(
        (weight * q.rsample((7,), estimator="straight-through")).sum(), scores, retain_graph=True
    )
    (want,) = torch.autograd.grad((weight.sum(0) * q.probs).sum(), scores)
    assert torch.allclose(got, want)


@pytest.mark.parametrize("name", ["softmax", "natural"])
def test_it_agrees_with_torch(name):
    q, _ = made(name, 3, 2)
    ours, theirs = q.one_hot(), OneHotCategorical(probs=q.probs)
    assert isinstance(ours, HeadOneHotCategorical) and isinstance(ours, OneHotCategorical)
    assert (ours.batch_shape, ours.event_shape) == (theirs.batch_shape, theirs.event_shape)
    value = theirs.sample((7,))
    for get in (
        lambda d: d.mean,
        lambda d: d.mode,
        lambda d: d.variance,
        lambda d: d.probs,
        lambda d: d.entropy(),
        lambda d: d.log_prob(value),
        lambda d: d.log_prob(value[0, 0]),
        lambda d: d.enumerate_support(),
        lambda d: d.expand((4, 3, 2)).log_prob(value[:4]),
    ):
        assert torch.allclose(get(ours), get(theirs), atol=1e-6)
    assert ours.expand((4, 3, 2)).rsample((2,)).shape == (2, 4, 3, 2, 5)
    assert type(ours.expand((4, 3, 2))) is HeadOneHotCategorical


def test_a_value_that_is_not_one_hot_is_an_error():
    q, _ = made("natural", 3)
    with pytest.raises(ValueError, match="support"):
        q.one_hot().log_prob(torch.full((3, 5), 0.2))


@pytest.mark.parametrize("name", HEADS)
def test_divergences(name):
    (p, _), (q, _) = made(name, 3), made(name, 3)
    want = kl_divergence(p, q)
    assert torch.equal(kl_divergence(p.one_hot(), q.one_hot()), want)
    plain = OneHotCategorical(logits=q.logits)
    assert torch.allclose(kl_divergence(p.one_hot(), plain), want)
    assert torch.allclose(kl_divergence(plain, p.one_hot()), kl_divergence(q, p), equal_nan=True)
    whole = kl_divergence(Independent(p.one_hot(), 1), Independent(q.one_hot(), 1))
    assert torch.allclose(whole, want.sum())


@pytest.mark.parametrize("name", [n if n == "natural" else slow(n) for n in HEADS])
def test_latents_of_a_world_model(name):
    """32 latents as one event: sampled with gradient, scored, regularised; also compiled."""
    torch._dynamo.reset()
    head = make_head(name, 8, mix=0.01)

    def loss(scores):
        q = Independent(head(scores).one_hot(), 1)
        z = q.rsample()
        prior = Independent(head(torch.zeros_like(scores)).one_hot(), 1)
        return z.flatten(1).square().sum(), q.entropy() + kl_divergence(q, prior), q.log_prob(z)

    scores = torch.randn(4, 32, head.num_scores, requires_grad=True)
    for each in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        size, rate, log_prob = each(scores)
        assert size == 4 * 32 and rate.shape == log_prob.shape == (4,)
        (gradient,) = torch.autograd.grad(size + rate.sum() + log_prob.sum(), scores)
        assert gradient.isfinite().all() and gradient.any()
