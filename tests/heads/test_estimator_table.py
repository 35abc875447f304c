"""One suite that every estimator of the table inherits: its expectation, variance and contract.

Expectations and variances are exact, in float64: sums over all categories, and integrals over the
noise of relaxed samples, which is logistic for two categories.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import GRID, make
from cases_estimators import (
    DRAWS,
    TAU,
    EachCategory,
    EstimatorTests,
    SampleTests,
    jacobian,
    loss,
    moments,
    scores_of,
    slope,
)
from scipy.integrate import quad
from scipy.special import expit

from catnat import estimators
from catnat.distributions import ESTIMATORS
from catnat.estimator_table import TABLE, markdown_table

_LEGENDRE = np.polynomial.legendre.leggauss(400)
DOCS = Path(__file__).resolve().parents[2] / "docs"


class EnumeratedTests(SampleTests):
    """Estimators whose only noise is the category: their mean is a sum, to the last bits."""

    def formula(self, p, one_hot, g):
        """Gradient in the logits of a softmax, for the sample and the loss's gradient there."""
        raise NotImplementedError

    def exact_moments(self, head, scores):
        p = head.probs(scores)
        in_logits = torch.stack(
            [self.formula(p, one_hot, slope(one_hot)) for one_hot in torch.eye(self.K).double()]
        )
        return moments(p, in_logits @ jacobian(head, scores))

    @pytest.mark.parametrize("head_name", GRID)
    def test_the_gradient_of_every_category_follows_the_formula(self, head_name):
        head = make(head_name, self.K)
        scores = scores_of(head).requires_grad_()
        q = EachCategory(head.log_probs(scores))
        z = q.rsample((self.K,), estimator=self.name)
        (got,) = torch.autograd.grad(q.probs.detach() @ loss(z), scores)
        mean, _ = self.exact_moments(head, scores.detach())
        torch.testing.assert_close(got, mean, rtol=1e-10, atol=1e-10)


class TestStraightThrough(EnumeratedTests):
    name = "straight-through"

    def formula(self, p, one_hot, g):
        return p * g - p * (p @ g)


class TestReinMax(EnumeratedTests):
    """By the algorithm of Liu et al., which computes twice the Jacobian at (p + D) / 2."""

    name = "reinmax"

    def formula(self, p, one_hot, g):
        half = (p + one_hot) / 2
        return 2 * (half * g - half * (half @ g)) - (p * g - p * (p @ g)) / 2

    def test_zgr_is_the_same_formula(self):
        p = torch.tensor([0.2, 0.5, 0.3]).double()
        for one_hot in torch.eye(3).double():
            g = slope(one_hot)
            zgr = (p * g - p * (p @ g)) / 2 + (g @ one_hot - p @ g) * (one_hot - p) / 2
            torch.testing.assert_close(self.formula(p, one_hot, g), zgr)


