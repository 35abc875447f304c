"""The suite that every estimator of the table inherits, and a loss whose expectation is known."""

from __future__ import annotations

import pytest
import torch
from cases import GRID, make

from catnat import HeadCategorical
from catnat.estimator_table import find_estimator

DRAWS = 30_000
TAU = 0.6


def loss(z):
    """A loss of one-hot vectors or points of the simplex, (*, K) -> (*), that is not quadratic."""
    K = z.shape[-1]
    weight = torch.randn(K, K, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return (z @ weight).square().sum(-1) + (z @ weight[0]).sin().exp()


def slope(z):
    """Gradient of the loss at a point, (K,)."""
    z = z.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(z), z)[0]


def scores_of(head):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(head.num_scores, dtype=torch.float64, generator=generator) / 3


def jacobian(head, scores):
    """d log p / d scores, (K, S)."""
    return torch.autograd.functional.jacobian(head.log_probs, scores)


def moments(probs, gradients):
    """Mean and variance of gradients (C, S) with probabilities (C,)."""
    mean = probs @ gradients
    return mean, probs @ gradients.square() - mean.square()


class EachCategory(HeadCategorical):
    """A distribution whose K one-hot samples are the K categories, in order."""

    def one_hot_sample(self, sample_shape=(), generator=None):
        assert tuple(sample_shape) == self.logits.shape[-1:]
        return torch.eye(self.logits.shape[-1], dtype=self.logits.dtype)


class EstimatorTests:
    """What holds for every estimator; a subclass gives its name and its own formula."""

    name = ""
    K = 5

    @property
    def estimator(self):
        return find_estimator(self.name)

    @property
    def options(self):
        temperature = TAU if self.estimator.has_temperature else None
        num_draws = 3 if self.estimator.has_draws else None
        return self.estimator.options(temperature=temperature, num_draws=num_draws)

    def exact_moments(self, head, scores):
        """Mean and variance of the gradient in the scores by the estimator's formula, (S,) each."""
        raise NotImplementedError

    def drawn(self, head, scores, generator):
        """Independent gradients of the library in the scores, (DRAWS, S)."""
        rows = scores.expand(DRAWS, -1).clone().requires_grad_()
        z = head(rows).rsample(estimator=self.name, generator=generator, **self.options)
        return torch.autograd.grad(loss(z).sum(), rows)[0]

    @pytest.mark.parametrize("head_name", GRID)
    def test_mean_and_variance_of_drawn_gradients_are_exact(self, head_name):
        head = make(head_name, self.K)
        scores = scores_of(head)
        mean, variance = self.exact_moments(head, scores)
        gradients = self.drawn(head, scores, torch.Generator().manual_seed(1))
        error = (variance.clamp_min(0) / DRAWS).sqrt()
        assert ((gradients.mean(0) - mean).abs() <= 5 * error + 1e-9).all()
        torch.testing.assert_close(gradients.var(0), variance, rtol=0.08, atol=1e-9)


class SampleTests(EstimatorTests):
    """What holds for every estimator of ``rsample``."""

    @pytest.mark.parametrize("head_name", GRID)
    def test_samples_are_points_of_the_simplex_that_the_generator_decides(self, head_name):
        head = make(head_name, 6)
        q = head(torch.randn(3, head.num_scores))
        first, again, other = (
            q.rsample(
                (4, 2),
                estimator=self.name,
                generator=torch.Generator().manual_seed(seed),
                **self.options,
            )
            for seed in (0, 0, 1)
        )
        assert first.shape == (4, 2, 3, 6) and torch.equal(first, again)
        assert not torch.equal(first, other)
        torch.testing.assert_close(first.sum(-1), torch.ones(4, 2, 3))
        is_one_hot = bool(((first == 0) | (first == 1)).all())
        assert is_one_hot == (self.estimator.value == "one-hot")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("head_name", GRID)
    def test_what_is_impossible_is_not_drawn_and_gradients_are_finite(self, head_name, dtype):
        head = make(head_name, 6)
        mask = torch.tensor([True, False, True, True, False, True])
        scores = (30 * torch.randn(100, head.num_scores)).to(dtype).requires_grad_()
        z = head(scores, mask=mask).rsample(estimator=self.name, **self.options)
        assert z.dtype == torch.float32 and not z[:, ~mask].any()
        (gradient,) = torch.autograd.grad((z * torch.arange(6.0)).square().sum(), scores)
        assert gradient.isfinite().all()

    def test_models_under_vmap_have_noise_of_their_own(self):
        head = make("sigmoid", 4)

        def total(scores):
            z = head(scores).rsample(estimator=self.name, **self.options)
            return (z * torch.arange(1.0, 5.0)).square().sum()

        scores = torch.zeros(2, 100, 3, requires_grad=True)
        totals = torch.func.vmap(total, randomness="different")(scores)
        assert totals[0] != totals[1]
        assert torch.autograd.grad(totals.sum(), scores)[0].any(-1).all()

    def test_options_that_it_does_not_use_are_refused_by_their_value(self):
        q = make("sigmoid", 4)(torch.zeros(3))
        used = {
            "temperature": self.estimator.has_temperature,
            "num_draws": self.estimator.has_draws,
        }
        for option, is_used in used.items():
            if is_used:
                q.rsample(estimator=self.name, **{option: 2})
                message = rf"{option} must be .*, got 0"
                value = 0
            else:
                message = f"the estimator '{self.name}' has no {option}, got 2"
                value = 2
            with pytest.raises(ValueError, match=message):
                q.rsample(estimator=self.name, **{option: value})

    def test_every_spelling_of_its_name_is_the_same_estimator(self):
        q = make("natural", 4)(torch.zeros(50, 3))
        spellings = {self.name, self.name.replace("-", "_"), *self.estimator.aliases}
        samples = [
            q.rsample(estimator=spelling, generator=torch.Generator().manual_seed(0))
            for spelling in spellings
        ]
        assert all(torch.equal(samples[0], sample) for sample in samples)
