"""Distributions of heads: HeadCategorical, its paths and its estimators."""

import copy
import math
import pickle

import pytest
import torch
from cases import CATNAT, GRID, HEADS, TREES, make, random_scores
from torch.distributions import Categorical, Independent, kl_divergence

from catnat import HeadCategorical, make_head
from catnat.distributions import ESTIMATORS
from catnat.estimator_table import find_estimator
from catnat.heads.tree import CatnatHead
from catnat.kernels import cpu
from catnat.numerics import LOG_ZERO

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


@pytest.mark.parametrize("name", WITH_ZEROS)
def test_with_exact_zeros_entropy_and_kl_are_finite_with_finite_gradients(name):
    head = make(name, 4)
    scores = head.inverse(torch.tensor([0.0, 0.3, 0.7, 0.0])).requires_grad_()
    q = head(scores)
    full = make_head("softmax", 4)(torch.zeros(4))
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


def test_shapes():
    head = make_head("natural", 5)
    q = head(torch.randn(2, 1, 4))
    assert q.sample((7,)).shape == (7, 2, 1)
    assert q.one_hot_sample((7,)).shape == (7, 2, 1, 5)
    assert not q.one_hot_sample().requires_grad
    assert q.rsample((7,), "relaxed").shape == (7, 2, 1, 5)
    wide = q.expand((3, 2, 6))
    assert isinstance(wide, HeadCategorical) and wide.batch_shape == (3, 2, 6)
    assert torch.equal(wide.entropy()[1, :, 4], q.entropy()[:, 0])


@pytest.mark.parametrize("K", [5, 1000])
@pytest.mark.parametrize("name", HEADS)
def test_log_prob_is_the_same_to_the_last_bit_in_any_batch_and_after_logits_were_read(name, K):
    head = make_head(name, K)
    scores = torch.randn(64, head.num_scores)
    q = head(scores)
    value = q.sample()
    before = q.log_prob(value)
    assert q.logits.shape == (64, K) and q.entropy().shape == (64,)
    assert torch.equal(q.log_prob(value), before)  # so that a ratio of PPO is exactly 1
    shuffled = torch.randperm(64)[:17]
    in_another_batch = head(scores[shuffled]).log_prob(value[shuffled])
    if cpu.library():
        assert torch.equal(in_another_batch, before[shuffled])
    else:  # torch rounds the ends of a batch otherwise
        torch.testing.assert_close(in_another_batch, before[shuffled])


@pytest.mark.parametrize("name", HEADS)
def test_a_value_that_is_not_a_category_is_an_error_or_nan(name):
    head = make_head(name, 4)
    scores = torch.zeros(3, head.num_scores)
    wrong = torch.tensor([0, -1, 4])
    for q in (head(scores), head(scores[0]).expand((3,))):
        with pytest.raises(ValueError, match="value argument"):
            q.log_prob(wrong)
        for estimate in (q.path_entropy, lambda value, q=q: q.path_kl(q, value)):
            for bad in (wrong, torch.tensor(1.5)):
                with pytest.raises(ValueError, match="from 0 to 3, got"):
                    estimate(bad)
    head.validate_args = False
    q = head(scores)
    for _ in range(2):
        assert q.log_prob(wrong).isnan().tolist() == [False, True, True]
        assert q.logits.isfinite().all()  # reading them changes nothing
    p = torch.distributions.Categorical(logits=torch.arange(4.0))
    exact = kl_divergence(q, p)
    torch.testing.assert_close(q.path_kl(p, torch.tensor([2, 0, 1])), exact)


# ------------------------------------------------------------------------------- what goes in


def test_an_impossible_category_given_as_minus_infinity_gets_the_floor():
    q = HeadCategorical(torch.tensor([0.0, -math.inf]))
    assert q.entropy() == 0 and q.logits.tolist() == [0.0, LOG_ZERO]


