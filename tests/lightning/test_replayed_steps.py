"""ReplayedSteps: on the CPU the bookkeeping, on CUDA the same curves as eager steps."""
# ruff: noqa: F811 - a fixture is an argument

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from cases import slow
from cases_callbacks import Memory, quiet_trainer
from cases_replay import Watch, cuda, equal, train, without_cuda  # noqa: F401 - a fixture
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from catnat.callbacks import FisherMonitor, LastCheckpoint
from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE, MLPDiscreteVAE

HALVED = partial(torch.optim.lr_scheduler.StepLR, step_size=10, gamma=0.5)
DECAYED = {"optimizer": torch.optim.SGD, "learning_rate": 1e-3, "lr_scheduler": HALVED}
KL_FALLS = {"kl_weight": 0.5, "kl_start": 2.0, "kl_steps": 20}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(DiscreteVAE, {}), (DiscreteVAE, DECAYED), (DiscreteVAE, KL_FALLS), (MLPDiscreteVAE, {})],
)
def test_several_steps_a_batch_are_the_same_steps(without_cuda, data, kind, options):
    options = {"log_every_n_steps": 14, **options}
    one, trainer_one, log_one = train(kind, False, 47, data, **options)
    many, trainer_many, log_many = train(kind, True, 47, data, **options)
    assert trainer_one.global_step == trainer_many.global_step == 47
    assert equal(one, many)
    fim = log_one.series("fim_sampled/off_diagonal_mass_l1")
    assert sorted(fim) == list(range(47))
    # Steps that are computed together may be added up in another order.
    assert log_many.series("fim_sampled/off_diagonal_mass_l1") == pytest.approx(fim, rel=1e-6)
    losses = log_one.series("train/loss")
    assert list(losses) == [13, 27, 41]
    assert log_many.series("train/loss") == pytest.approx(losses)
    for name in ("train/loss", "train/temperature"):
        if name in trainer_one.callback_metrics:
            assert trainer_many.callback_metrics[name] == trainer_one.callback_metrics[name]
    assert trainer_many.progress_bar_metrics == pytest.approx(trainer_one.progress_bar_metrics)


def test_every_kind_of_step_is_observed_as_in_an_eager_run(without_cuda, data):
    def series(replayed):
        monitor = FisherMonitor(every_n_steps=2, write_every_n_steps=4, details=True)
        _, _, logger = train(DiscreteVAE, replayed, 31, data, monitor=monitor)
        tags = {tag for row in logger.rows.values() for tag in row if tag.startswith("fim")}
        return {tag: logger.series(tag) for tag in tags}

    eager = series(False)
    assert list(eager["fim/saturated"]) == list(range(0, 31, 2))
    assert series(True) == eager


def test_batches_with_labels_stay_whole(without_cuda):
    """A subclass whose loss uses labels gets them in a replayed step, too."""
    seen = []

    class Labelled(DiscreteVAE):
        def loss(self, batch, q):
            seen.append(batch[1].shape)
            return super().loss(batch, q)

    data = torch.utils.data.TensorDataset(torch.rand(40, 1, 28, 28), torch.arange(40))
    model = Labelled(num_latents=3, num_categories=4, capture=True)
    trainer = quiet_trainer(max_steps=4, callbacks=[watch := Watch()])
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=10))
    assert watch.replayed and trainer.global_step == 4
    assert seen == [(10,)] * 4


# -- where Lightning has something to do, a block of steps ends ----------------------------------


