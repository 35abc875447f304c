"""A monitored metric that the model does not log is refused before the first step."""

import functools

import pytest
import torch
from cases_callbacks import Small, loader, quiet_trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from catnat.callbacks import BestCheckpoint
from catnat.callbacks.tensorboard import RunRecord
from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE

LOGGED = "it logs val/elbo, val/kl, val/loss, val/perplexity"


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    monitor = "val_elbo"


steps = []


class Model(DiscreteVAE):
    """Notes that a step is taken."""

    def step_loss(self, batch):
        steps.append(self.global_step)
        return super().step_loss(batch)


def train(data, *callbacks, **options):
    steps.clear()
    model = Model(num_latents=2, num_categories=3, **options)
    trainer = quiet_trainer(
        max_steps=6,
        log_every_n_steps=2,
        enable_checkpointing=True,
        callbacks=[RunRecord(), *callbacks],
    )
    trainer.fit(model, datamodule=MNISTDataModule(str(data), batch_size=10, download=False))
    return trainer


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint, BestCheckpoint])
def test_a_name_that_validation_does_not_log_is_refused(kind, data, tmp_path):
    options = {} if kind is EarlyStopping else {"dirpath": tmp_path}
    message = f"{kind.__name__} monitors 'val/los', which the model does not log; {LOGGED}$"
    with pytest.raises(ValueError, match=message):
        train(data, kind(monitor="val/los", **options))
    assert not steps and not any(tmp_path.iterdir())


def test_a_scheduler_that_monitors_another_name_is_refused(data):
    with pytest.raises(ValueError, match=f"Plateau monitors 'val_elbo', .* not log; {LOGGED}$"):
        train(data, lr_scheduler=functools.partial(Plateau, patience=1))
    assert not steps


def test_a_name_that_is_logged_or_may_be_logged_in_training_is_not_refused(data, tmp_path):
    stop = EarlyStopping("val/elbo", mode="max")
    tolerant = EarlyStopping("val/los", strict=False)
    in_training = ModelCheckpoint(tmp_path, monitor="train/loss", every_n_train_steps=2)
    assert train(data, stop, tolerant, in_training).global_step == 6
    assert in_training.best_model_path


def test_best_ckpt_is_not_needed_where_the_model_logs_no_loss(tmp_path):
    best = BestCheckpoint(dirpath=tmp_path)
    trainer = quiet_trainer(max_steps=1, enable_checkpointing=True, callbacks=[RunRecord(), best])
    trainer.fit(Small(), loader(), loader())
    assert trainer.global_step == 1 and not any(tmp_path.iterdir())