def test_log_probabilities_that_are_not_normalized_are_refused():
    with pytest.raises(ValueError, match=r"must be normalized, got probabilities that sum to 3\.0"):
        HeadCategorical(torch.zeros(3))
    with pytest.raises(ValueError, match="must be normalized"):
        HeadCategorical(torch.tensor([[0.5, 0.5], [0.5, 0.4]]).log())
    assert torch.equal(HeadCategorical(torch.zeros(3), validate_args=False).probs, torch.ones(3))
    for dtype in (torch.float16, torch.bfloat16):  # rounded, that is all
        for K in (3, 100, 10_000):
            HeadCategorical(torch.full((K,), 1 / K).log().to(dtype))


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
    by_logits = Categorical(logits=torch.log(p))
    assert by_logits.probs is not None  # which torch keeps beside the logits it was given
    assert kl_divergence(by_logits, q) == 0
    assert kl_divergence(Categorical(probs=torch.tensor([0.5, 0.0, 0.5])), q) > 100


def test_torch_s_default_of_validation_counts():
    head = make_head("natural", 4)
    scores = torch.full((3,), math.nan)
    with pytest.raises(ValueError, match="nan"):
        head(scores)
    torch.distributions.Distribution.set_default_validate_args(False)
    assert head(scores).entropy().isnan()
    assert HeadCategorical(torch.zeros(3)).probs.sum() == 3
    head.validate_args = True
    with pytest.raises(ValueError, match="nan"):
        head(scores)


# ------------------------------------------------------------------------- draws and snapshots


@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_many_draws_of_a_row_reach_categories_of_any_small_probability(name):
    head = make_head(name, 5000, mix=1e-4)
    scores = torch.zeros(5000)
    scores[7] = 60.0
    drawn = head(scores).sample((1_000_000,), generator=torch.Generator().manual_seed(0))
    assert 60 < int((drawn != 7).sum()) < 150  # 100 expected


@pytest.mark.parametrize("name", HEADS)
def test_a_distribution_keeps_the_scores_of_the_moment_it_was_made(name):
    head = make_head(name, 5)
    scores = torch.nn.Parameter(torch.randn(3, head.num_scores))
    want = head.log_probs(scores.detach().clone())
    q = head(scores)
    loss = q.log_prob(torch.tensor([0, 1, 2])).sum()
    scores.data.mul_(-3).add_(1.0)
    with torch.no_grad():
        scores.add_(0.5)  # as optimizers do
    assert torch.equal(q.logits, want)
    assert (kl_divergence(q, head(scores)) >= 0).all()
    loss.backward()


def test_the_divergence_of_different_numbers_of_categories_is_refused():
    q = make_head("softmax", 4)(torch.zeros(4))
    one = HeadCategorical(torch.zeros(1))
    for pair in ((q, one), (one, q)):
        with pytest.raises(ValueError, match=r"KL divergence between [14] and [14] categories"):
            kl_divergence(*pair)


# -------------------------------------------------------------------- estimates from one path

PATHS = [("sigmoid", {}), ("natural", {"tail": 0.05}), ("natural", {}), ("sigmoid", {"order": 1})]


def path_pair(name, options, K=6):
    options = {"order": torch.randperm(K).tolist()} if options.get("order") else options
    head = make_head(name, K, **options)
    return head, *torch.randn(2, head.num_scores, dtype=torch.float64)


@pytest.mark.parametrize(("name", "options"), [*PATHS, ("softmax", {}), ("natural", {"mix": 0.1})])
def test_the_mean_over_all_categories_of_path_estimates_is_exact(name, options):
    head, ours, theirs = path_pair(name, options)
    ours.requires_grad_()
    theirs.requires_grad_()
    q = head(ours)
    p = head(theirs)
    every = torch.arange(6)
    for terms, exact in (
        (q.path_kl(p, every), kl_divergence(q, p)),
        (q.path_entropy(every), q.entropy()),
    ):
        assert terms.shape == (6,) and (terms >= 0).all()
        weights = q.probs.detach()
        assert torch.allclose((weights * terms).sum(), exact)
        # The mean of the gradients is the gradient of the mean, in both distributions.
        options = {"retain_graph": True, "allow_unused": True}
        got = torch.autograd.grad((weights * terms).sum(), (ours, theirs), **options)
        want = torch.autograd.grad(exact, (ours, theirs), **options)
        for a, b in zip(got, want, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, atol=1e-12)


