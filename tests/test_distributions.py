"""HeadCategorical against torch's Categorical, and where they must differ: exact zeros."""

from __future__ import annotations

import math

import pytest
import torch
from cases import GRID, make, random_scores
from scipy.stats import chisquare
from torch.distributions import Categorical, kl_divergence

from catnat import HeadCategorical, make_head


def zeros_of(name: str) -> HeadCategorical:
    """A distribution over four categories of which the first and the last are impossible."""
    p = torch.tensor([0.0, 0.3, 0.7, 0.0])
    head = make(name, 4)
    return head(head.inverse(p).requires_grad_())


WITH_ZEROS = ("sparsemax", "natural")


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", GRID)
def test_agrees_with_torch(name, K):
    head = make(name, K)
    q = head(0.3 * random_scores(head, rows=6).view(2, 3, -1))
    r = Categorical(probs=q.probs)
    value = torch.randint(K, (2, 3))
    possible = q.probs.gather(-1, value[..., None])[..., 0] > 0
    assert torch.allclose(q.log_prob(value)[possible], r.log_prob(value)[possible], atol=1e-6)
    assert torch.allclose(q.entropy(), r.entropy(), atol=1e-6)
    assert torch.equal(q.mode, r.mode)
    assert torch.equal(q.enumerate_support(), r.enumerate_support())
    assert q.mean.isnan().all() and q.variance.isnan().all()  # as torch defines them
    assert q.has_enumerate_support and q.event_shape == r.event_shape
    assert q.param_shape == r.param_shape
    total = q.log_prob(q.enumerate_support()).exp().sum(0)
    assert torch.allclose(total, torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", GRID)
def test_kl_divergence(name, K):
    head = make(name, K)
    q, r = (head(0.05 * random_scores(head, rows=3)) for _ in range(2))
    assert (q.probs > 0).all() and (r.probs > 0).all()
    want = (q.probs * (q.probs.log() - r.probs.log())).sum(-1)
    plain_q, plain_r = (Categorical(logits=d.probs.log()) for d in (q, r))
    for pair in ((q, r), (q, plain_r), (plain_q, r)):
        assert torch.allclose(kl_divergence(*pair), want, atol=1e-12)
    assert torch.allclose(kl_divergence(q, q), torch.zeros(3, dtype=torch.float64), atol=1e-14)
    uniform = Categorical(logits=torch.zeros(K, dtype=torch.float64))
    assert torch.allclose(kl_divergence(q, uniform), math.log(K) - q.entropy())


@pytest.mark.parametrize("name", GRID)
def test_samples_follow_the_probabilities(name):
    head = make(name, 5)
    q = head(0.5 * torch.tensor([0.3, -0.2, 0.5, 0.1, -0.4])[: head.num_scores])
    expected = 20_000 * q.probs[q.probs > 0].double()
    expected *= 20_000 / expected.sum()
    samples = {
        "sample": q.sample((20_000,)),
        "one_hot": q.one_hot_sample((20_000,)).argmax(-1),
        "relaxed": q.rsample_relaxed(0.7, hard=True, sample_shape=(20_000,)).argmax(-1),
    }
    for drawn in samples.values():
        counts = torch.bincount(drawn, minlength=5)[q.probs > 0].double()
        assert counts.sum() == 20_000
        assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("name", WITH_ZEROS)
class TestExactZeros:
    def test_probabilities_and_log_probabilities(self, name):
        q = zeros_of(name)
        assert torch.equal(q.probs == 0, torch.tensor([True, False, False, True]))
        assert q.logits.isfinite().all()
        assert torch.allclose(q.probs, torch.tensor([0.0, 0.3, 0.7, 0.0]), atol=1e-6)

    def test_never_sampled(self, name):
        q = zeros_of(name)
        drawn = torch.cat([q.sample((50_000,)), q.one_hot_sample((50_000,)).argmax(-1)])
        drawn = torch.cat([drawn, q.rsample_relaxed(2.0, True, (50_000,)).argmax(-1)])
        assert set(drawn.tolist()) == {1, 2}
        assert not q.rsample_relaxed(0.5)[..., [0, 3]].any()

    def test_entropy_and_kl_are_finite_with_finite_gradients(self, name):
        head = make(name, 4)
        scores = head.inverse(torch.tensor([0.0, 0.3, 0.7, 0.0])).requires_grad_()
        q, full = head(scores), make_head("softmax", 4)(torch.zeros(4))
        want = -(0.3 * math.log(0.3) + 0.7 * math.log(0.7))
        assert q.entropy().item() == pytest.approx(want, abs=1e-5)
        assert kl_divergence(q, full).item() == pytest.approx(math.log(4) - want, abs=1e-5)
        other = head(head.inverse(torch.tensor([0.5, 0.0, 0.5, 0.0])))
        masked = Categorical(logits=torch.tensor([0.0, -math.inf, 0.0, -math.inf]))
        values = [q.entropy(), *(kl_divergence(q, d) for d in (full, other, masked))]
        values += [
            kl_divergence(full, q),
            kl_divergence(masked, q),
            q.log_prob(torch.arange(4)).sum(),
        ]
        for value in values:
            assert value.isfinite()
            (grad,) = torch.autograd.grad(value, scores, retain_graph=True)
            assert grad.isfinite().all()
        assert kl_divergence(q, other) > 100  # finite, but it says so

    def test_relaxed_samples_have_finite_gradients(self, name):
        head = make(name, 4)
        scores = head.inverse(torch.tensor([0.0, 0.3, 0.7, 0.0])).requires_grad_()
        for temperature in (0.1, 1.0, 10.0):
            sample = head(scores).rsample_relaxed(temperature, hard=True, sample_shape=(100,))
            (grad,) = torch.autograd.grad((sample * torch.arange(4.0)).sum(), scores)
            assert grad.isfinite().all()


@pytest.mark.parametrize("name", GRID)
def test_relaxed_samples(name):
    head = make(name, 8)
    scores = torch.randn(6, head.num_scores, requires_grad=True)
    q = head(scores)
    soft = q.rsample_relaxed(0.7)
    assert soft.shape == (6, 8) and torch.allclose(soft.sum(-1), torch.ones(6), atol=1e-6)
    hard = q.rsample_relaxed(torch.tensor(0.7), hard=True)
    assert set(hard.unique().tolist()) == {0.0, 1.0} and torch.equal(hard.sum(-1), torch.ones(6))
    (grad,) = torch.autograd.grad((hard * torch.randn(6, 8)).sum(), scores)
    assert grad.abs().sum() > 0
    with pytest.raises(ValueError, match="temperature must be positive, got -1"):
        q.rsample_relaxed(-1)


def test_shapes():
    head = make_head("natural", 5)
    q = head(torch.randn(2, 1, 4))
    assert q.sample((7,)).shape == (7, 2, 1)
    assert q.one_hot_sample((7,)).shape == (7, 2, 1, 5)
    assert not q.one_hot_sample().requires_grad
    assert q.rsample_relaxed(1.0, sample_shape=(7,)).shape == (7, 2, 1, 5)
    wide = q.expand((3, 2, 6))
    assert isinstance(wide, HeadCategorical) and wide.batch_shape == (3, 2, 6)
    assert torch.equal(wide.entropy()[1, :, 4], q.entropy()[:, 0])
    assert "HeadCategorical" in repr(q)
    independent = torch.distributions.Independent(head(torch.randn(2, 3, 4)), 1)
    assert independent.log_prob(independent.sample()).shape == (2,)


def test_validation():
    q = make_head("natural", 5)(torch.zeros(4))
    with pytest.raises(ValueError, match="value argument"):
        q.log_prob(torch.tensor(5))
    with pytest.raises(ValueError, match="value argument"):
        q.expand((3,)).log_prob(torch.tensor(5))
    loose = HeadCategorical(torch.full((5,), math.nan), validate_args=False)
    assert loose.entropy().isnan()
    with pytest.raises(ValueError, match="logits"):
        HeadCategorical(torch.full((5,), math.nan))


# ------------------------------------------------------------------------------- what goes in


@pytest.mark.parametrize("name", GRID)
def test_an_empty_batch(name):
    head = make(name, 5)
    for shape in ((0,), (2, 0)):
        q = head(torch.zeros(*shape, head.num_scores, requires_grad=True))
        assert q.sample().shape == q.entropy().shape == shape
        assert q.log_prob(torch.zeros(shape, dtype=torch.int64)).shape == shape
        assert q.rsample_relaxed(1.0, hard=True).shape == (*shape, 5)
        q.entropy().sum().backward()
    assert HeadCategorical(torch.zeros(0, 5), validate_args=True).batch_shape == (0,)


def test_log_probabilities_that_are_not_normalized_are_refused():
    with pytest.raises(ValueError, match=r"must be normalized, got probabilities that sum to 3\.0"):
        HeadCategorical(torch.zeros(3))
    with pytest.raises(ValueError, match="must be normalized"):
        HeadCategorical(torch.tensor([[0.5, 0.5], [0.5, 0.4]]).log())
    assert torch.equal(HeadCategorical(torch.zeros(3), validate_args=False).probs, torch.ones(3))
    for dtype in (torch.float16, torch.bfloat16):  # rounded, that is all
        for K in (3, 100, 10_000):
            HeadCategorical(torch.full((K,), 1 / K).log().to(dtype))


@pytest.mark.parametrize("name", GRID)
def test_a_head_does_not_pay_for_a_check_of_its_sums(name, monkeypatch):
    def refuse(*args):
        raise AssertionError("the sums were checked")

    monkeypatch.setattr(HeadCategorical, "_check_sums", refuse)
    head = make(name, 5)
    q = head(torch.zeros(2, head.num_scores))
    with pytest.raises(ValueError, match="value argument"):  # all other checks are still made
        q.log_prob(torch.tensor(5))
    with pytest.raises(AssertionError, match="the sums were checked"):
        HeadCategorical(q.logits)


def test_a_nan_or_an_infinity_among_log_probabilities_is_found():
    with pytest.raises(ValueError, match="nan"):
        HeadCategorical(torch.tensor([[0.0, -1000.0], [math.nan, 0.0]]))
    for wrong in ([0.0, math.inf], [-math.inf, math.inf]):
        with pytest.raises(ValueError, match="must be normalized"):
            HeadCategorical(torch.tensor(wrong))


def test_half_precision_keeps_small_probabilities():
    for dtype in (torch.float16, torch.bfloat16):
        q = HeadCategorical(torch.tensor([1 - 1e-4 - 1e-6, 1e-4, 1e-6]).log().to(dtype))
        assert q.probs.dtype == q.entropy().dtype == q.one_hot_sample().dtype == torch.float32
        assert q.probs[1:].tolist() == pytest.approx([1e-4, 1e-6], rel=0.05)


def test_divergence_from_probabilities_with_zeros():
    head = make_head("sparsemax", 3)
    p = torch.tensor([0.5, 0.5, 0.0])
    q = head(torch.tensor([0.5, 0.5, -0.5]))
    assert torch.equal(q.probs, p)
    assert kl_divergence(Categorical(probs=p), q) == 0
    assert kl_divergence(q, Categorical(probs=p)) == 0
    given = Categorical(logits=torch.log(p))
    assert given.probs is not None  # which torch keeps beside the logits it was given
    assert kl_divergence(given, q) == 0
    assert kl_divergence(Categorical(probs=torch.tensor([0.5, 0.0, 0.5])), q) > 100


def test_torch_s_default_of_validation_counts():
    head, scores = make_head("natural", 4), torch.full((3,), math.nan)
    with pytest.raises(ValueError, match="nan"):
        head(scores)
    torch.distributions.Distribution.set_default_validate_args(False)
    assert head(scores).entropy().isnan()
    assert HeadCategorical(torch.zeros(3)).probs.sum() == 3
    head.validate_args = True
    with pytest.raises(ValueError, match="nan"):
        head(scores)


def test_an_expanded_subclass_stays_one():
    class Mine(HeadCategorical):
        pass

    class WithMore(HeadCategorical):
        def __init__(self, log_probs, more):
            super().__init__(log_probs)
            self.more = more

        def expand(self, batch_shape, _instance=None):
            new = self._get_checked_instance(WithMore, _instance)
            new.more = self.more
            return super().expand(batch_shape, new)

    logs = torch.full((1, 4), 0.25).log()
    for q in (Mine(logs), WithMore(logs, "more")):
        wide = q.expand((3, 2))
        assert type(wide) is type(q) and wide.batch_shape == (3, 2)
        assert torch.equal(wide.entropy(), q.entropy().expand(3, 2))
        with pytest.raises(ValueError, match="value argument"):
            wide.log_prob(torch.tensor(4))
    assert wide.more == "more"


def test_rsample_names_the_samples_that_have_gradients():
    q = make_head("natural", 4)(torch.zeros(3))
    assert not q.has_rsample
    with pytest.raises(NotImplementedError, match="rsample_straight_through"):
        q.rsample()


def test_a_distribution_prints_its_shapes():
    q = make_head("natural", 4)(torch.zeros(2, 3))
    assert repr(q) == "HeadCategorical(batch_shape=(2,), num_categories=4)"
    assert "logits" not in vars(q), "printing computes nothing"
