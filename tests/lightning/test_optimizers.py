"""Optimizers and schedulers are functions of parameters and of an optimizer, as in Lightning."""

import warnings
from functools import partial

import pytest
import torch
from cases_callbacks import Memory, quiet_trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim.lr_scheduler import LinearLR, PolynomialLR, ReduceLROnPlateau, SequentialLR, StepLR

from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"num_latents": 2, "num_categories": 3}


def fit(model, root, **options):
    data = MNISTDataModule(str(root), batch_size=10, download=False)
    trainer = quiet_trainer(**{"max_steps": 4, "limit_val_batches": 0} | options)
    trainer.fit(model, datamodule=data)
    return trainer


def groups_of(model):
    configured = model.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    return optimizer, optimizer.param_groups


DECAYED = partial(torch.optim.AdamW, weight_decay=0.1)
RATES = {
    "default of DiscreteVAE": (DiscreteVAE, {}, torch.optim.Adam, [1e-3]),
    "default of MLPDiscreteVAE": (MLPDiscreteVAE, {}, torch.optim.Adam, [5e-4]),
    "learning_rate": (MLPDiscreteVAE, {"learning_rate": 0.25}, torch.optim.Adam, [0.25]),
    "an optimizer's own": (DiscreteVAE, {"optimizer": torch.optim.Adamax}, None, [2e-3]),
    "an optimizer's, chosen": (DiscreteVAE, {"optimizer": partial(DECAYED, lr=0.5)}, None, [0.5]),
    "both": (DiscreteVAE, {"optimizer": DECAYED, "learning_rate": 0.25}, None, [0.25]),
    "two of a graph": (
        GraphStructureLearner,
        {"num_nodes": 3, "optimizer": torch.optim.SGD, "psi_learning_rate": 0.5},
        torch.optim.SGD,
        [0.005, 0.5],
    ),
}


@pytest.mark.parametrize("case", RATES)
def test_the_learning_rate_is_that_of_the_model_or_of_the_optimizer(case):
    kind, options, class_, rates = RATES[case]
    optimizer, groups = groups_of(kind(**options))
    assert [group["lr"] for group in groups] == rates
    if class_ is not None:
        assert type(optimizer) is class_
    given = {id(p) for group in groups for p in group["params"]}
    assert given == {id(p) for p in optimizer.param_groups[0]["params"]} | given


def test_two_different_learning_rates_are_refused():
    model = DiscreteVAE(optimizer=partial(torch.optim.SGD, lr=0.1), learning_rate=0.2)
    with pytest.raises(ValueError, match=r"learning_rate is 0\.2, but lr of .* SGD is 0\.1: give"):
        model.configure_optimizers()


@pytest.mark.parametrize("kind", [DiscreteVAE, MLPDiscreteVAE])
def test_a_given_optimizer_takes_the_steps_of_the_same_loop_by_hand(kind, data):
    """Plain gradient descent with momentum and a falling rate, step by step."""
    batches, options = [], {**SMALL, "gradient_clip": 0.0, "learning_rate": 1e-3}

    class Seen(kind):
        def step_loss(self, batch):
            batches.append((batch.clone(), torch.get_rng_state()))
            return super().step_loss(batch)

    optimizer = partial(torch.optim.SGD, momentum=0.5)
    torch.manual_seed(2)
    model = Seen(optimizer=optimizer, lr_scheduler=partial(StepLR, step_size=2), **options)
    torch.manual_seed(2)
    twin = kind(**options)
    velocity = [torch.zeros_like(p) for p in twin.parameters()]
    fit(model, data)
    for step, (batch, random_state) in enumerate(batches):
        torch.set_rng_state(random_state)
        twin.prepare_step(step)
        gradients = torch.autograd.grad(twin.step_loss(batch), list(twin.parameters()))
        with torch.no_grad():
            for p, v, gradient in zip(twin.parameters(), velocity, gradients, strict=True):
                v.mul_(0.5).add_(gradient)
                p.sub_(1e-3 * 0.1 ** (step // 2) * v)
    assert len(batches) == 4
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()])


def test_schedulers_are_stepped_after_every_step_and_those_of_a_plateau_after_validation(data):
    model = DiscreteVAE(**SMALL, learning_rate=0.01, lr_scheduler=partial(StepLR, step_size=3))
    trainer = fit(model, data, max_steps=7)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)

    plateau = partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=1e9)  # never better
    model = DiscreteVAE(**SMALL, learning_rate=0.01, lr_scheduler=plateau)
    trainer = fit(model, data, max_steps=-1, max_epochs=3, limit_val_batches=1)
    assert trainer.lr_scheduler_configs[0].monitor == "val/loss"
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**3)