class OneByOne(MNISTDataModule):
    """A hook looks at batches, so replayed steps come one by one."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


def counted(root, replayed, fails_at=None, kind=MNISTDataModule, accelerator="cpu", **options):
    """Train on 30 batches an epoch; returns the parameters, what was watched, the trainer."""

    class Model(DiscreteVAE):
        def prepare_step(self, step):
            if step == fails_at:
                raise ArithmeticError
            super().prepare_step(step)

    pl.seed_everything(1, verbose=False)
    model = Model(num_latents=2, num_categories=2, capture=replayed)
    data, watch = kind(str(root), batch_size=2, download=False), Watch()
    options = {"max_epochs": -1, "limit_val_batches": 1, "log_every_n_steps": 1000} | options
    callbacks = [watch, *options.pop("callbacks", ())]
    saving = any(isinstance(callback, Checkpoint) for callback in callbacks)
    trainer = quiet_trainer(
        accelerator=accelerator,
        enable_checkpointing=saving,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        **options,
    )
    if fails_at is None:
        trainer.fit(model, datamodule=data)
    else:
        with pytest.raises(ArithmeticError):
            trainer.fit(model, datamodule=data)
    assert watch.replayed is replayed
    return model, watch, trainer, data


COUNTED = {
    "max_steps": ({"max_steps": 47}, [25, 30, 47]),
    "limit_train_batches": ({"max_steps": 50, "limit_train_batches": 23}, [23, 46, 50]),
    "val_check_interval": (
        {"max_steps": 45, "val_check_interval": 7},
        [7, 14, 21, 28, 30, 37, 44, 45],
    ),
    "a share of an epoch": (
        {"max_steps": 40, "val_check_interval": 0.25},
        [7, 14, 21, 28, 30, 37, 40],
    ),
    "across epochs": (
        {"max_steps": 75, "val_check_interval": 35, "check_val_every_n_epoch": None},
        [25, 30, 35, 60, 70, 75],
    ),
}


def test_a_checkpoint_callback_saves_at_the_steps_it_names_however_they_are_taken(
    without_cuda, data, tmp_path
):
    for replayed in (False, True):
        folder = tmp_path / str(replayed)
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=8, save_top_k=-1)
        _, watch, *_ = counted(data, replayed, max_steps=40, limit_val_batches=0, callbacks=[saver])
        assert {path.stem for path in folder.iterdir()} == {
            f"step={n}" for n in (8, 16, 24, 32, 40)
        }
    assert watch.ends == [8, 16, 24, 30, 32, 40]


def test_last_ckpt_is_saved_at_the_steps_it_names(without_cuda, data, tmp_path, monkeypatch):
    saved = []
    save = Trainer.save_checkpoint
    monkeypatch.setattr(
        Trainer,
        "save_checkpoint",
        lambda trainer, *args: [saved.append(trainer.global_step), save(trainer, *args)],
    )
    last = LastCheckpoint(tmp_path, every_n_steps=7)
    counted(data, True, max_steps=32, limit_val_batches=0, callbacks=[last])
    assert saved == [7, 14, 21, 28, 32]


SLOW = ("max_steps", "a share of an epoch")


@pytest.mark.parametrize(
    ("case", "accelerator"),
    [
        *(slow(case, "cpu") if case in SLOW else (case, "cpu") for case in COUNTED),
        *(pytest.param(case, "gpu", marks=cuda) for case in COUNTED),
    ],
)
def test_options_of_the_trainer_count_steps_however_they_are_taken(
    data, case, accelerator, request
):
    if accelerator == "cpu":
        request.getfixturevalue("without_cuda")
    options, ends = COUNTED[case]
    options = {**options, "accelerator": accelerator}
    eager, watched, one, data_one = counted(data, replayed=False, **options)
    for kind in (MNISTDataModule, OneByOne) if case == "val_check_interval" else (MNISTDataModule,):
        model, watch, trainer, data_many = counted(data, replayed=True, kind=kind, **options)
        assert watch.ends == (ends if kind is MNISTDataModule else watched.ends)
        assert watch.validated == watched.validated and watch.epochs == watched.epochs
        assert accelerator == "gpu" or equal(eager, model)
        assert trainer.global_step == one.global_step
        assert data_many.state_dict() == data_one.state_dict()
        progress = [run.fit_loop.epoch_loop.batch_progress for run in (one, trainer)]
        assert progress[0] == progress[1], "checkpoints of both ways count alike"


def test_a_run_may_be_resumed_after_any_step(without_cuda, data, tmp_path):
    options = {"val_check_interval": 11, "check_val_every_n_epoch": None}
    straight, watched, *_ = counted(data, True, max_steps=50, **options)
    last = LastCheckpoint(tmp_path)
    for steps, first, second in ((17, True, True), (37, True, False), (37, False, True)):
        *_, trainer, _ = counted(data, first, max_steps=steps, callbacks=[last], **options)
        trainer.save_checkpoint(tmp_path / "some.ckpt")
        pl.seed_everything(9, verbose=False)
        model, watch = DiscreteVAE(num_latents=2, num_categories=2), Watch()
        model.capture = second
        trainer = quiet_trainer(
            callbacks=[watch, last],
            max_steps=50,
            max_epochs=-1,
            num_sanity_val_steps=0,
            limit_val_batches=1,
            enable_checkpointing=True,
            **options,
        )
        images = MNISTDataModule(str(data), batch_size=2, download=False)
        trainer.fit(model, datamodule=images, ckpt_path=tmp_path / "some.ckpt")
        assert watch.replayed is second and equal(model, straight)
        assert watch.validated == [step for step in watched.validated if step > steps]


@pytest.mark.parametrize("fails_at", [None, 25])
def test_model_data_and_monitor_serve_a_second_run(without_cuda, data, fails_at):
    monitor = FisherMonitor(details=True)
    model, _, _, images = counted(data, True, fails_at, max_steps=40, callbacks=[monitor])
    assert all(batch.shape == (2, 1, 28, 28) for batch in images.train_dataloader())
    curve = Memory()
    again = quiet_trainer(max_steps=4, logger=curve, callbacks=[monitor], limit_val_batches=0)
    again.fit(model, datamodule=images)
    assert curve.observed == [0, 1, 2, 3], "once, also after a run that failed"
    assert not model.head._forward_hooks and not model.replays


@cuda
@pytest.mark.parametrize("model_class", [DiscreteVAE, MLPDiscreteVAE])
@pytest.mark.parametrize(
    ("head", "precision", "rel"),
    [("softmax", "32-true", 1e-3), ("natural", "32-true", 1e-3), ("natural", "bf16-mixed", 1e-2)],
)
def test_the_same_curve_as_eager(model_class, head, precision, rel, data):
    """In few steps: differences by rounding grow by a factor of ten in about ten steps."""
    steps = 36
    options = {"accelerator": "gpu", "head": head, "precision": precision}
    options["batch_size"] = 20  # three batches an epoch
    options["log_every_n_steps"] = 7
    _, _, eager = train(model_class, False, steps, data, **options)
    _, trainer, graph = train(model_class, True, steps, data, **options)
    assert trainer.global_step == steps
    want, got = eager.series("train/loss"), graph.series("train/loss")
    assert list(got) == list(want) == list(range(6, steps, 7))
    for step in want:
        assert got[step] == pytest.approx(want[step], rel=rel)
    mass = graph.series("fim/exact_off_diagonal_mass")
    assert sorted(mass) == list(range(steps))
    for step, value in eager.series("fim/exact_off_diagonal_mass").items():
        assert mass[step] == pytest.approx(value, abs=rel)