class RelaxedTests(SampleTests):
    """Estimators with logistic noise L: y = sigmoid((log p_1 - log p_0 + L) / τ) is y_1."""

    K = 2

    def integrals(self, head, scores, power):
        """Integrals of the gradient in y_1's logit to a power, for L that chooses 0, and 1."""
        log_p = head.log_probs(scores)
        odds = float(log_p[1] - log_p[0])
        slopes = {k: self.slope_of(torch.eye(2).double()[k]) for k in (0, 1)}

        def integrand(noise):
            y = expit((odds + noise) / TAU)
            k = int(odds + noise > 0)
            g = slopes[k]
            if self.name == "relaxed":
                g = self.slope_of(torch.tensor([1 - y, y], dtype=torch.float64))
            density = expit(noise) * expit(-noise)
            return (g * y * (1 - y) / TAU) ** power * density

        options = {"epsabs": 1e-11, "epsrel": 1e-9, "limit": 200}
        return (
            quad(integrand, -60, -odds, **options)[0],
            quad(integrand, -odds, 60, **options)[0],
        )

    @staticmethod
    def slope_of(z):
        g = slope(z)
        return float(g[1] - g[0])

    def spread(self, first, second, probs):
        """Variance of an estimate from the integrals of its first and second power."""
        return sum(second) - sum(first) ** 2

    def exact_moments(self, head, scores):
        first = self.integrals(head, scores, 1)
        second = self.integrals(head, scores, 2)
        by_scores = jacobian(head, scores)
        odds_by_scores = by_scores[1] - by_scores[0]
        variance = self.spread(first, second, head.probs(scores))
        return sum(first) * odds_by_scores, variance * odds_by_scores.square()

    @pytest.mark.parametrize("head_name", GRID)
    def test_the_integral_over_the_noise_follows_the_formula(self, head_name, monkeypatch):
        """With noise on Gauss-Legendre nodes in place of random noise, the mean is an integral."""
        head = make(head_name, 2)
        scores = scores_of(head)
        p = head.probs(scores)
        nodes, weights = self.nodes(p)

        def on_nodes(empty, generator):
            noise = torch.ones_like(empty)
            noise[..., 0] = (nodes / (1 - nodes)).expand(noise.shape[:-1])
            return noise

        monkeypatch.setattr(estimators, "_exponential", on_nodes)
        rows = scores.expand(len(nodes), -1).clone().requires_grad_()
        mean = torch.autograd.grad(weights @ self.losses(head(rows)), rows)[0].sum(0)
        expected, _ = self.exact_moments(head, scores)
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-8)

    def nodes(self, p):
        """Nodes u and weights on the unit interval: two pieces, between them the sample changes."""
        x, w = torch.from_numpy(_LEGENDRE[0]), torch.from_numpy(_LEGENDRE[1])
        edges = torch.tensor([0.0, float(p[0]), 1.0], dtype=torch.float64)
        nodes = torch.cat([a + (b - a) * (x + 1) / 2 for a, b in itertools.pairwise(edges)])
        weights = torch.cat([(b - a) * w / 2 for a, b in itertools.pairwise(edges)])
        return nodes, weights

    def losses(self, q):
        return loss(q.rsample(estimator=self.name, temperature=TAU))


class TestGumbel(RelaxedTests):
    name = "gumbel"


class TestRelaxed(RelaxedTests):
    name = "relaxed"


class TestGumbelRao(RelaxedTests):
    """The mean is that of Gumbel; the variance given the sample is divided by the draws."""

    name = "gumbel-rao"

    def spread(self, first, second, probs):
        given = [float(a / p) for a, p in zip(first, probs, strict=True)]
        between = sum(float(p) * a**2 for p, a in zip(probs, given, strict=True)) - sum(first) ** 2
        within = sum(second) - sum(float(p) * a**2 for p, a in zip(probs, given, strict=True))
        return between + within / self.options["num_draws"]

    def losses(self, q):
        """Both samples, with their probabilities."""
        total = 0.0
        for one_hot in torch.eye(2).double():
            rows = one_hot.expand(q.logits.shape)
            z = estimators.gumbel_rao(q.logits, rows, TAU, num_draws=1)
            total = total + (q.probs.detach() * one_hot).sum(-1) * loss(z)
        return total

    def nodes(self, p):
        x, w = torch.from_numpy(_LEGENDRE[0]), torch.from_numpy(_LEGENDRE[1])
        return (x + 1) / 2, w / 2


class UnbiasedTests(EstimatorTests):
    """Estimators from losses alone: the mean is the exact gradient."""

    K = 4

    def sets(self, head, scores):
        """Probability (C,) and gradient (C, S) of every outcome."""
        raise NotImplementedError

    def exact_moments(self, head, scores):
        probs, gradients = self.sets(head, scores)
        torch.testing.assert_close(probs.sum(), torch.ones((), dtype=torch.float64))
        return moments(probs, gradients)

    @pytest.mark.parametrize("head_name", GRID)
    def test_the_mean_over_all_outcomes_is_the_exact_gradient(self, head_name):
        head = make(head_name, self.K)
        scores = scores_of(head).requires_grad_()
        expectation = head.probs(scores) @ loss(torch.eye(self.K).double())
        (exact,) = torch.autograd.grad(expectation, scores)
        mean, _ = self.exact_moments(head, scores.detach())
        torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-10)