def test_checkpoints_hold_no_functions_and_resume_with_the_functions_given_again(data, tmp_path):
    options = {
        **SMALL,
        "optimizer": partial(torch.optim.SGD, momentum=0.9),
        "lr_scheduler": partial(PolynomialLR, total_iters=8),
        "learning_rate": 1e-3,
    }

    def run(steps, seed, **more):
        torch.manual_seed(seed)
        model = DiscreteVAE(**options, gradient_clip=1.0)
        return model, fit(model, data, max_steps=steps, **more)

    _, trainer = run(4, 1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert not {"optimizer", "lr_scheduler"} & saved["hyper_parameters"].keys()
    assert DiscreteVAE.load_from_checkpoint(tmp_path / "a.ckpt").hparams.learning_rate == 1e-3
    model = DiscreteVAE(**options)
    again = quiet_trainer(max_steps=6, limit_val_batches=0, callbacks=[])
    images = MNISTDataModule(str(data), batch_size=10, download=False)
    again.fit(model, datamodule=images, ckpt_path=tmp_path / "a.ckpt")
    (group,) = again.optimizers[0].param_groups
    assert group["momentum"] == 0.9 and group["lr"] == pytest.approx(1e-3 * (1 - 6 / 8))


def test_a_sequence_of_schedulers_resumes_at_the_rate_of_the_model(data, tmp_path):
    def warm_up(optimizer):
        parts = [LinearLR(optimizer, 0.1, 1.0, total_iters=2), StepLR(optimizer, 100)]
        return SequentialLR(optimizer, parts, milestones=[4])

    def run(rate, steps, checkpoint=None):
        model = DiscreteVAE(**SMALL, learning_rate=rate, lr_scheduler=warm_up)
        trainer = quiet_trainer(max_steps=steps, limit_val_batches=0)
        images = MNISTDataModule(str(data), batch_size=10, download=False)
        trainer.fit(model, datamodule=images, ckpt_path=checkpoint)
        return trainer

    run(1e-3, 3).save_checkpoint(tmp_path / "a.ckpt")
    resumed = run(2e-3, 6, tmp_path / "a.ckpt")
    assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(2e-3)


def test_two_optimizers_and_their_schedulers_resume_at_the_rate_of_the_model(data, tmp_path):
    class Two(DiscreteVAE):
        automatic_optimization = False

        def configure_optimizers(self):
            parts = (self.encoder.parameters(), self.decoder.parameters())
            optimizers = [torch.optim.SGD(p, lr=self.learning_rate) for p in parts]
            return optimizers, [StepLR(optimizer, 100) for optimizer in optimizers]

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.step_loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

    trainer = fit(Two(**SMALL, learning_rate=1e-3), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer = quiet_trainer(max_steps=8, limit_val_batches=0)
    images = MNISTDataModule(str(data), batch_size=10, download=False)
    model = Two(**SMALL, learning_rate=2e-3)
    trainer.fit(model, datamodule=images, ckpt_path=tmp_path / "a.ckpt")
    assert [each.param_groups[0]["lr"] for each in trainer.optimizers] == [2e-3, 2e-3]
    assert [each.scheduler.base_lrs for each in trainer.lr_scheduler_configs] == [[2e-3], [2e-3]]


def test_lightnings_callbacks_see_the_rates(data):
    model = DiscreteVAE(**SMALL, lr_scheduler=partial(StepLR, step_size=2, gamma=0.5))
    logger = Memory()
    fit(model, data, logger=logger, callbacks=[LearningRateMonitor("step")])
    rates = list(logger.series("lr-Adam").values())
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])


def test_a_checkpoint_of_another_head_gets_a_warning(data, tmp_path):
    trainer = fit(DiscreteVAE(**SMALL, head="sigmoid"), data)
    trainer.save_checkpoint(tmp_path / "sigmoid.ckpt")
    images = MNISTDataModule(str(data), batch_size=10, download=False)

    def resume(head):
        model = DiscreteVAE(**SMALL, head=head)
        resumed = quiet_trainer(max_steps=trainer.global_step + 1, limit_val_batches=0)
        resumed.fit(model, datamodule=images, ckpt_path=tmp_path / "sigmoid.ckpt")

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the checkpoint has head")
        resume("sigmoid")
    with pytest.warns(UserWarning, match="the checkpoint has head 'sigmoid', this model 'natural'"):
        resume("natural")


def test_a_resumed_run_learns_at_the_rates_it_is_given(tmp_path):
    def run(steps, ckpt_path=None, **rates):
        model = GraphStructureLearner(num_nodes=6, **rates)
        data = CommunityGraphDataModule(communities=1, num_pairs=60, batch_size=8)
        trainer = quiet_trainer(max_steps=steps, limit_val_batches=0)
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
        return trainer

    path = tmp_path / "a.ckpt"
    run(2, learning_rate=0.1, psi_learning_rate=0.2).save_checkpoint(path)
    trainer = run(4, path, learning_rate=0.3, psi_learning_rate=0.2)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert rates == pytest.approx([0.3, 0.2])
