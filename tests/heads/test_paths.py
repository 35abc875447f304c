"""``head.log_prob`` and ``head.sample``, which walk one path of a tree, against whole trees."""

import pytest
import torch
from cases import (
    CATEGORIES,
    CATNAT,
    DTYPES,
    HEADS,
    CauchyHead,
    Flattened,
    both_floats,
    leaf_path,
    random_scores,
    unusual_scores,
)
from scipy.stats import chisquare

from catnat import HeadCategorical, make_head
from catnat.kernels.dispatch import tree_sample


def heads(K):
    return [*(make_head(name, K) for name in HEADS), CauchyHead(K), Flattened(K)]


def uniforms(*shape):
    return torch.rand(shape, dtype=torch.float64)


# -------------------------------------------------------------------------------- log_prob


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", CATEGORIES)
def test_log_prob_is_the_chosen_one_of_all_log_probabilities(K, dtype):
    for head in heads(K):
        scores = random_scores(head, rows=K, scale=2.0).to(dtype)
        value = torch.arange(K)
        want = head.log_probs(scores).diagonal()
        got = head.log_prob(scores, value)
        assert got.dtype == want.dtype
        assert torch.allclose(got, want, rtol=2e-6, atol=1e-6)
        if dtype == torch.float64:
            leaf = scores.requires_grad_()
            weight = torch.randn(K, dtype=dtype)
            (full,) = torch.autograd.grad((head.log_probs(leaf).diagonal() * weight).sum(), leaf)
            (path,) = torch.autograd.grad((head.log_prob(leaf, value) * weight).sum(), leaf)
            assert torch.allclose(path, full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CATNAT)