class TestScoreFunction(UnbiasedTests):
    name = "score-function"

    def sets(self, head, scores):
        losses = loss(torch.eye(self.K).double())
        by_scores = jacobian(head, scores)
        p = head.probs(scores)
        pairs = list(itertools.product(range(self.K), repeat=2))
        gradients = [(losses[i] - losses[j]) * (by_scores[i] - by_scores[j]) / 2 for i, j in pairs]
        return torch.stack([p[i] * p[j] for i, j in pairs]), torch.stack(gradients)

    def drawn(self, head, scores, generator):
        rows = scores.expand(DRAWS, -1).clone().requires_grad_()
        q = head(rows)
        values = q.sample((2,), generator)
        losses = loss(torch.eye(self.K).double())[values]
        total = estimators.score_function_surrogate(losses, q.log_prob(values)).sum()
        return torch.autograd.grad(total, rows)[0]


class TestUnorderedSet(UnbiasedTests):
    """From k = 2 different categories; a subclass takes more."""

    name = "unordered-set"
    k = 2

    def sets(self, head, scores):
        losses = loss(torch.eye(self.K).double())
        probs = []
        gradients = []
        for drawn in itertools.permutations(range(self.K), self.k):
            values = torch.tensor(drawn)
            rows = scores.clone().requires_grad_()
            log_probs = head(rows).log_prob(values)
            surrogate = estimators.unordered_set_surrogate(losses[values], log_probs)
            gradients.append(torch.autograd.grad(surrogate, rows)[0])
            probs.append(order_probability(log_probs.detach().exp()))
        return torch.stack(probs), torch.stack(gradients)

    def drawn(self, head, scores, generator):
        rows = scores.expand(DRAWS, -1).clone().requires_grad_()
        values, log_probs = head(rows).sample_without_replacement(self.k, generator)
        losses = loss(torch.eye(self.K).double())[values]
        total = estimators.unordered_set_surrogate(losses, log_probs).sum()
        return torch.autograd.grad(total, rows)[0]

    @pytest.mark.parametrize("head_name", GRID)
    def test_the_weights_are_means_over_the_orders_of_the_draws(self, head_name):
        """R(S, s) by all orders, for every set; the value is then unbiased."""
        head = make(head_name, self.K)
        log_probs = head.log_probs(scores_of(head))
        losses = loss(torch.eye(self.K).double())
        expectation = 0.0
        for subset in itertools.combinations(range(self.K), self.k):
            orders = {
                order: order_probability(log_probs[list(order)].exp())
                for order in itertools.permutations(subset)
            }
            total = sum(orders.values())
            if total == 0:  # an impossible category, and a possible one is left
                continue
            first = sum(losses[order[0]] * prob for order, prob in orders.items()) / total
            members = list(subset)
            value = estimators.unordered_set_surrogate(losses[members], log_probs[members])
            torch.testing.assert_close(value, first, rtol=1e-10, atol=1e-10)
            expectation = expectation + total * value
        torch.testing.assert_close(expectation, log_probs.exp() @ losses)

    def test_its_variance_is_below_that_of_the_score_function(self):
        for head_name in GRID:
            head = make(head_name, self.K)
            scores = scores_of(head)
            _, variance = self.exact_moments(head, scores)
            _, other = TestScoreFunction().exact_moments(head, scores)
            assert variance.sum() < other.sum()


class TestUnorderedSetOfThree(TestUnorderedSet):
    k = 3


class TestUnorderedSetOfAll(TestUnorderedSet):
    """The sum over all categories, without noise."""

    k = 4


def order_probability(probs, K=4):
    """Probability of draws without replacement in this order, (k,) -> (), of K categories.

    Impossible categories come last, in any order.
    """
    left = 1 - probs.cumsum(0) + probs
    number_left = K - torch.arange(len(probs))
    return torch.where(left > 1e-12, probs / left, 1 / number_left).prod()


