"""M graph structure learners trained as one batched model take the steps of M separate models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from catnat.lit_modules import GraphStructureLearner
from catnat.replay import StepGraph
from experiments.together.graphs import ManyGraphLearners

B, N, IN, OUT, G = 5, 6, 3, 2, 4
SIZES = {"num_nodes": N, "in_features": IN, "out_features": OUT, "num_samples": G}


def learner(head="natural", **options):
    return GraphStructureLearner(head, **(SIZES | {"theta_init": (0.1, 0.6)} | options))


def pairs(models):
    shape = (models, B, N)
    x, y = (torch.randn(*shape, size, dtype=torch.float64) for size in (IN, OUT))
    return x, y


class Alone:
    """Models that are trained one by one, each by its own Adam."""

    def __init__(self, models):
        self.models = models
        self.adams = []
        for model in models:
            of_scores, of_psi = model.learning_rates
            psi = {"params": list(model.predictor.parameters()), "lr": of_psi}
            self.adams.append(
                torch.optim.Adam([{"params": [model.edge_scores], "lr": of_scores}, psi])
            )

    def step(self, batch):
        losses = []
        for i, (model, adam) in enumerate(zip(self.models, self.adams, strict=True)):
            self.model = i
            loss = model.step_loss((batch[0][i], batch[1][i]))
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.detach())
        return torch.stack(losses)


def steps_agree(monkeypatch, many, alone, count=4):
    """Take steps in both ways with the same noise; compare the losses and all parameters."""
    for _ in range(count):
        # Small numbers among the noise: unlikely edges are drawn, too.
        noise = torch.rand(G, len(alone.models), N, N, dtype=torch.float64) ** 4
        batch = pairs(len(alone.models))
        monkeypatch.setattr(
            "experiments.together.graphs.sample_graphs",
            lambda theta, _, u=noise: (u < theta).to(theta.dtype),
        )
        monkeypatch.setattr(
            "catnat.lit_modules.graph.sample_graphs",
            lambda theta, _, u=noise: (u[:, alone.model] < theta).to(theta.dtype),
        )
        many.prepare_step(0)
        losses = many.step(batch)
        assert losses.shape == (len(alone.models),) and not losses.requires_grad
        assert torch.allclose(losses, alone.step(batch), rtol=1e-9, atol=0)
        for i, model in enumerate(alone.models):
            for name, value in model.named_parameters():
                assert torch.allclose(many.state_of(i)[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("theta_init", [(0.1, 0.6), (0.0, 0.01)], ids=["likely", "unlikely"])
@pytest.mark.parametrize(
    "heads",
    [
        [("natural", {}), ("natural", {}), ("sigmoid", {})],
        [("softmax", {}), ("sparsemax", {}), ("sparsemax", {})],
        [("natural", {"tail": 0.0}), ("natural", {"tail": 0.005}), ("natural", {"tail": 0.0})],
    ],
    ids=["one score", "two scores", "tails"],
)
def test_a_batched_step_is_the_step_of_each_model(heads, theta_init, monkeypatch):
    torch.manual_seed(0)
    models = [
        learner(name, head_options=options, theta_init=theta_init).double()
        for name, options in heads
    ]
    steps_agree(monkeypatch, ManyGraphLearners(models), Alone(models), count=8)


def test_each_model_has_its_own_learning_rates(monkeypatch):
    torch.manual_seed(1)
    own = [learner(learning_rate=0.01 * i, psi_learning_rate=0.1 / i).double() for i in (1, 2, 3)]
    steps_agree(monkeypatch, ManyGraphLearners(own), Alone(own))


def test_an_edge_on_which_all_graphs_agree_stays_exactly_where_it_is():
    torch.manual_seed(2)
    models = [learner("sigmoid", theta_init=(0.5, 0.5)) for _ in range(2)]
    with torch.no_grad():
        for model in models:
            model.edge_scores[0], model.edge_scores[1] = 100.0, -100.0
    many = ManyGraphLearners(models)
    before = many.scores.detach().clone()
    for _ in range(3):
        many.step(tuple(each.float() for each in pairs(2)))
    moved = many.scores != before
    assert not moved[:, :2].any()
    assert moved[:, 2:].float().mean() > 0.8


def test_samples_that_coincide_give_finite_gradients():
    torch.manual_seed(3)
    models = [learner("sparsemax", theta_init=(1.0, 1.0)) for _ in range(2)]
    many = ManyGraphLearners(models)
    losses = many.step(tuple(each.float() for each in pairs(2)))
    assert all(each.isfinite().all() for each in (losses, many.scores, many.psi))


def energy_by_differences(samples, target, scale):
    """What the kernel computes: errors, sums of distances, scaled gradient of the energy score."""
    G = samples.shape[-2]
    residual = samples - target[..., None, :]  # (M, B, D, G, N)
    apart = samples[..., :, None, :] - samples[..., None, :, :]  # (M, B, D, G, G, N)
    error = residual.square().sum((2, 4)).sqrt()
    distance = apart.square().sum((2, 5)).sqrt()
    weight = torch.where(distance == 0, 0.0, 1 / distance)[:, :, None, ..., None]
    slope = residual / error[:, :, None, :, None] - (weight * apart).sum(-2) / (G - 1)
    return error, distance.sum(-1), scale / G * slope


def test_a_step_with_the_kernel_of_a_gpu_is_the_same_step(monkeypatch):
    pytest.importorskip("triton")
    torch.manual_seed(4)
    models = [learner().double() for _ in range(2)]
    monkeypatch.setattr("experiments.together.graphs.kernels_for", lambda *_: "triton")
    monkeypatch.setattr("experiments.together.triton_energy.energy", energy_by_differences)
    steps_agree(monkeypatch, ManyGraphLearners(models), Alone(models))


def test_a_model_loads_what_was_trained():
    torch.manual_seed(5)
    models = [learner() for _ in range(3)]
    many = ManyGraphLearners(models)
    for i, model in enumerate(models):
        for name, value in many.state_of(i).items():
            assert torch.equal(value, model.get_parameter(name))
    many.step(tuple(each.float() for each in pairs(3)))
    state = many.state_of(1)
    missing, unexpected = models[1].load_state_dict(state, strict=False)
    assert not unexpected
    assert not set(missing) & {name for name, _ in models[1].named_parameters()}
    assert torch.equal(models[1].edge_scores, many.scores[1])
    assert torch.equal(models[1].predictor.weight, many.psi[1])
    many.step(tuple(each.float() for each in pairs(3)))
    assert torch.equal(models[1].edge_scores, state["edge_scores"])


class Other(nn.Module):
    def forward(self, x, graphs):
        return x.new_zeros(len(graphs), *x.shape[:2], OUT)


class MyLearner(GraphStructureLearner):
    def scores(self, batch):
        return 2 * self.edge_scores


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([], "one or more, got none"),
        ([learner(estimator="local_expectation", flip_samples=2)], "got 'local_expectation'"),
        ([learner(lr_schedule="linear")], "got 'linear'"),
        ([learner(psi_warmup_steps=3)], "psi_warmup_steps of every model must be 0, got 3"),
        ([learner(predictor=Other())], "must be a dense GCN, got Other"),
        ([learner(), MyLearner(**SIZES)], "must be GraphStructureLearners, got MyLearner"),
        ([learner(), learner("softmax")], r"got .*\(6, 6, 2\), .*\(3, 2\)"),
        ([learner(), learner(num_nodes=7)], r"got .*\(7, 7, 1\), .*\(3, 2\)"),
        ([learner(), learner(in_features=4)], r"got .*\(6, 6, 1\), .*\(4, 2\)"),
        ([learner(), learner(num_samples=9)], "num_samples of every model must be 4, got 9"),
    ],
)
def test_models_that_cannot_train_together_are_a_clear_error(models, words):
    with pytest.raises(ValueError, match=words) as error:
        ManyGraphLearners(models)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_are_eager_steps_on_a_gpu():
    torch.manual_seed(6)
    models = [learner(head).cuda() for head in ("natural", "sigmoid")]
    batches = [tuple(each.float().cuda() for each in pairs(2)) for _ in range(8)]
    ends = []
    for take in (lambda many: many.step, lambda many: StepGraph(many.step)):
        torch.manual_seed(7)
        many = ManyGraphLearners(models)
        step = take(many)
        losses = [step(batch).clone() for batch in batches]
        ends.append((many.scores.detach(), torch.stack(losses)))
    (eager, eager_losses), (captured, captured_losses) = ends
    assert torch.allclose(captured, eager, rtol=1e-4, atol=1e-5)
    assert torch.allclose(captured_losses, eager_losses, rtol=1e-4)
