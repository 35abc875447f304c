"""Many models as one: a step of each, by vmap over stacked parameters and buffers."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from catnat import head_names
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE

IMAGES = torch.rand(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
PAIRS = (torch.randn(5, 6, 4), torch.randn(5, 6, 2))
GRAPHS = (torch.rand(32, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.3).float()
MODELS = {
    "vae": (lambda head: DiscreteVAE(head, 3, 4), IMAGES),
    "mlp-vae": (lambda head: MLPDiscreteVAE(head, 3, 4), IMAGES),
    "leave-one-out": (
        lambda head: MLPDiscreteVAE(head, 3, 4, baseline="leave-one-out", num_samples=3),
        IMAGES,
    ),
    "gsl": (lambda head: GraphStructureLearner(head, 6), PAIRS),
    "gsl, local": (
        lambda head: GraphStructureLearner(head, 6, estimator="local_expectation"),
        PAIRS,
    ),
}


class Step(nn.Module):
    """What functional_call calls: the loss of a step."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, batch):
        return self.module.step_loss(batch)


def together(models, batch):
    """Losses (3,), and stacked parameters with gradients and buffers after the step."""
    steps = [Step(copy.deepcopy(model)) for model in models]
    parameters, buffers = stack_module_state(steps)
    base = copy.deepcopy(steps[0]).to("meta")

    def loss(p, b):
        return functional_call(base, (p, b), (batch,))

    losses = vmap(loss, randomness="different")(parameters, buffers)
    losses.sum().backward()
    return losses.detach(), parameters, buffers


@pytest.mark.parametrize("head", head_names()[:4])
@pytest.mark.parametrize("name", MODELS)
def test_three_models_take_a_step_as_one(name, head):
    make, batch = MODELS[name]
    torch.manual_seed(0)
    models = [make(head) for _ in range(3)]
    losses, parameters, buffers = together(models, batch)
    assert losses.isfinite().all() and len(losses.unique()) == 3
    for key, each in parameters.items():
        assert each.grad.isfinite().all() and each.grad.any(), key
    counted = [each for key, each in buffers.items() if "num_batches" in key]
    assert all(each.tolist() == [1, 1, 1] for each in counted) and len(counted) in (0, 3)


def test_without_noise_gradients_and_batch_norms_are_those_of_each_model_alone():
    class Smooth(DiscreteVAE):
        def loss(self, batch, q):
            return (self.reconstruction(batch, q.probs) + self.kl(q)).mean()

    models = [Smooth("natural", 3, 4) for _ in range(3)]
    losses, parameters, buffers = together(models, IMAGES)
    for number, model in enumerate(models):
        loss = model.step_loss(IMAGES)
        loss.backward()
        assert losses[number] == pytest.approx(float(loss), rel=1e-5)
        for key, each in Step(model).named_parameters():
            assert torch.allclose(parameters[key].grad[number], each.grad, rtol=1e-3, atol=1e-4)
        for key, each in Step(model).named_buffers():  # batch norms have learned from the batch
            assert torch.allclose(buffers[key][number], each, rtol=1e-4, atol=1e-6), key


def test_gradients_of_edges_are_those_of_each_learner_alone(monkeypatch):
    monkeypatch.setattr("catnat.lit_modules.graph.sample_graphs", lambda theta, n: GRAPHS[:n])
    models = [GraphStructureLearner("sigmoid", 6) for _ in range(3)]
    _, parameters, _ = together(models, PAIRS)
    for number, model in enumerate(models):
        model.step_loss(PAIRS).backward()
        for key, each in Step(model).named_parameters():
            assert each.grad.any()
            assert torch.allclose(parameters[key].grad[number], each.grad, rtol=1e-3, atol=1e-6)
