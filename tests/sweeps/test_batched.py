"""Many models trained as one: the same steps as tensor model alone, whatever the model."""

import copy
import dataclasses
import inspect
import json
import re
import warnings

import pytest
import torch
from cases_sweep import run_sweep, write_plan
from lightning.pytorch import LightningDataModule, Trainer
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from catnat import make_head
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE
from catnat.lit_modules.step_module import StepModule
from catnat.sweeps import batched, runs
from catnat.sweeps.compare import rows_of

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
cuda = pytest.mark.gpu


class Points(LightningDataModule):
    """Twelve points with labels, in a fixed order."""

    def __init__(self, scale=1.0):
        super().__init__()
        noise = torch.Generator().manual_seed(0)
        x = scale * torch.randn(12, 5, generator=noise)
        self.points = TensorDataset(x, torch.arange(12) % 4)

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=4)

    def val_dataloader(self):
        return DataLoader(self.points, batch_size=12)

    test_dataloader = val_dataloader


class Classifier(StepModule):
    """A model of a user: two layers, a batch norm, a head, a decaying learning rate."""

    def __init__(self, learning_rate, optimizer="Adam", clip=0.0):
        super().__init__(gradient_clip=clip)
        self.head = make_head("natural", 4)
        # No bias before the batch norm: its gradient is 0 but for rounding, which Adam would scale.
        first = nn.Linear(5, 6, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.learning_rate, self.optimizer = learning_rate, optimizer

    def step_loss(self, batch):
        x, label = batch
        return -self.head(self.layers(x) * self.frozen).log_prob(label).mean()

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        options = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        kind = getattr(torch.optim, self.optimizer)
        optimizer = self.make_optimizer(kind, parameters, lr=self.learning_rate, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        plan = {"scheduler": scheduler, "interval": "step"}
        if self.optimizer == "SGD":
            return [optimizer], [plan]
        return {"optimizer": optimizer, "lr_scheduler": plan}

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.step_loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.step_loss(batch))


def classifier(seed, rate, scale=1.0, accelerator="cpu", **options):
    torch.manual_seed(seed)
    trainer = {"max_steps": 7, "val_check_interval": 3, "accelerator": accelerator}
    model, data = Classifier(rate, **options), Points(scale)
    return batched.Member(model, data, seed, trainer, str((options, trainer)), str(scale))


def alone(one):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {name: one.options[name] for name in ("max_steps", "accelerator")}
        Trainer(**options, enable_checkpointing=False, **QUIET).fit(one.model, datamodule=one.data)
    return one.model


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "AdamW"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=cuda)])
def test_models_learn_what_each_would_learn_alone(optimizer, clip, accelerator, capsys):
    def members():
        settings = [(1, 0.1, 1.0), (2, 0.02, 1.0), (3, 0.1, 2.0)]
        return [classifier(*x, accelerator, optimizer=optimizer, clip=clip) for x in settings]

    # On CUDA a batched product rounds in another way than one of a single model.
    near = 1e-5 if accelerator == "cpu" else 1e-3
    together = members()
    batched.Group(together).train()
    assert re.findall(r"3 models: step (\d) of 7", capsys.readouterr().out) == ["3", "6", "7"]
    for one, other in zip(together, members(), strict=True):
        expected, is_now = alone(other).state_dict(), one.model.state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(is_now[name], value, rtol=10 * near, atol=near, msg=name)
        assert one.metrics["val/loss"] == pytest.approx(one.metrics["test/loss"])
        assert one.metrics["fim/off_diagonal_mass"] < 0.4 and "fim/saturated" in one.metrics


def test_groups_have_equal_options_and_at_most_so_many_models():
    members = [classifier(seed, rate) for seed in (1, 2) for rate in (0.1, 0.2)]
    members.append(classifier(1, 0.1, clip=1.0))
    assert [len(group) for group in batched.groups(members, 3)] == [3, 1, 1]


