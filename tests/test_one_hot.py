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
    x = q.rsample_straight_through((100,))
    assert x.shape == (100, 4, 5) and x.dtype == q.probs.dtype
    assert ((x == 0) | (x == 1)).all() and (x.sum(-1) == 1).all()
    assert torch.allclose(q.rsample_straight_through((20_000,)).mean(0), q.probs, atol=0.02)


@pytest.mark.parametrize("name", HEADS)
def test_its_gradient_is_that_of_the_probabilities(name):
    q, scores = made(name, 4)
    weight = torch.randn(7, 4, 5, dtype=torch.float64)
    (got,) = torch.autograd.grad(
        (weight * q.rsample_straight_through((7,))).sum(), scores, retain_graph=True
    )
    (want,) = torch.autograd.grad((weight.sum(0) * q.probs).sum(), scores)
    assert torch.allclose(got, want)


@pytest.mark.parametrize("name", HEADS)
def test_a_forbidden_category_is_never_drawn_and_gradients_stay_finite(name):
    head = make_head(name, 4)
    scores = random_scores(head, 6).requires_grad_()
    x = head(scores, mask=torch.tensor([True, False, True, False])).rsample_straight_through((50,))
    assert (x[..., [1, 3]] == 0).all()
    (x * torch.randn_like(x)).sum().backward()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("draw", ["sample", "one_hot_sample", "rsample_straight_through"])
def test_noise_comes_from_the_given_generator(draw):
    q, _ = made("natural", 50)

    def drawn(view, method, seed):
        return getattr(view, method)((3,), generator=torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    assert torch.equal(drawn(q, draw, 1), drawn(q, draw, 1))
    assert not torch.equal(drawn(q, draw, 1), drawn(q, draw, 2))
    for method in ("sample", "rsample"):
        assert torch.equal(drawn(q.one_hot(), method, 1), drawn(q, "one_hot_sample", 1))
    assert torch.equal(torch.get_rng_state(), state)


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


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap's scatter_
def test_samples_inside_vmap(name):
    head = make_head(name, 5)
    scores = torch.randn(6, 3, head.num_scores)
    many = torch.func.vmap(lambda s: head(s).rsample_straight_through(), randomness="different")
    drawn = many(scores)
    assert drawn.shape == (6, 3, 5)
    assert ((drawn == 0) | (drawn == 1)).all() and (drawn.sum(-1) == 1).all()


@pytest.mark.parametrize("name", ["natural", "mixed", slow("softmax"), slow("sparsemax")])
def test_compiled_samples_of_batches_of_several_sizes(name):
    """The second size makes the shape symbolic: random numbers must allow that."""
    torch._dynamo.reset()
    head = make_head("natural", 6, mix=0.1) if name == "mixed" else make_head(name, 6)
    act = torch.compile(lambda s: head(s).sample(), fullgraph=True, backend="aot_eager")
    for size in (8, 5, 7):
        drawn = act(torch.randn(size, head.num_scores))
        assert drawn.shape == (size,) and ((drawn >= 0) & (drawn < 6)).all()
