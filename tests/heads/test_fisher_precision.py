"""Fisher matrices where numbers are very small, very large, or computed in half precision."""

from __future__ import annotations

import math

import pytest
import torch
from cases import GRID, make

from catnat import make_head
from catnat.fisher import (
    condition_number,
    off_diagonal_mass,
    score_fisher,
)


@pytest.mark.parametrize("rows", [1, 256])
def test_softmax_does_not_cancel_where_it_is_saturated(rows):
    """p - p^2 in float32 would be 0, or negative, in the place of the likely category."""
    head = make_head("softmax", 4)
    scores = torch.randn(rows, 4)
    scores[:, 0] += 16
    exact = head.fisher(scores.double())
    close = {"rtol": 1e-5, "atol": 0.0}
    assert torch.allclose(head.fisher(scores).double(), exact, **close)
    diagonal = exact.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(head.fisher_diagonal(scores).double(), diagonal, **close)
    mean = head.mean_fisher(scores)
    assert torch.allclose(mean.double(), exact.mean(0), **close)
    assert torch.allclose(
        head.step_fishers(scores[None])[0].double(), mean.double().flatten(), **close
    )
    assert off_diagonal_mass(mean) == pytest.approx(0.5)
    for measure in (lambda G: off_diagonal_mass(G, "fro"), condition_number):
        assert measure(mean).item() == pytest.approx(measure(exact.mean(0)).item(), rel=1e-3)


@pytest.mark.parametrize("name", GRID)
def test_results_are_float32_under_autocast(name):
    head = make(name, 8)

    scores = 0.3 * torch.randn(6, head.num_scores)
    grad = torch.randn_like(scores)

    def results(autocast):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return {
                "sampled": score_fisher(head, scores, "sampled", 3),
                "natural gradient": head.natural_gradient(scores, grad, damping=0.1),
            }

    plain = results(autocast=False)
    for what, value in results(autocast=True).items():
        assert value.dtype == torch.float32, what
        error = (value - plain[what]).norm() / plain[what].norm()
        assert error < 1e-5, what


@pytest.mark.parametrize("norm", ["l1", "fro"])
@pytest.mark.parametrize("scale", [1e-44, 1e-25, 1e-12, 1.0, 1e20, 3e38])
def test_mass_does_not_depend_on_the_scale(norm, scale):
    matrix = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    share = off_diagonal_mass(matrix * scale, norm)
    assert share == pytest.approx(0.5 if norm == "l1" else math.sqrt(0.5), rel=1e-5)
    assert off_diagonal_mass(torch.full((2, 2), math.nan), norm).isnan()


def test_condition_number_never_raises(monkeypatch):
    hard = make_head("sparsemax", 300).mean_fisher(10 * torch.randn(64, 300))  # LAPACK gives up
    value, easy = condition_number(torch.stack((hard, torch.eye(300))))
    assert easy == 1 and value.isfinite()
    assert value == pytest.approx(condition_number(hard.double()).item(), rel=0.01)
    for scale in (1e-30, 1e30):
        matrix = scale * torch.diag(torch.tensor([4.0, 2.0, 1.0]))
        assert condition_number(matrix) == pytest.approx(4.0)

    def gives_up(matrices):
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigvalsh", gives_up)
    assert condition_number(torch.eye(3).expand(2, 3, 3)).isnan().tolist() == [True, True]
