"""The studies of photographs, codebooks and certainty, and the plans that use earlier rows."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases_callbacks import quiet_trainer
from PIL import Image
from torch.utils.data import DataLoader

from catnat.lit_modules import DiscreteVAE
from catnat.sweeps.stack import Stack
from catnat.sweeps.sweep import Sweep
from catnat.sweeps.words import plan_parser

PAPER = Path(__file__).parents[2] / "paper"


@pytest.fixture
def study(monkeypatch):
    """Import modules of studies by the name of their folder and file."""

    def load(folder, name):
        monkeypatch.syspath_prepend(PAPER / folder)
        return importlib.import_module(name)

    return load


def test_the_edge_of_the_rates_uses_the_rows_of_the_four_rates():
    words = [str(PAPER / "plans" / "estimators_main.yaml"), "--scale", "edge"]
    sweep = Sweep.load(words[0], plan_parser("sweep", "").parse_args(words))
    rows = sweep.rows()
    searches = [run for run in sweep.plan.runs(rows) if run.stage == "search"]
    new = [run.options["learning_rate"] for run in searches if rows.get(run) is None]
    assert len(searches) == 10 and set(new) <= {0.00025}


# -- photographs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("log_scale", [-7.0, -4.0, 0.0, 4.0])
@pytest.mark.parametrize("location", [-0.3, 0.0, 0.5, 0.9999, 1.4])
def test_the_256_probabilities_of_a_value_add_up_to_one(study, location, log_scale):
    x = torch.arange(256, dtype=torch.float64) / 255
    parameters = torch.tensor([location, log_scale], dtype=torch.float64)
    log_p = -study("photographs", "photographs").logistic_nll(x, *parameters)
    assert float(log_p.exp().sum()) == pytest.approx(1, abs=1e-12)
    inside = (x > 0) & (x < 1)
    scale = parameters[1].exp()
    edges = ((x - location + torch.tensor([[-1.0], [1.0]]) / 510) / scale).sigmoid()
    assert torch.allclose(log_p.exp()[inside], (edges[1] - edges[0])[inside], atol=1e-12)


@pytest.fixture
def photographs_root(study, tmp_path, monkeypatch):
    """A folder with photographs.npz of photographs that have one color each."""
    program = study("photographs", "make_photographs")
    names = []
    for number in range(40):
        size = (400, 200) if number % 2 else (170, 260)  # width and height
        names.append(f"{number}.png")
        Image.new("RGB", size, (6 * number, 255 - number, number)).save(tmp_path / names[-1])
    lines = [" ".join(names[:12]), *(" ".join(names[i : i + 2]) for i in range(12, 40, 2))]
    (tmp_path / "listed.txt").write_text("\n".join(lines) + "\n")
    words = [str(tmp_path), str(tmp_path / "photographs.npz")]
    words += ["--listed", str(tmp_path / "listed.txt")]
    monkeypatch.setattr(sys, "argv", ["make_photographs.py", *words])
    program.main()
    return tmp_path


def test_photographs_of_one_line_are_in_one_part_and_crops_stay_in_a_photograph(
    study, photographs_root
):
    data = study("photographs", "photographs").Photographs(str(photographs_root), batch_size=7)
    data.setup()
    colors = {part: set(pixels[:, 2].tolist()) for part, pixels in data.pixels.items()}
    assert sum(map(len, colors.values())) == 40  # and no photograph is in two parts
    assert len(set().union(*colors.values())) == 40
    assert set(range(12)) <= colors["train"] and len(colors["val"]) == len(colors["test"]) == 4
    for part, seen in colors.items():
        assert all({number ^ 1} <= seen for number in seen)  # lines have two neighbors
        crops = torch.cat(list(data.make_loader(part, torch.device("cpu"))))
        assert set((255 * crops[:, 2, 0, 0]).round().int().tolist()) == seen
    for crops in data.train_dataloader():
        assert crops.shape == (7, 3, 64, 64)
        assert torch.equal(crops.amin((2, 3)), crops.amax((2, 3)))  # of one photograph


def test_pixels_are_restored_and_training_crops_follow_from_the_seed(study):
    module = study("photographs", "photographs")
    program = study("photographs", "make_photographs")
    rng = np.random.default_rng(0)
    photographs = [rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((70, 100), (130, 64))]
    pixels = module.restored(program.differences(photographs))
    assert np.array_equal(pixels[:7000].reshape(70, 100, 3), photographs[0])
    cells = torch.from_numpy(module.cells(np.array([[70, 100], [130, 64]], np.int32)))
    assert cells.tolist() == [[0, 70, 100, 0, 0], [7000, 130, 64, 0, 0], [7000, 130, 64, 64, 0]]
    still = module.CropLoader(torch.from_numpy(pixels), cells, 3)
    (crops,) = still
    assert np.array_equal((255 * crops[2]).byte().permute(1, 2, 0), photographs[1][64:128])
    moving = [module.CropLoader(still.pixels, cells, 3, shuffle=True, seed=s) for s in (1, 1, 2)]
    first, again, other = (torch.cat([*loader, *loader]) for loader in moving)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[:3].sum((1, 2, 3)).sort()[0], first[3:].sum((1, 2, 3)).sort()[0])


OPTIONS = {"num_latents": 64, "num_categories": 4, "nll_samples": 2}


def test_a_photograph_vae_reports_bits_and_psnr(study):
    module = study("photographs", "photographs")
    torch.manual_seed(0)
    model = module.PhotographVAE(head="softmax", **OPTIONS)
    images = torch.randint(0, 256, (4, 3, 64, 64)) / 255
    (metrics,) = quiet_trainer().test(model, DataLoader(images, 3), verbose=False)
    nats = -metrics["test/elbo"]
    assert metrics["test/bits"] == pytest.approx(nats / (12288 * np.log(2)), rel=1e-5)
    assert 1 <= metrics["test/pooled_perplexity"] <= 4
    saved = 64 * np.log(4 / metrics["test/pooled_perplexity"]) / (12288 * np.log(2))
    assert metrics["test/bits_fitted"] == pytest.approx(metrics["test/bits"] - saved, abs=1e-5)
    model.eval()
    error = (images - model.reconstruct(images)).square().mean((1, 2, 3))
    assert metrics["test/psnr"] == pytest.approx(float(-10 * error.log10().mean()), abs=1e-3)
    z = model(images).one_hot_sample((2,))
    each = torch.stack([model.reconstruction(images, part) for part in z])
    assert torch.allclose(model.reconstruction(images, z), each, rtol=1e-4)
    with pytest.raises(ValueError, match="num_latents must be 64"):
        module.PhotographVAE(num_latents=10)


@pytest.mark.parametrize("estimator", ["gumbel", "gumbel-rao", "reinmax"])
def test_photograph_vaes_are_trained_as_one(study, estimator):
    module = study("photographs", "photographs")
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(module.PhotographVAE(head="sigmoid", estimator=estimator, **OPTIONS))
    before = [model.decoder[1].weight.clone() for model in models]
    stack = Stack(models, torch.device("cpu"), 1)
    losses = stack.step(torch.rand(2, 3, 64, 64), one_batch=True)
    assert losses.isfinite().all() and losses[0] != losses[1]
    for model, weights in zip(models, before, strict=True):
        assert not torch.equal(model.decoder[1].weight, weights)


def test_a_quantized_autoencoder_reports_what_the_vae_does(study, monkeypatch):
    module = study("photographs", "quantized")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "vector_quantize_pytorch", None)
        with pytest.raises(ValueError, match="pip install vector-quantize-pytorch"):
            module.QuantizedAutoencoder("vq", 512)
    pytest.importorskip("vector_quantize_pytorch")
    images = torch.rand(3, 3, 64, 64)
    for kind, size in (("vq", 512), ("fsq", 8192)):
        model = module.QuantizedAutoencoder(kind, size)
        assert model.step_loss(images).isfinite()
        (metrics,) = quiet_trainer().test(model, DataLoader(images, 2), verbose=False)
        assert metrics["test/kl"] == pytest.approx(64 * np.log(size if size == 512 else 8000))
        assert metrics["test/bits_fitted"] < metrics["test/bits"]
        assert 1 <= metrics["test/pooled_perplexity"] <= 192 and metrics["test/psnr"] > 0


# -- codebook --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [True, False])
def test_positions_share_a_layer_or_have_one_each(study, is_shared):
    layer = study("codebook", "codebook").PositionLinear(5, 3, is_shared)
    x = torch.randn(2, 49, 5)
    for position, y in enumerate(layer(x).unbind(1)):
        place = 0 if is_shared else position
        wanted = x[:, position] @ layer.weight[place] + layer.bias[place]
        assert torch.allclose(y, wanted, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_a_codebook_vae_reports_the_use_of_all_positions_together(study, shared):
    model = study("codebook", "codebook").CodebookVAE(
        shared=shared, head="sigmoid", num_latents=49, num_categories=4, nll_samples=2
    )
    images = torch.rand(4, 1, 28, 28)
    model.step_loss(images).backward()
    assert all(weight.grad is not None for weight in model.parameters())
    (metrics,) = quiet_trainer().test(model, DataLoader(images, 3), verbose=False)
    use = model(images).probs.mean((0, 1))
    perplexity = torch.special.entr(use).sum().exp()
    assert metrics["test/pooled_perplexity"] == pytest.approx(float(perplexity), rel=1e-4)
    with pytest.raises(ValueError, match="num_latents must be 49"):
        model.__class__(num_latents=10)


# -- certainty -------------------------------------------------------------------------------------


@pytest.fixture
def curves(tmp_path):
    """A file of curves, of two runs of sigmoid and one with a controller."""
    path = tmp_path / "curves.csv"
    rows = ["sigmoid,,500,600,4", "sigmoid,,500,602,6", "sigmoid,,1000,500,7"]
    rows += ["sigmoid,,1500,510,8", "sigmoid,,2000,400,11", "sigmoid,softmax,500,300,30"]
    path.write_text("\n".join(["head,like,step,val/loss,val/kl", *rows]) + "\n")
    return str(path)


def test_the_controller_moves_the_weight_to_the_kl_of_the_other_head(study, curves):
    module = study("mechanism", "certain_vae")
    options = {"head": "softmax", "num_latents": 2, "num_categories": 4, "estimator": "reinmax"}
    model = module.CertainVAE("sigmoid", 10, curves, **options)
    losses = torch.tensor([700.0, 601.0, 550.5, 500.0, 425.0, 300.0])
    expected = [5, 5, 6, 7, 10, 11]
    assert [float(model.expected_kl(x)) for x in losses] == pytest.approx(expected)
    for kl, sign in ((20.0, 1), (5.0, -1)):
        model.recent.zero_()
        model.held_weight.fill_(1.0)
        model._adapt(torch.tensor(500.0), torch.tensor(kl))
        change = 0.005 * np.log(kl / 7)
        assert float(model.held_weight.log()) == pytest.approx(change, rel=1e-3)
        assert np.sign(change) == sign
    model.recent.zero_()
    model.held_weight.fill_(1.0)
    model._adapt(torch.tensor(650.0), torch.tensor(20.0))  # before the curve begins
    assert float(model.held_weight) == 1
    with pytest.raises(ValueError, match="has no curve of head natural"):
        module.CertainVAE("natural", 10, curves, **options)


def test_held_models_are_trained_as_one_and_let_go(study, curves):
    module = study("mechanism", "certain_vae")
    options = {"head": "softmax", "num_latents": 2, "num_categories": 4, "estimator": "reinmax"}
    models = [module.CertainVAE("sigmoid", 3, curves, **options) for _ in range(2)]
    stack = Stack(models, torch.device("cpu"), 4)
    images = torch.rand(4, 1, 28, 28)
    for step in range(3):
        stack.prepare_step(step)
        stack.step(images, one_batch=True)
    weights = stack.buffers["model.held_weight"]
    assert weights[0] != weights[1] and (weights != 1).all()
    assert models[0].logged_settings()["train/held_weight"] == float(weights[0])
    torch.manual_seed(0)
    kl = models[0].kl(models[0](images)).mean()
    losses = []
    for step in (2, 3):
        models[0].held_weight.fill_(2.0)
        models[0].prepare_step(step)
        torch.manual_seed(1)
        losses.append(models[0].step_loss(images))
    assert float(losses[0] - losses[1]) == pytest.approx(float(kl), rel=0.05)


def test_certainty_is_recorded_in_validations(study):
    module = study("mechanism", "certain_vae")
    torch.manual_seed(0)
    options = {"head": "sigmoid", "num_latents": 2, "num_categories": 4, "nll_samples": 2}
    model = module.CertainVAE(estimator="reinmax", **options)
    with torch.no_grad():
        model.encoder[-1].weight *= 40
    loader = DataLoader(torch.rand(8, 1, 28, 28), 5)
    trainer = quiet_trainer()
    (validated,) = trainer.validate(model, loader, verbose=False)
    (tested,) = trainer.test(model, loader, verbose=False)
    assert isinstance(model, DiscreteVAE)
    assert validated["val/information"] == pytest.approx(tested["test/information"], rel=1e-4)
    q = model.eval()(loader.dataset).probs
    assert validated["val/largest"] == pytest.approx(float(q.amax(-1).mean()), rel=1e-4)
