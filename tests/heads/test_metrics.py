"""Metrics: sums come first and ratios last, over batches and ranks; and naive code agrees."""

import pytest
import torch
from cases import HEADS

from catnat import make_head
from catnat.fisher import off_diagonal_mass
from catnat.metrics import (
    FisherOffDiagonalMass,
    RowMeans,
    edge_errors,
    prediction_errors,
    prediction_means,
)


@pytest.mark.parametrize("norm", ["l1", "fro"])
@pytest.mark.parametrize("name", HEADS)
def test_does_not_depend_on_how_the_data_are_cut(name, norm):
    head = make_head(name, 5)
    scores = 0.4 * torch.randn(12, head.num_scores)
    mass = off_diagonal_mass(head.fisher(scores).mean(0), norm)
    for cut in ([12], [5, 7], [1] * 12):
        metric = FisherOffDiagonalMass(head.num_scores, norm)
        weighted = FisherOffDiagonalMass(head.num_scores, norm)
        for part in scores.split(cut):
            metric.update(head.fisher(part))
            weighted.update(head.mean_fisher(part), weight=len(part))
        assert metric.compute() == pytest.approx(mass.item(), abs=1e-6)
        assert weighted.compute() == pytest.approx(mass.item(), abs=1e-6)


@pytest.mark.parametrize("cut", [[7], [2, 5], [7, 0], [1] * 7])
def test_means_over_rows_do_not_depend_on_how_the_rows_are_cut(cut):
    rows = torch.randn(7, 2, 3)
    means = RowMeans({"loss": (), "usage": (2, 3)})
    for part in rows.split(cut):
        means.update(len(part), loss=part[:, 0, 0].double().sum(), usage=part.double().sum(0))
    result = means.compute()
    assert result["loss"].item() == pytest.approx(rows[:, 0, 0].mean().item(), abs=1e-6)
    assert torch.allclose(result["usage"].float(), rows.mean(0), atol=1e-6)


@pytest.mark.filterwarnings("error")
def test_means_over_no_rows_are_no_means():
    means = RowMeans({"loss": ()})
    means.update(2, loss=torch.tensor(3.0))
    means.reset()
    assert means.compute() == {}


def test_reset_and_errors():
    metric = FisherOffDiagonalMass(2)
    metric.update(torch.ones(3, 2, 2))
    assert metric.compute() == pytest.approx(0.5**0.5)
    metric.reset()
    metric.update(torch.eye(2))
    assert metric.compute() == 0
    with pytest.raises(ValueError, match=r"shape \(\*, 2, 2\), got \(3, 3\)"):
        metric.update(torch.eye(3))


# -- predictions and edges ------------------------------------------------------------------------


def naive_metrics(samples, target):
    """By the definitions, pair by pair."""
    M, B = samples.shape[:2]
    score = median = mean = 0.0
    for b in range(B):
        x = samples[:, b].flatten(1)
        y = target[b].flatten()
        apart = sum((x[m] - x[n]).norm() for m in range(M) for n in range(M) if m != n)
        score += sum((x[m] - y).norm() for m in range(M)) / M - apart / (2 * M * (M - 1))
        middle = x.sort(0).values[(M - 1) // 2]
        median += (middle - y).abs().mean()
        mean += (x.mean(0) - y).square().mean()
    return {"energy_score": score / B, "pp_mae": median / B, "pp_mse": mean / B}


@pytest.mark.parametrize("M", [4, 5])
def test_predictions_against_naive_code(M):
    samples = torch.randn(M, 7, 3, 2)
    target = torch.randn(7, 3, 2)
    wanted = naive_metrics(samples, target)
    metrics = prediction_means()
    for part in (slice(0, 4), slice(4, 6), slice(6, 7)):  # batches of unequal size
        metrics.add_rows(**prediction_errors(samples[:, part], target[part]))
    result = metrics.compute()
    assert result.keys() == wanted.keys()
    for name, value in wanted.items():
        assert result[name] == pytest.approx(value.item(), rel=1e-5)
    metrics.reset()
    metrics.add_rows(**prediction_errors(samples[:, :1], target[:1]))
    again = naive_metrics(samples[:, :1], target[:1])
    assert metrics.compute()["pp_mae"] == pytest.approx(again["pp_mae"].item(), rel=1e-5)


def test_edges_against_naive_code():
    truth = 0.75 * (torch.rand(9, 9) < 0.3)
    theta = torch.rand(9, 9)
    theta[0] = 0
    theta[1] = 1
    theta[2, 0] = 0.3
    result = edge_errors(theta, truth)
    calibration = 0.0
    for k in range(10):
        inside = (theta >= k / 10) & ((theta < (k + 1) / 10) | (k == 9))
        if inside.any():
            difference = theta[inside].mean() - truth[inside].mean()
            calibration += abs(difference.item()) * inside.sum().item() / 81
    assert result["calibration"] == pytest.approx(calibration, rel=1e-4)
    assert result["theta_mae"] == pytest.approx((theta - truth).abs().mean().item(), rel=1e-5)
    assert result["dead_edges"] == (truth[0] > 0).sum()
    assert all(value == 0 for value in edge_errors(truth, truth).values())


def test_rows_without_a_value_are_refused():
    means = RowMeans({"loss": (), "error": ()})
    for sums in ({}, {"loss": torch.tensor(1.0)}):
        with pytest.raises(ValueError, match="expected sums of"):
            means.update(1, **sums)
    assert means.compute() == {}
