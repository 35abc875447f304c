"""GraphStructureLearner: what it starts from, its gradients, schedules, metrics, resuming."""

import lightning.pytorch as pl
import pytest
import torch
from cases import HEADS
from cases_callbacks import Memory, quiet_trainer
from cases_replay import Watch, cuda, equal, without_cuda  # noqa: F401 - a fixture
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import nn

from catnat.callbacks import Figures, FisherMonitor, LastCheckpoint
from catnat.datamodules import CommunityGraphDataModule
from catnat.graphs import sample_graphs
from catnat.lit_modules import GraphStructureLearner
from catnat.losses import energy_score

ESTIMATORS = ("score_function", "local_expectation")
BOTH = pytest.mark.parametrize("estimator", ESTIMATORS)


def make(head="natural", theta=(0.0, 0.1), **options):
    model = GraphStructureLearner(head, **{"num_nodes": 6, "test_passes": 2} | options)
    if theta != (0.0, 0.1):
        model.edge_scores.data = model.initial_scores(*theta)
    return model


def fit(model, steps=10, callbacks=(), ckpt_path=None, logger=False, **options):
    data = CommunityGraphDataModule(communities=1, num_pairs=200, batch_size=32)
    saving = any(isinstance(callback, Checkpoint) for callback in callbacks)
    options = {"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0} | options
    trainer = quiet_trainer(
        callbacks=list(callbacks), logger=logger, enable_checkpointing=saving, **options
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return trainer, data


def batch(n=6):
    return torch.randn(16, n, 4), torch.randn(16, n, 2)


# -- the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_theta_starts_in_the_range_asked_for(head):
    theta = make(head, num_nodes=24).theta
    assert theta.shape == (24, 24) and not theta.requires_grad
    assert 0 <= theta.min() < 0.01 and 0.09 < theta.max() <= 0.1 + 1e-6
    assert theta.mean() == pytest.approx(0.05, abs=0.004)


def test_learning_rates_follow_head_and_estimator():
    assert make("natural").learning_rates == (0.005, 0.005)
    assert make("natural", estimator="local_expectation").learning_rates == (0.05, 0.05)
    assert make("sigmoid", learning_rate=0.3).learning_rates == (0.3, 0.3)
    assert make("softmax", psi_learning_rate=0.1).learning_rates == (0.0225, 0.1)


def test_wrong_options_are_named():
    for options, reason in (
        ({"estimator": "reinforce"}, "choose from score_function, local_expectation"),
        ({"lr_schedule": "cosine"}, "choose from constant, linear"),
        ({"num_samples": 2}, "num_samples must be at least 3, got 2"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"psi_warmup_steps": -1}, "psi_warmup_steps must be at least 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            make(**options)


@pytest.mark.parametrize(
    "x, y", [((8, 6, 3), (8, 6, 2)), ((8, 5, 4), (8, 5, 2)), ((8, 6, 4), (8, 6, 1))]
)
def test_pairs_of_another_size_are_named(x, y):
    learner = make(num_nodes=6, in_features=4, out_features=2)
    batch = torch.zeros(x), torch.zeros(y)
    with pytest.raises(ValueError, match="do not fit num_nodes 6, in_features 4 and out_features"):
        learner.step_loss(batch)


# -- the loss ------------------------------------------------------------------------------------


@BOTH
def test_the_value_of_the_loss_is_the_clean_score(estimator):
    model, (x, y) = make(estimator=estimator), batch()
    torch.manual_seed(5)
    loss = model.step_loss((x, y))
    torch.manual_seed(5)
    outputs = model.predictor(x, sample_graphs(model.theta, 32))
    wanted = energy_score(outputs.flatten(2), y.flatten(1)).mean()
    assert torch.equal(loss, wanted)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any()


@pytest.mark.parametrize("head", ["natural", "sparsemax", "sigmoid"])
def test_edges_that_are_never_sampled(head):
    """The score function says nothing of them; the local expectation does."""
    for estimator in ESTIMATORS:
        model = make(head, (1e-7, 2e-7), estimator=estimator)
        assert not model.head.saturated(model.edge_scores).any()
        model.step_loss(batch()).backward()
        gradient = model.edge_scores.grad
        assert (gradient == 0).all() if estimator == "score_function" else (gradient != 0).all()


def test_an_edge_that_should_be_there_is_revived():
    """All θ near 0 and psi known: true edges grow and only they."""
    _, data = fit(make(), steps=1)
    model = make(
        theta=(1e-6, 1e-6),
        estimator="local_expectation",
        learning_rate=0.05,
        psi_learning_rate=1e-9,
    )
    model.predictor.load_state_dict({"weight": data.psi})
    fit(model, steps=150)
    true = data.edge_probs > 0
    assert model.theta[true].min() > 0.5
    assert model.theta[~true].max() < 0.2


# -- predictors ----------------------------------------------------------------------------------


def test_a_convolution_of_torch_geometric_learns():
    from torch_geometric.nn import DenseSAGEConv, GATConv

    for conv in (GATConv(4, 2), DenseSAGEConv(4, 2)):
        model = make(predictor=conv)
        model.step_loss(batch()).backward()
        assert model.edge_scores.grad.any()
        assert all(p.grad is not None for p in conv.parameters())
        with pytest.raises(ValueError, match=f"linear in the edges.*{type(conv).__name__}"):
            make(predictor=conv, estimator="local_expectation")


def test_a_predictor_of_ones_own():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x, graphs):
            return torch.einsum("mji,bjd->mbid", graphs, x[..., :2] * self.scale)

    model = make(predictor=Sums())
    model.step_loss(batch()).backward()
    assert model.predictor.scale.grad.any() and model.edge_scores.grad.any()
    assert model.why_host_needed() == "the predictor may wait for the device"


def test_subclasses_may_override_scores_and_loss():
    class Symmetric(GraphStructureLearner):
        def scores(self, batch):
            return self.edge_scores + self.edge_scores.transpose(0, 1)

        def loss(self, batch, q):
            return super().loss(batch, q) + 0.1 * q.probs[..., 1].mean()

    model = Symmetric(num_nodes=6, psi_warmup_steps=2)
    model.edge_scores.data = model.initial_scores(0.5, 0.6)
    before = model.theta
    fit(model, steps=2)
    assert torch.equal(model.theta, before)
    fit(model, steps=6)
    assert torch.allclose(model.theta, model.theta.T) and not torch.equal(model.theta, before)


# -- the run -------------------------------------------------------------------------------------


class Rates(pl.Callback):
    """Remembers the learning rates of each step."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.seen.append(tuple(group["lr"] for group in optimizer.param_groups))


@pytest.mark.parametrize("length", [{"steps": 10}, {"steps": -1, "max_epochs": 2}])
def test_the_linear_schedule_ends_with_the_run(length):
    rates = Rates()
    model = make(lr_schedule="linear", learning_rate=0.1, psi_learning_rate=0.5)
    trainer, _ = fit(model, callbacks=[rates], **length)
    assert trainer.global_step == 10
    wanted = [(0.1 * (1 - k / 10), 0.5 * (1 - k / 10)) for k in range(10)]
    torch.testing.assert_close(torch.tensor(rates.seen), torch.tensor(wanted))


def test_a_linear_schedule_needs_an_end():
    with pytest.raises(ValueError, match="needs max_steps"):
        fit(make(lr_schedule="linear"), steps=-1, max_time="00:00:01:00")


@BOTH
def test_it_learns(estimator):
    model = make(estimator=estimator, learning_rate=0.05)
    trainer, data = fit(model, steps=1)
    (before,) = trainer.test(model, datamodule=data, verbose=False)
    trainer, data = fit(model, steps=150)
    (after,) = trainer.test(model, datamodule=data, verbose=False)
    assert after["test/gap_2x"] < before["test/gap_2x"] / 4
    assert after["test/theta_mae"] < before["test/theta_mae"] / 2


def test_what_is_logged():
    model, curve = make("sparsemax"), Memory()
    with torch.no_grad():
        model.edge_scores[0, 0] = torch.tensor([3.0, -3.0])
    monitor = FisherMonitor()
    trainer, data = fit(
        model,
        steps=2,
        callbacks=[monitor, Figures()],
        logger=curve,
        val_check_interval=2,
        limit_val_batches=1.0,
        check_val_every_n_epoch=None,
    )
    assert list(curve.series("train/loss")) == [0, 1]
    assert set(monitor.latest) >= {"fim/off_diagonal_mass", "fim/saturated"}
    common = {
        "energy_score",
        "energy_score_2x",
        "pp_mae",
        "pp_mse",
        "saturated",
        "theta_mae",
        "dead_edges",
        "calibration",
    }
    logged = {name for row in curve.rows.values() for name in row}
    assert logged >= {f"val/{name}" for name in (*common, "loss")}
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    assert tested.keys() == {f"test/{name}" for name in (*common, "gap_2x")}
    assert tested["test/energy_score_2x"] == pytest.approx(2 * tested["test/energy_score"])
    gap = tested["test/energy_score_2x"] - data.optimal["energy_score_2x"]
    assert tested["test/gap_2x"] == pytest.approx(gap, abs=1e-5)
    assert tested["test/dead_edges"] == 1 and tested["test/saturated"] >= 1 / 36
    wanted = (model.theta - data.edge_probs).abs().mean()
    assert tested["test/theta_mae"] == pytest.approx(wanted.item(), abs=1e-6)


@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_a_resumed_run_ends_at_the_same_parameters(tmp_path, step):
    def new(seed):
        pl.seed_everything(seed, verbose=False)
        return make(estimator="local_expectation", lr_schedule="linear", psi_warmup_steps=3)

    save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    random_states = LastCheckpoint(tmp_path)
    straight = new(1)
    fit(straight, callbacks=[save, random_states], limit_val_batches=1.0)
    resumed = new(99)
    path = tmp_path / f"step={step}.ckpt"
    trainer, _ = fit(resumed, callbacks=[random_states], ckpt_path=path)
    assert trainer.global_step == 10 and equal(straight, resumed)
    loaded = GraphStructureLearner.load_from_checkpoint(tmp_path / "step=10.ckpt")
    assert loaded.hparams == straight.hparams and equal(loaded, straight)


@pytest.mark.parametrize(
    ("length", "estimator", "accelerator"),
    [
        ({"steps": 23}, "local_expectation", "cpu"),
        ({"steps": -1, "max_epochs": 5}, "local_expectation", "cpu"),
        *(pytest.param({"steps": 60}, estimator, "gpu", marks=cuda) for estimator in ESTIMATORS),
    ],
)
def test_replayed_steps_are_the_same_steps(length, estimator, accelerator, request):
    """Several steps a batch, learning rates as tensors: on the CPU without the graphs."""
    if accelerator == "cpu":
        request.getfixturevalue("without_cuda")
    options = {"lr_schedule": "linear", "psi_warmup_steps": 3, "estimator": estimator}
    models = []
    for capture in (False, None):
        pl.seed_everything(1, verbose=False)
        models.append(make(capture=capture, **options))
        watch = Watch()
        fit(models[-1], callbacks=[watch], accelerator=accelerator, **length)
        assert watch.replayed is (capture is None)
    one, many = models
    near = 1e-5 if accelerator == "cpu" else 1e-3  # a rate as a float32 tensor rounds
    torch.testing.assert_close([*one.parameters()], [*many.parameters()], atol=near, rtol=1e-5)
    assert isinstance(many.optimizers().param_groups[0]["lr"], torch.Tensor)