@pytest.mark.parametrize(
    "option",
    [
        "accumulate_grad_batches=2",
        "precision=64-true",
        "max_epochs=1",
        "limit_val_batches=1",
        "trainer.callbacks+=Timer",
    ],
)
def test_what_a_group_would_not_do_is_refused(option, monkeypatch):
    options = inspect.unwrap(Trainer.__init__).__annotations__
    for name in [name for name in options if name.startswith("limit_")]:
        monkeypatch.setitem(options, name, float | int | None)  # as typing's cache may leave it
    with pytest.raises(ValueError, match=f"takes no {option.split('.')[-1][:8]}"):
        batched.build(["--model=vae", "--max_steps=2", f"--{option}"])
    one = classifier(1, 0.1, optimizer="SGD")
    optimizers, (plan,) = one.model.configure_optimizers()
    one.model.configure_optimizers = lambda: (optimizers, [plan["scheduler"]])  # by epochs
    with pytest.raises(ValueError, match="Classifier may have one optimizer, and schedulers"):
        batched.Group([one])


def test_a_run_leaves_what_one_of_its_own_leaves(tmp_path):
    words = ["--model=vae", "--head=sigmoid", "--max_steps=2", "--val_check_interval=2"]
    options = batched.build(words).config_text
    one = dataclasses.replace(classifier(1, 0.1), folder=tmp_path, config_text=options)
    one.data.save_hyperparameters({"source": "files"})
    batched.Group([one]).train()
    assert one.metrics["data_source"] == "files"
    folder = tmp_path / "version_0"
    assert json.loads((folder / "metrics.json").read_text()) == one.metrics
    assert list(folder.glob("events.*")) and list(folder.glob("**/final.ckpt"))
    (row,) = rows_of(folder)  # for catnat compare
    assert row["head"] == "sigmoid" and row["test/loss"] == one.metrics["test/loss"]


def test_a_group_that_is_killed_and_restarted_writes_each_value_once(tmp_path, monkeypatch):
    words = ["--model=vae", "--head=sigmoid", "--max_steps=2", "--val_check_interval=2"]
    options = batched.build(words).config_text

    def group():
        one = dataclasses.replace(classifier(1, 0.1), folder=tmp_path, config_text=options)
        return batched.Group([one])

    killed = group()
    monkeypatch.setattr(killed, "_test", lambda member: 1 / 0)  # after all validations
    with pytest.raises(ZeroDivisionError):
        killed.train()
    group().train()
    for folder in ("version_0", "version_1"):
        steps = [
            event.step
            for path in (tmp_path / folder).glob("events.*")
            for event in EventFileLoader(str(path)).Load()
            for value in event.summary.value
            if value.tag == "train/loss"
        ]
        assert steps == [3, 6, 7]
    (tmp_path / "log.txt").touch()
    assert [row["folder"] for row in rows_of(tmp_path)] == [str(tmp_path / "version_1")]


def test_a_sweep_keeps_the_rows_of_a_group_whose_metrics_are_not_those_of_the_plan(
    tmp_path, monkeypatch
):
    def build(words, folder):
        return dataclasses.replace(classifier(1, 0.1), folder=folder)

    monkeypatch.setattr(batched, "build", build)
    keys = {"program": None, "model": "vae", "grid": {"head": ["natural"]}}
    path = write_plan(tmp_path, **keys, metrics={"test/los": {}})
    assert run_sweep(path, "--engine", "batched") == 2
    assert len(runs.read(tmp_path / "results" / "tiny" / "runs.csv")) == 2


def test_a_model_that_diverges_fails_alone():
    members = [classifier(1, 0.1), classifier(2, 1e30)]
    members[1].model.layers[0].weight.data.fill_(torch.nan)
    batched.Group(members).train()
    assert members[0].metrics and not members[0].failure
    assert not members[1].metrics and members[1].failure


# -- our models, a step as one ---------------------------------------------------------------------


