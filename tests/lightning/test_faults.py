"""What does not fit a model, or is NaN, is one line before the first step."""

import math

import pytest
import torch
from cases_callbacks import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE

pytestmark = pytest.mark.filterwarnings("ignore")
IMAGES = torch.rand(8, 1, 28, 28)
PAIRS = (torch.rand(8, 24, 4), torch.rand(8, 24, 2))
MODELS = {
    DiscreteVAE: [IMAGES],
    MLPDiscreteVAE: [IMAGES],
    GraphStructureLearner: PAIRS,
}


def loader(tensors):
    return DataLoader(TensorDataset(*tensors), batch_size=8)


@pytest.mark.parametrize("has_validation", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_nan_scores_end_a_run_before_its_first_step(kind, has_validation):
    class Broken(kind):
        def scores(self, batch):
            return super().scores(batch) * math.nan

    model = Broken()
    before = {name: x.clone() for name, x in model.named_parameters()}
    validation = loader(MODELS[kind]) if has_validation else None
    said = r"^Broken.scores\(\) returned nan; the parameters and the batch are finite"
    with pytest.raises(FloatingPointError, match=said):
        quiet_trainer(max_steps=2).fit(model, loader(MODELS[kind]), validation)
    assert all(torch.equal(before[name], x) for name, x in model.named_parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_the_parameter_that_is_nan_is_named(kind):
    model = kind()
    name, parameter = next(iter(model.named_parameters()))
    with torch.no_grad():
        parameter.fill_(math.nan)
    said = f"scores\\(\\) returned nan: the parameter {name} is not finite"
    for run in (quiet_trainer(max_steps=2).fit, quiet_trainer().test):
        with pytest.raises(FloatingPointError, match=said):
            run(model, loader(MODELS[kind]))


def test_a_batch_that_is_nan_is_named():
    class FromBatch(GraphStructureLearner):
        def scores(self, batch):
            return self.edge_scores + batch[0].mean()

    x, y = PAIRS
    with pytest.raises(FloatingPointError, match="the batch has values that are not finite"):
        quiet_trainer(max_steps=2).fit(FromBatch(), loader((x / 0 * 0, y)))


@pytest.mark.parametrize("kind", [DiscreteVAE, MLPDiscreteVAE])
@pytest.mark.parametrize("shape", [(8, 3, 28, 28), (8, 1, 32, 32), (8, 28, 28)])
def test_images_that_the_default_networks_do_not_take_get_a_hint(kind, shape):
    said = r"take images \(B, 1, 28, 28\), got .*override make_networks\(\)"
    with pytest.raises(ValueError, match=said):
        quiet_trainer(max_steps=2).fit(kind(), loader([torch.rand(shape)]))


def test_own_networks_take_color():
    class Color(DiscreteVAE):
        def make_networks(self, num_scores, num_inputs):
            encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, num_scores))
            decoder = nn.Sequential(nn.Linear(num_inputs, 3 * 64), nn.Unflatten(1, (3, 8, 8)))
            return encoder, decoder

    model = Color()
    run = quiet_trainer(max_steps=2)
    run.fit(model, loader([torch.rand(8, 3, 8, 8)]))
    assert run.global_step == 2


def test_a_batch_that_is_a_dictionary_is_refused():
    vae = DiscreteVAE()
    with pytest.raises(ValueError, match=r"got dict with image, label: override images\(\)"):
        vae({"image": IMAGES, "label": torch.zeros(8)})


def test_an_encoder_with_the_wrong_number_of_scores_is_named():
    class Wide(DiscreteVAE):
        def make_networks(self, num_scores, num_inputs):
            _, decoder = super().make_networks(num_scores, num_inputs)
            return nn.Sequential(nn.Flatten(), nn.Linear(784, num_scores + 1)), decoder

    said = r"must return 70 scores .*10 latents with 7 scores\), got shape \(8, 71\)"
    with pytest.raises(ValueError, match=said):
        Wide(num_latents=10, num_categories=8)(IMAGES)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_an_optimizer_or_scheduler_must_be_a_function(kind, name):
    with pytest.raises(ValueError, match=f"{name} must be a class or a function, .* got 'SGD'"):
        kind(**{name: "SGD"})
