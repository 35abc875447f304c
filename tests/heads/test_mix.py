"""MixedHead: q = (1 - mix) p + mix / n, for every head, with masks, and its exact Fisher matrix."""

import pytest
import torch
from cases import (
    CATEGORIES,
    HEADS,
    assert_same_however_called,
    both_floats,
    random_mask,
    random_scores,
)

from catnat import HeadProbe, MixedHead, NaturalHead, make_head
from catnat.fisher import off_diagonal_mass


def test_the_option_makes_a_mixed_head():
    head = make_head("natural", 5, mix=0.25, amplitude=3.0)
    assert isinstance(head, MixedHead)
    assert (head.name, head.num_categories, head.num_scores, head.mix) == ("natural", 5, 4, 0.25)
    assert head.inner.amplitude == 3.0 and not head.fisher_is_diagonal
    assert "mix=0.25" in repr(head)
    assert isinstance(make_head("natural", 5, mix=0.0), NaturalHead)
    inner = make_head("softmax", 4)
    assert make_head(inner, 4, mix=0.1).inner is inner
    assert make_head(inner, 4, mix=0) is inner


@pytest.mark.parametrize("K", CATEGORIES)
@pytest.mark.parametrize("name", HEADS)
def test_the_definition(name, K):
    head = make_head(name, K, mix=0.1)
    scores = random_scores(head, 10, scale=3.0)
    mask = random_mask(10, K)
    p = head.inner.probs(scores)
    assert torch.allclose(head(scores).probs, 0.9 * p + 0.1 / K, atol=1e-14)
    p = head.inner(scores, mask=mask).probs
    want = torch.where(mask, 0.9 * p + 0.1 / mask.sum(-1, keepdim=True), 0.0)
    assert torch.allclose(head(scores, mask=mask).probs, want, atol=1e-14)


@pytest.mark.parametrize("name", HEADS)
def test_the_inverse(name):
    head = make_head(name, 5, mix=0.1)
    q = head.probs(random_scores(head, 20))
    assert torch.allclose(head.probs(head.inverse(q)), q, atol=1e-12)
    assert torch.allclose(head.probs(head.inverse(q.float())), q.float(), atol=1e-6)
    with pytest.raises(ValueError, match=r"must be at least 0\.02, got 0\.01"):
        head.inverse(torch.tensor([0.01, 0.29, 0.2, 0.25, 0.25]))


def test_mixing_makes_a_trees_fisher_matrix_dense():
    scores = torch.tensor([0.5, -0.3, 0.8])
    assert off_diagonal_mass(make_head("natural", 4).fisher(scores)) == 0
    assert off_diagonal_mass(make_head("natural", 4, mix=0.1).fisher(scores)) > 0.01


@pytest.mark.parametrize("name", HEADS)
def test_batched_and_under_autocast_it_is_the_same(name):
    head = make_head(name, 5, mix=0.1)
    assert_same_however_called(head)
    filled = head.masked(random_scores(head, 6).float(), random_mask(6, 5))
    fisher = torch.func.vmap(head.fisher)(filled)
    assert torch.allclose(fisher, head.fisher(filled), rtol=1e-4, atol=1e-6)


def test_a_probe_sees_one_head():
    head = make_head("natural", 4, mix=0.1)
    model = torch.nn.ModuleDict({"outer": head})
    scores = random_scores(head)
    mask = random_mask(4, 4)
    with HeadProbe(model) as probe:
        model["outer"](scores, mask=mask)
    ((name, seen, filled),) = list(probe)
    assert name == "outer" and seen is head
    assert torch.equal(filled, head.masked(scores, mask))


@pytest.mark.parametrize("name", HEADS)
def test_log_prob_and_sample_are_those_of_the_mixture(name):
    head = make_head(name, 5, mix=0.3)
    free = random_scores(head, 3)
    for scores in (free, head.masked(free, random_mask(3, 5))):
        value = torch.randint(5, (7, 3))
        want = head.log_probs(scores).expand(7, 3, 5).gather(-1, value[..., None])[..., 0]
        assert torch.allclose(head.log_prob(scores, value), want, rtol=1e-12)
        assert torch.allclose(head(scores).log_prob(value), want, rtol=1e-12)
        frequencies = head(scores).one_hot_sample((20_000,)).mean(0)
        assert torch.allclose(frequencies, head.probs(scores), atol=0.02)
        assert (frequencies[head.probs(scores) == 0] == 0).all()


@both_floats
@pytest.mark.parametrize("name", HEADS)
def test_second_derivatives_where_a_category_is_impossible_or_very_rare(name, dtype):
    """They are finite, and those of probabilities that are mixed without logarithms."""
    head = make_head(name, 4, mix=0.05)
    for size in (0.3, 40.0, 3000.0):
        scores = size * torch.randn(6, head.num_scores, dtype=dtype)
        for mask in (torch.ones(4, dtype=torch.bool), torch.tensor([True, True, True, False])):

            def value(x, mask=mask):
                return (head(x, mask=mask).log_prob(torch.tensor(1)) ** 2).sum()

            def plain(x, mask=mask):
                p = head.inner(x, mask=mask).probs[:, 1]
                return (0.95 * p + 0.05 / int(mask.sum())).log().square().sum()

            result, expected = (twice(f, scores) for f in (value, plain))
            assert result.isfinite().all(), (size, mask)
            if dtype == torch.float64 and size < 1:
                assert torch.allclose(result, expected, rtol=1e-9, atol=1e-12)


def twice(function, scores):
    """The gradient of the squared norm of the gradient."""
    x = scores.clone().requires_grad_()
    (once,) = torch.autograd.grad(function(x), x, create_graph=True)
    if not once.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(once.square().sum(), x)[0]


def test_a_small_share_is_exact_in_float64():
    """Where p is far above mix / K, too: a sum of two large logarithms would lose digits."""
    head = make_head("softmax", 4, mix=1e-9)
    scores = torch.tensor([3.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    expected = ((1 - 1e-9) * torch.softmax(scores, -1) + 1e-9 / 4).log()
    assert torch.allclose(head.log_probs(scores), expected, rtol=1e-15, atol=0)
