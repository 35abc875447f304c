"""The estimators in JAX against those in torch: equal samples, equal noise, equal gradients."""

import pytest

pytest.importorskip("jax", reason="needs the extra [jax]")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from cases_jax import (
    CASES,
    QUICK,
    TOLERANCE,
    _precision,  # noqa: F401 - a fixture
    difference,
    scores_for,
)

import catnat
from catnat import estimators
from catnat.jax import make_head
from catnat.jax.estimators import gumbel_rao, reinmax

K = 5
WEIGHT = np.arange(1.0, 1.0 + K * K).reshape(K, K) % 7 - 3


def both(case, dtype):
    """A head in JAX and torch, scores, and one one-hot sample for each row."""
    name, options = CASES[case]
    head = make_head(name, K, **options)
    scores = scores_for(head, dtype)
    drawn = np.eye(K, dtype=dtype)[np.asarray(head(scores).sample(seed=jax.random.key(3)))]
    return head, catnat.make_head(name, K, **options), scores, drawn


def gradient_of(loss, scores):
    rows = torch.tensor(scores, requires_grad=True)
    return torch.autograd.grad(loss(rows), rows)[0].numpy()


@pytest.mark.parametrize("dtype", [np.float64], ids=["float64"])
@pytest.mark.parametrize("case", CASES)
def test_reinmax_is_that_of_torch(case, dtype):
    head, torch_head, scores, drawn = both(case, dtype)

    @jax.jit
    def compute(scores):
        def loss(s):
            z = reinmax(head(s).logits, drawn)
            return ((z @ WEIGHT) ** 2).sum(), z

        return jax.grad(loss, has_aux=True)(scores)

    got, value = compute(scores)
    assert difference(value, drawn) < TOLERANCE[dtype]
    weight, one_hot = torch.tensor(WEIGHT), torch.tensor(drawn)
    want = gradient_of(
        lambda s: (estimators.reinmax(torch_head(s).logits, one_hot) @ weight).square().sum(),
        scores,
    )
    assert difference(got, want, by_row=True) < 1e-9


@pytest.mark.parametrize("dtype", [np.float64], ids=["float64"])
@pytest.mark.parametrize("case", CASES)
def test_gumbel_rao_is_that_of_torch(case, dtype, monkeypatch):
    head, torch_head, scores, drawn = both(case, dtype)
    noise = jax.random.exponential(jax.random.key(4), (3, *drawn.shape), dtype)
    monkeypatch.setattr(estimators, "_exponential", lambda *_: torch.tensor(np.asarray(noise)))

    @jax.jit
    def compute(scores):
        def loss(s):
            z = gumbel_rao(head(s).logits, drawn, 0.7, 3, seed=jax.random.key(4))
            return ((z @ WEIGHT) ** 2).sum(), z

        return jax.grad(loss, has_aux=True)(scores)

    got, value = compute(scores)
    assert difference(value, drawn) < TOLERANCE[dtype]
    weight, one_hot = torch.tensor(WEIGHT), torch.tensor(drawn)

    def loss(s):
        z = estimators.gumbel_rao(torch_head(s).logits, one_hot, 0.7, 3)
        return (z @ weight).square().sum()

    assert difference(got, gradient_of(loss, scores), by_row=True) < 1e-9


@pytest.mark.parametrize("name", QUICK)
def test_samples_are_those_of_sample_and_gradients_are_finite(name):
    """With a mask: impossible categories are not drawn, and no gradient is NaN."""
    head = make_head(name, K)
    scores = scores_for(head, np.float32)
    mask = np.array([True, False, True, True, False])
    weight = WEIGHT[0].astype(np.float32)

    @jax.jit
    def compute(scores):
        def loss(s):
            q = head(s, mask)
            options = {"seed": jax.random.key(0), "sample_shape": (2,)}
            rao = q.rsample_gumbel_rao(temperature=0.1, num_draws=2, **options)
            samples = q.rsample_reinmax(**options), rao
            return sum(((z * weight) ** 2).sum() for z in samples), samples

        gradient, samples = jax.grad(loss, has_aux=True)(scores)
        return (
            gradient,
            samples,
            head(scores, mask).sample(seed=jax.random.key(0), sample_shape=(2,)),
        )

    gradient, samples, category = compute(scores)
    assert np.array_equal(np.asarray(samples[0]).argmax(-1), category)
    assert jnp.isfinite(gradient).all()
    for sample in samples:
        assert sample.shape == (2, len(scores), K)
        assert difference(sample.sum(-1), np.ones((2, len(scores)))) < 1e-6
        assert difference(sample[..., ~mask], 0.0) < 1e-6


def test_gumbel_rao_has_the_mean_gradient_of_torch():
    """Samples and noise of JAX's own, against the mean over draws of torch."""
    torch.manual_seed(0)
    scores = np.array([0.4, -0.3, 0.2], np.float32)
    rows = np.tile(scores, (40_000, 1))

    @jax.jit
    def compute(rows):
        def loss(s):
            q = make_head("sigmoid", 4)(s)
            z = q.rsample_gumbel_rao(seed=jax.random.key(0), temperature=0.5, num_draws=2)
            return ((z @ WEIGHT[:4, :4].astype(np.float32)) ** 2).sum()

        return jax.grad(loss)(rows)

    got = np.asarray(compute(rows))

    def loss(s):
        q = catnat.make_head("sigmoid", 4)(s)
        z = q.rsample(estimator="gumbel-rao", temperature=0.5, num_draws=2)
        return (z @ torch.tensor(WEIGHT[:4, :4], dtype=torch.float32)).square().sum()

    want = gradient_of(loss, rows)
    error = np.sqrt((got.var(0) + want.var(0)) / len(rows))
    assert (np.abs(got.mean(0) - want.mean(0)) < 4 * error).all()


def test_gumbel_rao_refuses_no_draws():
    q = make_head("sigmoid", 4)(jnp.zeros(3))
    with pytest.raises(ValueError, match="num_draws must be at least 1, got 0"):
        q.rsample_gumbel_rao(seed=jax.random.key(0), num_draws=0)
