"""A run that was stopped and resumed ends, bit for bit, where an uninterrupted one ends."""

import os
import signal
from functools import partial

import pytest
import torch
from cases_callbacks import quiet_trainer
from cases_mnist import write_mnist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from catnat.callbacks import LastCheckpoint
from catnat.callbacks.signals import Stopped
from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE, MLPDiscreteVAE

pytestmark = pytest.mark.filterwarnings("ignore")


FALLING = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.9)


class Annealed(DiscreteVAE):
    temperature_steps = 2


MODELS = {
    "vae": (
        lambda: Annealed(
            "natural", lr_scheduler=FALLING, temperature_rate=0.05, kl_start=0.5, kl_steps=9
        ),
        "gray",
    ),
    "mlp-vae": (lambda: MLPDiscreteVAE("softmax"), "stochastic"),
}
STEPS = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """60 images to train and validate on, that is 5 batches of 10 per epoch, and 10 to test."""
    return write_mnist(tmp_path_factory.mktemp("data"), 60, 10)


def run(root, model, variant, ckpt_path=None, callbacks=(), **options):
    data = MNISTDataModule(str(root), variant=variant, batch_size=10, download=False)
    options = {"max_steps": STEPS, "max_epochs": -1, "limit_val_batches": 1} | options
    if not any(isinstance(callback, LastCheckpoint) for callback in callbacks):
        callbacks = [LastCheckpoint(root / "last", every_n_steps=1000), *callbacks]  # random states
    trainer = quiet_trainer(callbacks=callbacks, enable_checkpointing=True, **options)
    trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer


def assert_same(model, other):
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.fixture(scope="module", params=MODELS)
def straight(root, request, tmp_path_factory):
    """An uninterrupted run that leaves a checkpoint at every step."""
    make, variant = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    seed_everything(1, verbose=False)
    model = make()
    trainer = run(root, model, variant, callbacks=[save])
    assert trainer.global_step == STEPS
    return make, variant, model, folder


@pytest.mark.parametrize("step", [1, 5, 7])
def test_a_resumed_run_ends_at_the_same_parameters(root, straight, step):
    make, variant, model, folder = straight
    seed_everything(99, verbose=False)  # a new process would not have our random state either
    resumed = make()
    trainer = run(root, resumed, variant, ckpt_path=folder / f"step={step}.ckpt")
    assert trainer.global_step == STEPS
    assert_same(resumed, model)


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 3, "max_steps": 9},
        {"max_steps": -1, "max_epochs": 3},
        {"val_check_interval": 2, "max_steps": 9},
    ],
)
def test_it_holds_at_the_end_of_an_epoch_and_after_validation(root, tmp_path, options):
    make, variant = MODELS["mlp-vae"]

    def saving(folder):
        return [
            ModelCheckpoint(folder, "epoch-{step}", save_top_k=-1, every_n_epochs=1),
            ModelCheckpoint(folder, "best-{step}", monitor="val/loss", save_top_k=-1),
        ]

    seed_everything(1, verbose=False)
    model = make()
    last = run(root, model, variant, callbacks=saving(tmp_path), **options).global_step
    checkpoints = [path for path in tmp_path.glob("*.ckpt") if f"step={last}." not in path.name]
    assert len(checkpoints) >= 4
    for path in checkpoints:
        seed_everything(99, verbose=False)
        resumed = make()
        assert run(root, resumed, variant, ckpt_path=path, **options).global_step == last
        assert_same(resumed, model)


def test_training_does_not_depend_on_what_is_watched(root, straight):
    """No validation, no checkpoints: the same parameters."""
    make, variant, model, _ = straight
    seed_everything(1, verbose=False)
    other = make()
    run(root, other, variant, limit_val_batches=0)
    assert_same(other, model)


def test_a_checkpoint_holds_plain_things_only(straight):
    _, _, model, folder = straight
    checkpoint = torch.load(folder / "step=5.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["head"] == model.hparams["head"]
    assert checkpoint["datamodule_hyper_parameters"]["source"] == "files"
    assert "temperature" not in checkpoint["state_dict"]
    loaded = type(model).load_from_checkpoint(folder / "step=12.ckpt", weights_only=True)
    assert loaded.hparams == model.hparams
    assert_same(loaded, model)


def test_loading_for_evaluation_leaves_the_random_state_alone(root, straight):
    make, variant, _, folder = straight
    model = make()
    trainer = quiet_trainer()
    data = MNISTDataModule(str(root), variant=variant, batch_size=10, download=False)
    before = torch.get_rng_state()
    path = folder / "step=5.ckpt"
    trainer.test(model, data, ckpt_path=path, weights_only=True, verbose=False)
    assert torch.equal(torch.get_rng_state(), before)


class Kill(Callback):
    """Sends SIGTERM to this process while a batch is under way."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("at", [4, 6, 8])
def test_a_signal_waits_for_all_batches_of_a_step(root, tmp_path, at):
    """Batches 0 to 2, 3 to 4 (the end of the epoch), 5 to 7 and 8 to 9 make a step each."""
    build, variant = MODELS["vae"]
    options = {"max_steps": 6, "accumulate_grad_batches": 3}
    seed_everything(1, verbose=False)
    straight = build()
    run(root, straight, variant, **options)

    seed_everything(1, verbose=False)
    callbacks = [Kill(at), LastCheckpoint(tmp_path)]
    step = {4: 2, 6: 3, 8: 4}[at]
    with pytest.raises(Stopped, match=f"stopped by SIGTERM after step {step}$"):
        run(root, build(), variant, callbacks=callbacks, **options)
    path = tmp_path / "last.ckpt"
    assert torch.load(path, weights_only=True)["global_step"] == step
    seed_everything(99, verbose=False)
    resumed = build()
    assert run(root, resumed, variant, ckpt_path=path, **options).global_step == 6
    assert_same(straight, resumed)
