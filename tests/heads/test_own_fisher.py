"""Fisher matrices of heads that change what a closed form was derived for."""

import pytest
import torch
from cases import CauchyHead, Flattened

from catnat import CatnatHead, NaturalHead, SigmoidHead, SoftmaxHead
from catnat.fisher import off_diagonal_mass, paired_mean_fishers
from catnat.metrics import FisherOffDiagonalMass


def definition(head, scores):
    """sum_k p_k grad log p_k (grad log p_k)^T, by one Jacobian for each row."""
    rows = []
    for row in scores.double():
        jacobian = torch.autograd.functional.jacobian(head.log_probs, row)  # (K, S)
        rows.append(torch.einsum("k,ki,kj->ij", head.log_probs(row).exp(), jacobian, jacobian))
    return torch.stack(rows)


class Shifted(NaturalHead):
    """Each node's score is moved by that of the root: the splits depend on each other."""

    def log_probs(self, scores):
        return super().log_probs(
            torch.cat((scores[..., :1], scores[..., 1:] + 3 * scores[..., :1]), -1)
        )


class Sharper(SoftmaxHead):
    def log_probs(self, scores):
        return torch.log_softmax(3 * scores, -1)


class Neighbours(CatnatHead):
    """An activation that reads the scores of other nodes."""

    def log_activation(self, x):
        x = x + 0.5 * x.roll(1, -1)
        return torch.nn.functional.logsigmoid(-x), torch.nn.functional.logsigmoid(x)


class Proven(NaturalHead):
    """The log-probabilities of its base, written again."""

    fisher_is_diagonal = True

    def log_probs(self, scores):
        return super().log_probs(scores)


CHANGED = [Shifted, Sharper, Neighbours, Flattened]


@pytest.mark.parametrize("kind", CHANGED)
def test_a_matrix_is_differentiated_where_its_closed_form_does_not_apply(kind):
    head = kind(6)
    scores = 0.7 * torch.randn(5, head.num_scores, dtype=torch.float64)
    want = definition(head, scores)
    assert not head.fisher_is_diagonal
    torch.testing.assert_close(head.fisher(scores), want)
    torch.testing.assert_close(head.fisher(scores[0]), want[0])
    torch.testing.assert_close(head.fisher_diagonal(scores), want.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(head.mean_fisher(scores), want.mean(0))
    steps = head.step_fishers(scores[None])
    torch.testing.assert_close(steps.double(), want.mean(0).flatten()[None], rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(scores)
    moved = head.natural_gradient(scores, grad, damping=0.1)
    damped = want + 0.1 * torch.eye(head.num_scores)
    torch.testing.assert_close(moved, torch.linalg.solve(damped, grad))


@pytest.mark.parametrize("kind", [SigmoidHead, NaturalHead, CauchyHead])
def test_a_matrix_is_known_to_be_diagonal_where_splits_are_independent(kind):
    head = kind(6)
    scores = 0.7 * torch.randn(5, head.num_scores, dtype=torch.float64)
    assert head.fisher_is_diagonal
    torch.testing.assert_close(head.fisher(scores), definition(head, scores), atol=1e-8, rtol=1e-6)


def test_a_class_may_state_that_its_matrix_is_diagonal():
    head = Proven(6)
    scores = torch.randn(3, 5)
    assert torch.equal(head.fisher(scores), NaturalHead(6).fisher(scores))


@pytest.mark.parametrize("kind", [*CHANGED, NaturalHead, SoftmaxHead])
def test_the_mass_from_draws_converges_to_the_exact_one_however_the_data_are_cut(kind):
    head = kind(6)
    generator = torch.Generator().manual_seed(3)
    scores = 0.4 * torch.randn(400, head.num_scores, generator=generator)
    exact, drawn = FisherOffDiagonalMass(head.num_scores), FisherOffDiagonalMass(head.num_scores)
    for part in scores.split([250, 150]):
        exact.update(head.mean_fisher(part), weight=len(part))
        uniforms = torch.rand(128, len(part), dtype=torch.float64, generator=generator)
        one, other = paired_mean_fishers(head, part, uniforms)
        drawn.update(one, len(part), other)
    want = off_diagonal_mass(head.mean_fisher(scores))
    assert exact.compute() == pytest.approx(float(want), abs=1e-5)
    assert drawn.compute() == pytest.approx(float(want), abs=0.03)
    assert bool(want > 1e-3) is (kind is not NaturalHead)


def test_two_estimates_need_the_frobenius_norm():
    with pytest.raises(ValueError, match="two estimates need norm 'fro', got 'l1'"):
        FisherOffDiagonalMass(2, "l1").update(torch.eye(2), other=torch.eye(2))