# --------------------------------------------------------------------------------- estimators


@pytest.mark.parametrize("name", HEADS)
def test_rsample_offers_every_estimator_by_its_name(name):
    head = make_head(name, 5)
    scores = torch.randn(3, head.num_scores, requires_grad=True)
    for estimator in ESTIMATORS:
        options = {"temperature": 0.7} if find_estimator(estimator).has_temperature else {}
        sample = head(scores).rsample((4,), estimator=estimator, **options)
        assert sample.shape == (4, 3, 5)
        assert torch.allclose(sample.sum(-1), torch.ones(4, 3), atol=1e-5)
        if estimator != "relaxed":
            assert set(sample.unique().tolist()) == {0.0, 1.0}
        (grad,) = torch.autograd.grad((sample * torch.arange(5.0)).sum(), scores)
        assert grad.isfinite().all() and grad.any()
    for options, words in (
        ({}, "rsample needs an estimator"),
        ({"estimator": "st"}, "unknown estimator 'st'"),
    ):
        with pytest.raises(ValueError, match=f"{words}; choose from gumbel"):
            head(scores).rsample(**options)


@pytest.mark.parametrize("name", HEADS)
def test_its_gradient_is_that_of_the_probabilities(name):
    head = make_head(name, 5)
    scores = torch.randn(4, head.num_scores, dtype=torch.float64, requires_grad=True)
    q = head(scores)
    weight = torch.randn(7, 4, 5, dtype=torch.float64)
    (got,) = torch.autograd.grad(
        (weight * q.rsample((7,), estimator="straight-through")).sum(), scores, retain_graph=True
    )
    (want,) = torch.autograd.grad((weight.sum(0) * q.probs).sum(), scores)
    assert torch.allclose(got, want)


@pytest.fixture
def no_full_tree(monkeypatch):
    def refuse(*args):
        raise AssertionError("all log-probabilities were computed")

    monkeypatch.setattr(CatnatHead, "log_probs", refuse)


@pytest.mark.parametrize("K", [2, 5, 32])
@pytest.mark.parametrize("name", TREES)
def test_a_distribution_computes_all_log_probabilities_only_when_asked(name, K, no_full_tree):
    head = make(name, K)
    q = head(torch.randn(3, K - 1, requires_grad=True))
    for distribution in (q, q.expand((2, 3)), Independent(q, 1)):
        distribution.log_prob(distribution.sample()).sum().backward()
    assert q.one_hot_sample((2,)).shape == (2, 3, K)
    assert q.batch_shape == (3,) and "HeadCategorical" in repr(q)
    for ask in (lambda: q.logits, lambda: q.probs, q.entropy, lambda: q.mode):
        with pytest.raises(AssertionError, match="all log-probabilities"):
            ask()


@pytest.mark.parametrize("name", HEADS)
def test_a_distribution_survives_copying_and_pickling(name):
    head = make_head(name, 5)
    q = head(torch.randn(3, head.num_scores))
    for twin in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), copy.copy(q)):
        assert isinstance(twin, HeadCategorical)
        assert torch.equal(twin.logits, q.logits)
        assert twin.sample((2,)).shape == (2, 3)
        assert torch.equal(twin.entropy(), q.entropy())


@pytest.mark.parametrize("name", CATNAT)
def test_gradients_are_on_or_off_from_the_moment_the_head_is_called(name):
    head = make_head(name, 5)
    scores = torch.randn(3, 4, requires_grad=True)
    value = torch.zeros(3, dtype=torch.int64)
    with torch.no_grad():
        q = head(scores)
    assert not q.log_prob(value).requires_grad and not q.probs.requires_grad
    q = head(scores)
    with torch.no_grad():
        assert q.logits.requires_grad and not q.entropy().requires_grad
    q.entropy().sum().backward()
    with torch.inference_mode():
        q = head(scores)
        assert q.log_prob(q.sample()).shape == q.entropy().shape == (3,)
