"""Gradients of the energy score over random graphs, against all graphs enumerated."""

import itertools

import pytest
import torch
from cases import slow

from catnat.graphs import (
    GCN,
    flip_gains,
    local_expectation_direction,
    sample_graphs,
    score_function_direction,
)
from catnat.lit_modules import GraphStructureLearner
from catnat.losses import energy_terms


def all_graphs(n):
    cells = torch.tensor(list(itertools.product((0.0, 1.0), repeat=n * n)), dtype=torch.float64)
    return cells.reshape(-1, n, n)


def expected_score(theta, graphs, model, x, y):
    """The exact expectation over two independent graphs, differentiable in θ and psi."""
    p = torch.where(graphs == 1, theta, 1 - theta).flatten(1).prod(1)
    outputs = model(x, graphs).flatten(2)  # (G, B, D)
    error = (p[:, None] * (outputs - y.flatten(1)).norm(dim=-1)).sum(0)
    apart = outputs.transpose(0, 1)[:, :, None] - outputs.transpose(0, 1)[:, None]  # (B, G, G, D)
    distance = (apart.square().sum(-1) + 1e-300).sqrt()
    return (error - 0.5 * (p[:, None] * p * distance).sum((1, 2))).mean()


def problem(n, batch=2):
    x = torch.randn(batch, n, 3, dtype=torch.float64)
    y = torch.randn(batch, n, 2, dtype=torch.float64)
    theta = torch.empty(n, n, dtype=torch.float64).uniform_(0.1, 0.9)
    return x, y, theta, GCN(3, 2).double()


# -- exact, on two nodes: every triple of the 16 graphs --------------------------------------------


@pytest.fixture(scope="module")
def triples():
    """The problem, its exact gradient in θ, and all triples of graphs with their probability."""
    torch.manual_seed(3)
    x, y, theta, model = problem(2)
    graphs = all_graphs(2)
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(expected_score(leaf, graphs, model, x, y), leaf)
    p = torch.where(graphs == 1, theta, 1 - theta).flatten(1).prod(1)
    index = torch.tensor(list(itertools.product(range(16), repeat=3)))
    return x, y, theta, model, gradient, graphs[index], p[index].prod(1)


@torch.no_grad()
def test_score_function_is_exactly_unbiased(triples):
    x, y, theta, model, gradient, triple, p = triples

    def direction(graphs):
        error, distance = energy_terms(model(x, graphs).flatten(2), y.flatten(1))
        return score_function_direction(error, distance, graphs)

    mean = torch.tensordot(p, torch.vmap(direction)(triple), 1)
    assert torch.allclose(mean, gradient * theta * (1 - theta), atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("flips", [1, 2, 3])
def test_local_expectation_is_exactly_unbiased(triples, flips):
    x, y, _, model, gradient, triple, p = triples

    def direction(graphs):
        return local_expectation_direction(model.messages(x), model(x, graphs), y, graphs, flips)

    mean = torch.tensordot(p, torch.vmap(direction, chunk_size=512)(triple), 1)
    assert torch.allclose(mean, gradient, atol=1e-12)


# -- sampled, on three nodes: 2^9 graphs, through the learner's loss -------------------------------


def gradients(model, batch, repeats):
    """Gradients in θ's scores and in psi of so many losses, (repeats, ...)."""
    result = [
        torch.autograd.grad(model.step_loss(batch), [model.edge_scores, model.predictor.weight])
        for _ in range(repeats)
    ]
    return [torch.stack(part) for part in zip(*result, strict=True)]


@pytest.mark.parametrize(
    ("head", "repeats"), [("natural", 400), slow("natural", 2000), slow("softmax", 1000)]
)
def test_the_loss_has_unbiased_gradients(head, repeats):
    x, y, _, _ = problem(3)
    variance = {}
    for estimator in ("score_function", "local_expectation"):
        torch.manual_seed(1)
        model = GraphStructureLearner(
            head,
            num_nodes=3,
            in_features=3,
            num_samples=6,
            estimator=estimator,
        )
        model.flip_samples = 4
        model.edge_scores.data = model.initial_scores(0.1, 0.9)
        model.double()
        score = expected_score(model((x, y)).probs[..., 1], all_graphs(3), model.predictor, x, y)
        exact = torch.autograd.grad(score, [model.edge_scores, model.predictor.weight])
        for wanted, result in zip(exact, gradients(model, (x, y), repeats), strict=True):
            error = (result.mean(0) - wanted).abs()
            assert (error < 4.5 * result.std(0) / repeats**0.5 + 1e-12).all()
            variance.setdefault(estimator, []).append(result.var(0).sum().item())
    assert variance["local_expectation"][0] < variance["score_function"][0] / 2


# -- parts --------------------------------------------------------------------------------------


def test_a_residual_of_zero_gives_no_nan():
    z = torch.zeros(1, 2, 2)
    assert flip_gains(z, z[None], torch.ones(1, 1, 2, 2)).tolist() == [[0, 0], [0, 0]]


def test_edges_on_which_all_graphs_agree_get_exactly_zero():
    graphs = sample_graphs(torch.full((24, 24), 0.5), 32)
    graphs[:, 0] = 0
    graphs[:, 1] = 1
    error = torch.rand(32, 8)
    distance = torch.rand(8, 32, 32)
    direction = score_function_direction(error, distance, graphs)
    assert (direction[:2] == 0).all() and (direction[2:] != 0).all()


def test_certain_edges_are_certain():
    theta = torch.tensor([[0.0, 1.0]]).expand(500, 2)
    assert (sample_graphs(theta, 50) == theta).all()
    with pytest.raises(ValueError, match="M >= 3 samples, got M = 2"):
        score_function_direction(torch.rand(2, 1), torch.rand(1, 2, 2), torch.zeros(2, 1, 1))


def test_directions_are_float32_under_autocast():
    graphs = (torch.rand(4, 3, 3) < 0.5).float()
    messages, target = torch.randn(2, 5, 3, 2)
    outputs = torch.einsum("mji,bjd->mbid", graphs, messages)
    terms = (torch.rand(4, 5), torch.rand(5, 4, 4))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            score_function = score_function_direction(*terms, graphs)
            local = local_expectation_direction(messages, outputs, target, graphs, 4)
        results.append(torch.stack((score_function, local)))
    assert torch.equal(*results) and results[1].dtype == torch.float32


def test_rare_edges_are_as_rare_in_half_precision():
    theta = torch.full((100, 100), 1e-3, dtype=torch.bfloat16)
    graphs = sample_graphs(theta, 100, torch.Generator().manual_seed(0))
    assert graphs.dtype == torch.bfloat16
    assert graphs.float().mean().item() == pytest.approx(1e-3, rel=0.1)