def test_a_second_derivative_and_batched_gradients_of_the_kernels(name):
    head = make_head(name, 5)
    scores = torch.randn(3, 4, requires_grad=True)
    value = torch.tensor([[0, 3, 4], [1, 1, 2]])

    def second(scores):
        out = head.log_prob(scores, value).square().sum()
        (first,) = torch.autograd.grad(out, scores, create_graph=True)
        return torch.autograd.grad(first.square().sum(), scores)[0]

    want = second(scores.detach().double().requires_grad_())
    assert torch.allclose(second(scores).double(), want, rtol=1e-4, atol=1e-4)
    out = head.log_prob(scores, value[0])
    (rows,) = torch.autograd.grad(out, scores, torch.eye(3), is_grads_batched=True)
    (all_rows,) = torch.autograd.grad(head.log_prob(scores, value[0]).sum(), scores)
    assert torch.allclose(rows.sum(0), all_rows, atol=1e-6)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("batch", "values"),
    [
        ((), (3,)),
        ((4,), ()),
        ((4,), (2, 4)),
        ((2, 3), (5, 2, 3)),
        ((2, 1), (3, 1, 6)),
        ((0,), (2, 0)),
    ],
)
def test_values_broadcast_as_in_torch(name, batch, values):
    head = make_head(name, 5)
    scores = torch.randn(*batch, head.num_scores, requires_grad=True)
    value = torch.randint(5, values)
    got = head.log_prob(scores, value)
    want = HeadCategorical(head.log_probs(scores)).log_prob(value)  # torch's, in effect
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-5)
    (grad,) = torch.autograd.grad(got.sum(), scores)
    (full,) = torch.autograd.grad(want.sum(), scores)
    assert torch.allclose(grad, full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_where_values_cannot_be_checked_a_wrong_one_gives_nan(name):
    head = make_head(name, 5)
    scores = torch.randn(4, head.num_scores)
    value = torch.tensor([0, -1, 5, 4])

    def log_prob(scores, value):
        return head.log_prob(scores, value)

    got = torch.func.vmap(log_prob)(scores, value)
    assert got.isnan().tolist() == [False, True, True, False]
    (grad,) = torch.func.vjp(lambda s: log_prob(s, value), scores)[1](torch.ones(4))
    assert grad[[0, 3]].isfinite().all()
    if name != "sparsemax":  # which has no gradient where a category is impossible
        assert grad[1].isnan().any() and grad[2].isnan().any()


@both_floats
@pytest.mark.parametrize("name", CATNAT)
def test_scores_that_are_not_finite_mean_what_they_mean_for_all_log_probabilities(name, dtype):
    head = make_head(name, 6)
    scores = unusual_scores(head, dtype)
    got = head.log_prob(scores, torch.arange(6)[:, None].expand(6, len(scores)))
    want = head.log_probs(scores).T
    assert torch.allclose(got, want, rtol=1e-5, equal_nan=True)


# ---------------------------------------------------------------------------------- sample


@both_floats
@pytest.mark.parametrize("K", [2, 5, 8, 18])
def test_samples_follow_the_probabilities(K, dtype):
    for head in heads(K):
        scores = random_scores(head, rows=1, scale=0.5)[0].to(dtype)
        generator = torch.Generator().manual_seed(K)
        drawn = head.sample(scores, (20_000,), generator=generator)
        probs = head.probs(scores).double()
        counts = torch.bincount(drawn, minlength=K).double()
        assert drawn.dtype == torch.int64 and drawn.shape == (20_000,)
        assert not counts[probs == 0].any()
        expected = 20_000 * probs[probs > 0] / probs.sum()
        assert (
            len(expected) == 1
            or chisquare(counts[probs > 0].numpy(), expected.numpy()).pvalue > 1e-4
        )


@pytest.mark.parametrize("name", HEADS)
def test_a_generator_decides_every_sample(name):
    head = make_head(name, 7)
    scores = torch.randn(3, 2, head.num_scores)
    q = head(scores)
    draws = (
        lambda g: head.sample(scores, (4,), generator=g),
        lambda g: q.sample((4,), generator=g),
        lambda g: q.one_hot_sample((4,), generator=g),
        lambda g: q.rsample((4,), "relaxed", 0.5, g),
    )
    for draw in draws:
        before = torch.get_rng_state()
        first = draw(torch.Generator().manual_seed(3))
        assert torch.equal(torch.get_rng_state(), before)  # torch's own generator did not move
        assert first.shape[:3] == (4, 3, 2)
        assert torch.equal(draw(torch.Generator().manual_seed(3)), first)
        assert not torch.equal(draw(torch.Generator().manual_seed(4)), first)


@both_floats
@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", CATNAT)
def test_a_certain_split_goes_its_way_whatever_the_noise(name, K, dtype):
    head = make_head(name, K)
    H = (K - 1).bit_length()
    noise = torch.stack([torch.zeros(H), torch.full((H,), 0.5), torch.ones(H)]).double()
    noise[2] -= 2.0**-53  # the largest number that torch.rand returns
    for k in range(K):
        scores = torch.randn(K - 1, dtype=dtype)
        for node, bit in leaf_path(k, K):
            scores[node] = torch.inf if bit else -torch.inf
        drawn = tree_sample(scores, noise, head.activation, head.constants(scores))
        assert drawn.tolist() == [k] * 3


@both_floats
@pytest.mark.parametrize("name", CATNAT)
def test_a_nan_on_the_path_gives_no_category(name, dtype):
    head = make_head(name, 5)
    scores = torch.zeros(2, 4, dtype=dtype)
    scores[1, 0] = torch.nan
    drawn = tree_sample(scores, uniforms(2, 3), head.activation, head.constants(scores))
    assert drawn[0] >= 0 and drawn[1] == -1
    with pytest.raises(ValueError, match="there is no category to sample"):
        head.sample(scores)


# -------------------------------------------------------------------------------- tracers


@pytest.mark.parametrize("name", HEADS)
def test_transforms_of_torch_func(name):
    head = make_head(name, 6)
    scores = random_scores(head, rows=5)
    value = torch.randint(6, (5,))
    want = torch.stack([head.log_prob(*row) for row in zip(scores, value, strict=True)])
    assert torch.allclose(torch.func.vmap(head.log_prob)(scores, value), want)
    per_row = torch.func.vmap(torch.func.grad(head.log_prob))(scores, value)
    leaf = scores.clone().requires_grad_()
    (grad,) = torch.autograd.grad(head.log_prob(leaf, value).sum(), leaf)
    assert torch.allclose(per_row, grad)
    drawn = torch.func.vmap(lambda s: head.sample(s, (4,)), randomness="different")(scores)
    assert drawn.shape == (5, 4) and drawn.min() >= 0 and drawn.max() < 6
