"""What users change in the models: how they optimize, what scores read, precision, strategies."""

import copy
import pickle

import pytest
import torch
from cases_callbacks import Memory, quiet_trainer
from cases_replay import Watch, without_cuda  # noqa: F401 - a fixture

from catnat.callbacks import FisherMonitor
from catnat.callbacks.images import Figures
from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE

pytestmark = pytest.mark.filterwarnings("ignore")


def images(data):
    return MNISTDataModule(str(data), batch_size=10, download=False)


def pairs():
    return CommunityGraphDataModule(communities=1, num_pairs=60, batch_size=8)


def small(kind, data):
    """A model of a kind, small and quick to test, and data for it."""
    if issubclass(kind, GraphStructureLearner):
        return kind(num_nodes=6, test_passes=1), pairs()
    return kind(num_latents=2, num_categories=3, nll_samples=2), images(data)


def make_trainer(steps=3, **options):
    return quiet_trainer(max_steps=steps, max_epochs=-1, **options)


def assert_trains_and_tests(trainer, model, data):
    trainer.fit(model, datamodule=data)
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    assert all(torch.tensor(value).isfinite() for value in tested.values())


# -- optimizing by hand --------------------------------------------------------------------------


class ByHand:
    """Mixed into a model: two optimizer steps on each batch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False
        self.stepped = 0

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.step_loss(batch))
            optimizer.step()
            self.stepped += 1


class VAEByHand(ByHand, DiscreteVAE):
    pass


class GraphByHand(ByHand, GraphStructureLearner):
    pass


@pytest.mark.parametrize("kind", [VAEByHand, GraphByHand])
def test_a_subclass_may_optimize_by_hand(without_cuda, kind, data):  # noqa: F811
    """Also where other models would be replayed, twice in a row, and while it is monitored."""
    (model, batches), curve = small(kind, data), Memory()
    for runs in (1, 2):
        trainer = make_trainer(4, logger=curve, callbacks=[FisherMonitor()])
        trainer.fit(model, datamodule=batches)
        assert (trainer.global_step, model.stepped) == (4, 4 * runs)
        assert not model.automatic_optimization and not model.replays
    assert list(curve.series("fim/saturated")) == [0, 2]  # the first step of each batch


def test_a_subclass_that_optimizes_by_hand_is_told_why_it_is_not_replayed(
    without_cuda,  # noqa: F811
    data,
):
    with pytest.warns(UserWarning, match="automatic_optimization is False"):
        make_trainer(2).fit(VAEByHand(capture=True), datamodule=images(data))


def test_a_model_without_a_training_step_cannot_optimize_by_hand(data):
    model = DiscreteVAE(num_latents=2, num_categories=3)
    model.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic_optimization"):  # it would never end
        make_trainer(2).fit(model, datamodule=images(data))


def test_a_model_that_was_replayed_may_be_trained_without_that(without_cuda, data):  # noqa: F811
    model = DiscreteVAE(num_latents=2, num_categories=3)
    for capture in (True, False):
        model.capture, watch = capture, Watch()
        make_trainer(4, callbacks=[watch]).fit(model, datamodule=images(data))
        assert watch.replayed is capture
        assert not model.replays and model.automatic_optimization


# -- optimizers of the user's --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adam])
def test_resuming_leaves_the_optimizer_of_a_subclass_alone(kind, data, tmp_path):
    class OwnOptimizer(DiscreteVAE):
        def configure_optimizers(self):
            return kind(self.parameters(), lr=1e-3, foreach=False)

    trainer = make_trainer(2)
    trainer.fit(OwnOptimizer(), datamodule=images(data))
    before = trainer.optimizers[0].param_groups[0]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer = make_trainer(3)
    trainer.fit(OwnOptimizer(), datamodule=images(data), ckpt_path=tmp_path / "a.ckpt")
    after = trainer.optimizers[0].param_groups[0]
    assert {**after, "params": 0} == {**before, "params": 0}
    assert after.get("fused") is None


def test_our_optimizers_keep_the_kernels_of_their_device_when_they_resume(data, tmp_path):
    trainer = make_trainer(2)
    trainer.fit(DiscreteVAE(), datamodule=images(data))
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    for group in saved["optimizer_states"][0]["param_groups"]:
        group |= {"fused": None, "capturable": True}  # as in a run on another kind of device
    torch.save(saved, path)
    trainer = make_trainer(3)
    trainer.fit(DiscreteVAE(), datamodule=images(data), ckpt_path=path)
    group = trainer.optimizers[0].param_groups[0]
    assert group["fused"] is True and group["capturable"] is False
    assert trainer.global_step == 3


# -- scores that read the batch --------------------------------------------------------------------


class ReadsTheBatch(GraphStructureLearner):
    """The graph depends on the mean of x."""

    def scores(self, batch):
        x, _ = batch
        return self.edge_scores + 0.1 * x.mean()


def test_scores_of_edges_may_read_the_batch():
    model, curve, data = ReadsTheBatch(num_nodes=6, test_passes=1), Memory(), pairs()
    trainer = make_trainer(
        4,
        logger=curve,
        callbacks=[FisherMonitor(), Figures()],
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    assert_trains_and_tests(trainer, model, data)
    assert list(curve.series("val/loss")) == [1, 3]


def test_theta_metrics_are_those_of_the_mean_over_all_pairs():
    model, data = ReadsTheBatch("sigmoid", num_nodes=6, test_passes=1), pairs()
    data.prepare_data()
    data.setup()
    x, y = data.parts["test"]
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    data.test_dataloader = lambda: torch.utils.data.DataLoader(batches, batch_size=None)
    (tested,) = make_trainer().test(model, datamodule=data, verbose=False)
    with torch.no_grad():
        thetas = [model.head.probs(model.scores(batch))[..., 1] for batch in batches]
    theta = (5 * thetas[0] + thetas[1]) / 6
    assert not torch.allclose(*thetas)
    wanted = (theta - data.edge_probs).abs().mean().item()
    assert tested["test/theta_mae"] == pytest.approx(wanted, abs=1e-6)


# -- a validation_step of one's own ----------------------------------------------------------------


@pytest.mark.parametrize("kind", [DiscreteVAE, GraphStructureLearner])
def test_a_subclass_may_validate_in_its_own_way(kind, data):
    class Own(kind):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", 7.0)

        def test_step(self, batch, batch_idx):
            self.log("test/mine", 8.0)

    model, data = small(Own, data)
    trainer = make_trainer(2, val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val/loss"] == 7
    assert trainer.test(model, datamodule=data, verbose=False) == [{"test/mine": 8.0}]


# -- the Trainer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", ["00:00:15:00", {"minutes": 15}])
def test_validation_may_go_by_the_clock(without_cuda, interval, data):  # noqa: F811
    for capture in (False, True):
        model = DiscreteVAE(num_latents=2, num_categories=3, capture=capture)
        trainer = make_trainer(val_check_interval=interval, check_val_every_n_epoch=None)
        trainer.fit(model, datamodule=images(data))
        assert trainer.global_step == 3
        assert "val/loss" not in trainer.callback_metrics, "fifteen minutes have not passed"


@pytest.mark.parametrize("kind", [DiscreteVAE, MLPDiscreteVAE, GraphStructureLearner])
def test_models_can_be_pickled_and_copied(kind):
    model = kind()
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(twin.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [DiscreteVAE, GraphStructureLearner])
def test_other_precisions_train_and_test(kind, precision, data):
    model, data = small(kind, data)
    trainer = make_trainer(2, precision=precision, val_check_interval=2)
    assert_trains_and_tests(trainer, model, data)