IMAGES = torch.rand(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
PAIRS = (torch.randn(5, 6, 4), torch.randn(5, 6, 2))
GRAPHS = (torch.rand(32, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.3).float()
MODELS = {
    "vae": (DiscreteVAE, (3, 4), {}, IMAGES),
    "gumbel-rao": (DiscreteVAE, (3, 4), {"estimator": "gumbel-rao", "num_draws": 3}, IMAGES),
    "kl-weight": (DiscreteVAE, (3, 4), {"kl_start": 0.5, "kl_steps": 4}, IMAGES),
    "mlp-vae": (MLPDiscreteVAE, (3, 4), {}, IMAGES),
    "leave-one": (MLPDiscreteVAE, (3, 4), {"baseline": "leave-one-out", "num_samples": 3}, IMAGES),
    "gsl": (GraphStructureLearner, (6,), {}, PAIRS),
    "gsl, local": (GraphStructureLearner, (6,), {"estimator": "local_expectation"}, PAIRS),
}


@pytest.mark.parametrize("head", ["softmax", "sparsemax", "sigmoid", "natural"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_all_needs_no_loop_over_the_models(name, head):
    kind, sizes, options, batch = MODELS[name]
    models = [kind(head, *sizes, **options) for _ in range(2)]
    stack = batched.Stack(models, torch.device("cpu"), 10)
    before = {name: tensor.detach().clone() for name, tensor in stack.parameters.items()}
    torch._C._functorch._set_vmap_fallback_warning_enabled(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stack.prepare_step(0)
            losses = stack.step(batch, one_batch=True)
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)
    assert losses.shape == (2,) and losses.isfinite().all() and losses[0] != losses[1]
    assert all((tensor != before[name]).any() for name, tensor in stack.parameters.items())
    counted = [tensor for key, tensor in stack.buffers.items() if "num_batches" in key]
    assert all(tensor.tolist() == [1, 1] for tensor in counted) and len(counted) in (0, 3)


def test_a_kl_weight_with_a_schedule_is_that_of_each_step():
    """Stacked weights, as the step reads them, are those of each model alone."""
    models = [DiscreteVAE("sigmoid", 3, 4, kl_start=w, kl_steps=2, kl_weight=2.0) for w in (0, 1)]
    twins = copy.deepcopy(models)
    stack = batched.Stack(models, torch.device("cpu"), 10)
    for step, weights in enumerate([(0.0, 1.0), (1.0, 1.5), (2.0, 2.0), (2.0, 2.0)]):
        stack.prepare_step(step)
        stacked = stack.buffers["model.kl_weight.tensor"]
        torch.testing.assert_close(stacked, torch.tensor(weights))
        for twin, weight in zip(twins, weights, strict=True):
            twin.prepare_step(step)
            assert float(twin.kl_weight) == weight == twin.kl_weight()
        stack.step(IMAGES, one_batch=True)


class Smooth(DiscreteVAE):
    """Without noise."""

    def loss(self, batch, q):
        return (self.reconstruction(batch, q.probs) + self.kl(q)).mean()


@pytest.mark.parametrize("kind", [Smooth, GraphStructureLearner])
def test_gradients_and_batch_norms_are_those_of_each_model_alone(kind, monkeypatch):
    monkeypatch.setattr("catnat.lit_modules.graph.sample_graphs", lambda theta, n: GRAPHS[:n])
    options, batch, atol = ((3, 4), IMAGES, 1e-4) if kind is Smooth else ((6,), PAIRS, 1e-6)
    models = [kind("sigmoid", *options) for _ in range(3)]
    for model in models:
        model.gradient_clip = 0
    alone = copy.deepcopy(models)
    stack = batched.Stack(models, torch.device("cpu"), 10)
    losses = stack.step(batch, one_batch=True)
    for loss, ours, theirs in zip(losses, models, alone, strict=True):
        expected = theirs.step_loss(batch)
        expected.backward()
        assert loss == pytest.approx(float(expected), rel=1e-5)
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert other.grad.any()
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=atol, msg=name)
        for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
