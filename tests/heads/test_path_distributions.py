"""The distribution of a tree walks one path, until it is asked for all log-probabilities."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import CATNAT, FUSED, HEADS, leaf_path, make
from torch.distributions import Independent

from catnat import HeadCategorical, make_head
from catnat.tree_heads import CatnatHead


@pytest.fixture
def no_full_tree(monkeypatch):
    def refuse(*args):
        raise AssertionError("all log-probabilities were computed")

    monkeypatch.setattr(CatnatHead, "log_probs", refuse)


@pytest.mark.parametrize("K", [2, 5, 32])
@pytest.mark.parametrize("name", FUSED)
def test_a_distribution_computes_all_log_probabilities_only_when_asked(name, K, no_full_tree):
    head = make(name, K)
    q = head(torch.randn(3, K - 1, requires_grad=True))
    for each in (q, q.expand((2, 3)), Independent(q, 1)):
        each.log_prob(each.sample()).sum().backward()
    assert q.one_hot_sample((2,)).shape == (2, 3, K)
    assert q.batch_shape == (3,) and "HeadCategorical" in repr(q)
    for ask in (lambda: q.logits, lambda: q.probs, q.entropy, lambda: q.mode):
        with pytest.raises(AssertionError, match="all log-probabilities"):
            ask()


@pytest.mark.parametrize("K", [2, 5, 32])
@pytest.mark.parametrize("name", HEADS)
def test_asking_for_log_probabilities_changes_no_answer(name, K):
    head = make_head(name, K)
    scores, value = torch.randn(3, 2, head.num_scores), torch.randint(K, (4, 3, 2))
    fresh, asked = head(scores), head(scores)
    assert asked.logits.shape == asked.probs.shape == (3, 2, K)
    assert torch.allclose(fresh.log_prob(value), asked.log_prob(value), atol=1e-5)
    samples = []
    for q in (fresh, asked):
        torch.manual_seed(1)
        samples.append(q.sample((5,)))
    assert torch.equal(*samples)


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
    head, scores = make_head(name, 5), torch.randn(3, 4, requires_grad=True)
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


# --------------------------------------------------------------------------------- large K


@pytest.mark.parametrize("K", [2**24 + 3, 2**24])
def test_more_categories_than_multinomial_takes(K):
    head = make_head("natural", K, uniform_at_zero=False)
    scores = torch.zeros(1, K - 1).requires_grad_()
    value = torch.tensor([[0], [K - 1], [2**24 - 1]])
    depth = [len(leaf_path(int(k), K)) for k in value]
    out = head.log_prob(scores, value)
    want = -torch.tensor(depth)[:, None] * torch.tensor(2.0).log()
    assert torch.allclose(out, want)
    (grad,) = torch.autograd.grad(out.sum(), scores)
    nodes = {node for k in value for node, _ in leaf_path(int(k), K)}
    assert set(grad[0].nonzero().flatten().tolist()) <= nodes and grad.count_nonzero() > 24
    q = head(scores.detach())
    drawn = q.sample((1000,))
    assert drawn.shape == (1000, 1) and len(drawn.unique()) > 990
    assert 0 <= drawn.min() < K / 8 and K * 7 / 8 < drawn.max() < K
    assert torch.allclose(
        q.log_prob(drawn), -torch.tensor(24.0) * torch.tensor(2.0).log(), atol=0.8
    )


def test_path_estimates_want_categories_and_take_any_other_distribution():
    q = make_head("natural", 4)(torch.zeros(3))
    for wrong in (4, -1, 1.5):
        with pytest.raises(ValueError, match="from 0 to 3"):
            q.path_entropy(torch.tensor(wrong))
    p = torch.distributions.Categorical(logits=torch.tensor([0.0, 1.0, 2.0, 3.0]))
    exact = torch.distributions.kl_divergence(q, p)
    torch.testing.assert_close(q.path_kl(p, torch.tensor(2)), exact)