@pytest.mark.parametrize("K", [2, 10, 40])
def test_the_unordered_set_of_all_categories_is_the_exact_sum(K):
    head = make("natural", K)
    scores = scores_of(head).requires_grad_()
    losses = loss(torch.eye(K).double())
    values, log_probs = head(scores).sample_without_replacement(K)
    value = estimators.unordered_set_surrogate(losses[values], log_probs, num_categories=K)
    exact = head.probs(scores) @ losses
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(
        torch.autograd.grad(value, scores), torch.autograd.grad(exact, scores)
    )


def test_the_gradient_of_the_losses_goes_through_the_unordered_set():
    """The mean over all sets is the gradient in a weight of the losses, too."""
    log_probs = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for drawn in itertools.permutations(range(4), 2):
        members = list(drawn)
        losses = (weight * torch.tensor(members)).sin()
        value = estimators.unordered_set_surrogate(losses, log_probs[members])
        total = total + order_probability(log_probs[members].exp()) * value
    exact = log_probs.exp() @ (weight * torch.arange(4)).sin()
    torch.testing.assert_close(
        torch.autograd.grad(total, weight), torch.autograd.grad(exact, weight)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_name", GRID)
def test_impossible_and_unlikely_members_of_a_set_leave_the_exact_sum(head_name, dtype):
    """Two categories are possible: three draws have them, and one that has no weight."""
    head = make(head_name, 6)
    mask = torch.tensor([False, True, False, False, True, False])
    scores = (9 * torch.randn(50, head.num_scores)).to(dtype).requires_grad_()
    q = head(scores, mask=mask)
    values, log_probs = q.sample_without_replacement(3)
    losses = torch.tensor([1e6, 3.0, 1e6, 1e6, -2.0, 1e6]).to(q.probs.dtype)[values]
    value = estimators.unordered_set_surrogate(losses, log_probs)
    torch.testing.assert_close(
        value,
        3 * q.probs[:, 1].float() - 2 * q.probs[:, 4].float(),
        check_dtype=False,
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.autograd.grad(value.sum(), scores)[0].isfinite().all()


def test_the_unordered_set_refuses_what_it_cannot_weigh():
    for k, num_categories in ((1, None), (11, None), (11, 12)):
        zeros = torch.zeros(k, 2)
        with pytest.raises(ValueError, match=rf"needs 2 to 10 samples, or all .*got {k}"):
            estimators.unordered_set_surrogate(zeros, zeros, num_categories)
    with pytest.raises(ValueError, match=r"\(2, 4\) and \(2,\)"):
        estimators.unordered_set_surrogate(torch.zeros(2, 4), torch.zeros(2))


def test_every_row_of_the_table_inherits_the_suite():
    def names(kind):
        return {kind.name}.union(*map(names, kind.__subclasses__()))

    assert names(EstimatorTests) - {""} == {estimator.name for estimator in TABLE}


def test_names_and_aliases_occur_once_and_rsample_offers_those_with_samples():
    names = [name for each in TABLE for name in (each.name, *each.aliases)]
    assert len(set(names)) == len(names)
    assert tuple(each.name for each in TABLE if each.draw) == ESTIMATORS
    assert all(hasattr(estimators, each.function.__name__) for each in TABLE)


def test_a_wrong_name_gets_the_choices():
    q = make("sigmoid", 4)(torch.zeros(3))
    with pytest.raises(ValueError, match=r"'gumbel-roa'; did you mean gumbel-rao\? choose from"):
        q.rsample(estimator="gumbel-roa")
    with pytest.raises(ValueError, match=r"call catnat\.estimators\.score_function_surrogate"):
        q.rsample(estimator="score_function")


def test_the_docs_have_the_table():
    """If this fails, paste the printed table into docs/estimators.md."""
    print(markdown_table())
    assert markdown_table() in (DOCS / "estimators.md").read_text()


def test_the_page_on_latents_has_every_estimator_of_the_vae():
    text = (DOCS / "discrete_latents.md").read_text()
    assert all(f"| `{each.name}`" in text for each in TABLE if each.draw)
    assert "| `score-function`" in text
