"""ReplayedSteps: on the CPU the bookkeeping, on CUDA the same curves as eager steps."""
# ruff: noqa: F811 - a fixture is an argument

from __future__ import annotations

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from cases_replay import Curve, Watch, equal, train, without_cuda  # noqa: F401 - a fixture
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
)
from torch import nn

from catnat.callbacks import FisherMonitor
from catnat.callbacks.terminal import StepBar
from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE, MLPDiscreteVAE, replay

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "options", [{}, {"optimizer": "sgd", "lr_decay": 0.5, "lr_decay_steps": 10}]
)
def test_several_steps_a_batch_are_the_same_steps(without_cuda, data, options):
    one, trainer_one, log_one = train(DiscreteVAE, False, 47, data, **options)
    many, trainer_many, log_many = train(DiscreteVAE, None, 47, data, **options)
    assert trainer_one.global_step == trainer_many.global_step == 47
    assert equal(one, many)
    fim = log_one.series("fim/off_diagonal_mass_sampled")
    assert list(fim) == list(range(47))
    assert log_many.series("fim/off_diagonal_mass_sampled") == fim
    last = max(log_many.series("train/loss"))
    assert log_many.series("train/loss")[last] == pytest.approx(log_one.series("train/loss")[last])


def test_every_kind_of_step_is_observed_as_in_an_eager_run(without_cuda, data):
    def series(replayed):
        monitor = FisherMonitor(every_n_steps=2, sampled_every_n_steps=3, write_every_n_steps=4)
        return train(DiscreteVAE, replayed, 31, data, monitor=monitor)[2].rows

    one, many = series(False), series(None)
    fim = [
        [(step, row) for step, row in rows if any(tag.startswith("fim/") for tag in row)]
        for rows in (one, many)
    ]
    assert [step for step, _ in fim[0]] == list(range(0, 31, 2))
    sampled = [step for step, row in fim[0] if "fim/off_diagonal_mass_sampled" in row]
    assert sampled == list(range(0, 31, 6))
    assert fim[0] == fim[1]


def test_a_run_after_one_that_failed_is_observed_once(without_cuda, data):
    class Fails(DiscreteVAE):
        failed = False

        def loss(self, batch, q):
            if not self.failed:
                self.failed = True
                raise ArithmeticError
            return super().loss(batch, q)

    model, monitor = Fails(num_latents=2, num_categories=3), FisherMonitor()
    images = MNISTDataModule(str(data), batch_size=2, download=False)

    def fit(logger):
        trainer = pl.Trainer(
            max_steps=4, accelerator="cpu", logger=logger, callbacks=[monitor],
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(model, datamodule=images)

    with pytest.raises(ArithmeticError):
        fit(Curve())
    curve = Curve()
    fit(curve)
    assert [step for step, row in curve.rows if "fim/saturated" in row] == [0, 1, 2, 3]
    assert not model.step_observers and not model.head._forward_hooks


def test_the_mlp_model_too(without_cuda, data):
    one, _, _ = train(MLPDiscreteVAE, False, 23, data)
    many, trainer, _ = train(MLPDiscreteVAE, None, 23, data)
    assert trainer.global_step == 23 and equal(one, many)


def test_checkpoints_cross_over(without_cuda, data, tmp_path):
    whole, _, _ = train(DiscreteVAE, None, 40, data)
    for first, second in ((None, None), (None, False), (False, None)):
        _, trainer, _ = train(DiscreteVAE, first, 20, data)
        path = tmp_path / "half.ckpt"
        trainer.save_checkpoint(path)
        model, trainer, _ = train(DiscreteVAE, second, 40, data, ckpt_path=path)
        assert trainer.global_step == 40
        assert equal(model, whole), (first, second)


def test_batches_with_labels_stay_whole(without_cuda):
    """A subclass whose loss uses labels gets them in a replayed step, too."""
    seen = []

    class Labelled(DiscreteVAE):
        def loss(self, batch, q):
            seen.append(batch[1].shape)
            return super().loss(batch, q)

    data = torch.utils.data.TensorDataset(torch.rand(40, 1, 28, 28), torch.arange(40))
    model = Labelled(num_latents=3, num_categories=4)
    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch := Watch()],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=10))
    assert watch.replayed and trainer.global_step == 4
    assert seen == [(10,)] * 4


# -- where Lightning has something to do, a block of steps ends ----------------------------------


class OneByOne(MNISTDataModule):
    """A hook looks at batches, so replayed steps come one by one."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


def counted(root, replayed, kind=MNISTDataModule, fails_at=None, accelerator="cpu", **options):
    """Train on 30 batches an epoch; returns the parameters, what was watched, the trainer."""

    class Model(DiscreteVAE):
        def prepare_step(self, step):
            if step == fails_at:
                raise ArithmeticError
            super().prepare_step(step)

    pl.seed_everything(1, verbose=False)
    model = Model(num_latents=2, num_categories=2, capture=None if replayed else False)
    data, watch = kind(str(root), batch_size=2, download=False), Watch()
    options = {"max_epochs": -1, "limit_val_batches": 1} | options
    trainer = pl.Trainer(
        accelerator=accelerator, logger=False, enable_checkpointing=False, callbacks=[watch],
        devices=1, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **options,
    )  # fmt: skip
    attributes = [dict(vars(trainer)), set(vars(data))]
    if fails_at is None:
        trainer.fit(model, datamodule=data)
    else:
        with pytest.raises(ArithmeticError):
            trainer.fit(model, datamodule=data)
    assert watch.replayed is replayed
    return model, watch, trainer, data, attributes


COUNTED = {
    "max_steps": ({"max_steps": 47}, [20, 30, 47]),
    "limit_train_batches": (
        {"max_steps": 50, "limit_train_batches": 23}, [20, 23, 43, 46, 50]
    ),
    "a share of the batches": (
        {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 0.5}, [15, 30]
    ),
    "val_check_interval": (
        {"max_steps": 45, "val_check_interval": 7}, [7, 14, 21, 28, 30, 37, 44, 45]
    ),
    "a share of an epoch": (
        {"max_steps": 40, "val_check_interval": 0.25}, [7, 14, 21, 28, 30, 37, 40]
    ),
    "across epochs": (
        {"max_steps": 75, "val_check_interval": 35, "check_val_every_n_epoch": None},
        [20, 30, 35, 55, 60, 70, 75],
    ),
    "without validation": (
        {"max_steps": 30, "val_check_interval": 7, "limit_val_batches": 0}, [20, 30]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_options_of_the_trainer_count_steps_however_they_are_taken(without_cuda, data, case):
    options, ends = COUNTED[case]
    eager, watched, one, data_one, _ = counted(data, replayed=False, **options)
    for kind in (MNISTDataModule, OneByOne):
        model, watch, trainer, data_many, _ = counted(data, replayed=True, kind=kind, **options)
        assert watch.ends == (ends if kind is MNISTDataModule else watched.ends)
        assert watch.validated == watched.validated and watch.epochs == watched.epochs
        assert equal(eager, model) and trainer.global_step == one.global_step
        assert data_many.state_dict() == data_one.state_dict()
        progress = [each.fit_loop.epoch_loop.batch_progress for each in (one, trainer)]
        assert progress[0] == progress[1], "checkpoints of both ways count alike"


@pytest.mark.parametrize("steps", [17, 37])
def test_a_run_may_be_resumed_after_any_step(without_cuda, data, tmp_path, steps):
    options = {"val_check_interval": 11, "check_val_every_n_epoch": None}
    whole, watched, *_ = counted(data, True, max_steps=50, **options)
    for first in (True, False):
        *_, trainer, _, _ = counted(data, first, max_steps=steps, **options)
        trainer.save_checkpoint(tmp_path / "some.ckpt")
        for second in (True, False):
            pl.seed_everything(9, verbose=False)
            model, watch = DiscreteVAE(num_latents=2, num_categories=2), Watch()
            model.capture = None if second else False
            trainer = pl.Trainer(
                accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[watch],
                enable_progress_bar=False, enable_model_summary=False, max_steps=50, max_epochs=-1,
                num_sanity_val_steps=0, limit_val_batches=1, **options,
            )  # fmt: skip
            images = MNISTDataModule(str(data), batch_size=2, download=False)
            trainer.fit(model, datamodule=images, ckpt_path=tmp_path / "some.ckpt")
            assert watch.replayed is second and equal(model, whole)
            assert watch.validated == [step for step in watched.validated if step > steps]


def test_a_checkpoint_that_counted_blocks_as_batches_validates_at_the_same_steps(
    without_cuda,
    data,
    tmp_path,
):
    options = {"val_check_interval": 20, "check_val_every_n_epoch": None}
    *_, trainer, _, _ = counted(data, True, max_steps=20, **options)
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    total.ready = total.started = total.processed = total.completed = 1
    trainer.save_checkpoint(tmp_path / "blocks.ckpt")
    model, watch = DiscreteVAE(num_latents=2, num_categories=2), Watch()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[watch],
        enable_progress_bar=False, enable_model_summary=False, max_steps=70, max_epochs=-1,
        num_sanity_val_steps=0, limit_val_batches=1, **options,
    )  # fmt: skip
    images = MNISTDataModule(str(data), batch_size=2, download=False)
    trainer.fit(model, datamodule=images, ckpt_path=tmp_path / "blocks.ckpt")
    assert watch.validated == [40, 60]


def test_a_progress_bar_counts_steps(without_cuda, data):
    shown = []

    class Bar(StepBar):
        def _move(self, name, done, total, title):
            shown.append((done, total))

    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[Bar()],
        enable_model_summary=False, max_epochs=1, limit_val_batches=0,
    )  # fmt: skip
    images = MNISTDataModule(str(data), batch_size=2, download=False)
    trainer.fit(DiscreteVAE(num_latents=2, num_categories=2), datamodule=images)
    assert shown == [(0, 30), (20, 30), (30, 30), (30, 30)]


@pytest.mark.parametrize("fails_at", [None, 25])
def test_trainer_and_data_module_are_given_back_as_they_were(without_cuda, data, fails_at):
    given = {"max_steps": 40, "val_check_interval": 7, "limit_train_batches": 23}
    model, _, trainer, images, (before, names) = counted(data, True, fails_at=fails_at, **given)
    for name in ("val_check_interval", "limit_train_batches", "check_val_every_n_epoch"):
        assert getattr(trainer, name) == before[name]
    assert set(vars(images)) - names <= {"source", "prepare_data_per_node"}
    loader = images.train_dataloader()
    assert all(batch.shape == (2, 1, 28, 28) for batch in loader), "one batch at a time"
    if fails_at is None:
        assert not model.replays and model.automatic_optimization


CUDA = torch.device("cuda", 0)


def on_cuda(kind, **options):
    """A strategy of a kind that would run on CUDA."""
    strategy = object.__new__(kind)
    if isinstance(strategy, SingleDeviceStrategy):
        strategy._root_device = CUDA
        return strategy
    strategy._ddp_comm_hook = strategy._layer_sync = strategy.cluster_environment = None
    strategy.parallel_devices = [CUDA]
    vars(strategy).update(options)
    return strategy


REASONS = {
    "the host is needed": {"why_host_needed": lambda: "the host is needed"},
    "16-mixed, not 32-true or bf16-mixed": {"precision": "16-mixed"},
    "64-true": {"precision": "64-true"},
    "accumulated": {"accumulate_grad_batches": 2},
    "the Trainer clips gradients": {"gradient_clip_val": 1.0},
    "capture is False": {"capture": False},
    "the strategy is FSDPStrategy, not one device or ddp": {"strategy": on_cuda(FSDPStrategy)},
    "the strategy is DeepSpeedStrategy": {"strategy": on_cuda(DeepSpeedStrategy)},
    "communication hook": {"strategy": on_cuda(DDPStrategy, _ddp_comm_hook=print)},
    "batch norms are synchronized": {"strategy": on_cuda(DDPStrategy, _layer_sync=print)},
    "an embedding has sparse gradients": {"net": nn.Embedding(2, 2, sparse=True)},
}


@pytest.mark.parametrize("kind", [SingleDeviceStrategy, DDPStrategy])
@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_not_to_replay_is_told(reason, kind):
    def why(options):
        net = options["net"]
        model = SimpleNamespace(**options, modules=net.modules, parameters=net.parameters)
        model.trainer = SimpleNamespace(**options)
        return replay.why_not(model)

    options = {
        "strategy": on_cuda(kind),
        "precision": "32-true",
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "capture": None,
        "why_host_needed": lambda: None,
        "net": nn.Linear(2, 2),
    }
    assert why(options) is None and why(options | {"precision": "bf16-mixed"}) is None
    assert reason in why(options | REASONS[reason])


def test_gradients_of_several_dtypes_are_not_averaged_in_one_call():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    dtypes = len({p.dtype for p in net.parameters()})
    obstacles = replay._obstacles_of_strategy(on_cuda(DDPStrategy), dtypes)
    assert [name for name, applies in obstacles.items() if applies] == [
        "the parameters have more than one dtype"
    ]


@pytest.mark.parametrize("capture", [None, True, False])
def test_on_cuda_one_line_says_why_steps_are_not_replayed(capture, monkeypatch, recwarn):
    monkeypatch.setattr(replay, "why_not", lambda module: "of a reason")
    model = DiscreteVAE(num_latents=2, num_categories=2, capture=capture)
    model.trainer = SimpleNamespace(strategy=on_cuda(SingleDeviceStrategy))
    assert replay.ReplayedSteps.where_possible(model, own_step=False) is None
    said = [str(warning.message) for warning in recwarn]
    assert said == (
        [] if capture is False else ["steps are not replayed as CUDA graphs: of a reason"]
    )


def clips(root):
    """Clip the gradients of a model, which FSDP has made into ``root``."""
    model = DiscreteVAE(num_latents=2, num_categories=2, gradient_clip=0.5)
    model.trainer = SimpleNamespace(strategy=on_cuda(FSDPStrategy, _model=root))
    model.configure_gradient_clipping(None)


def test_fsdp_clips_the_gradient_of_the_whole_model():
    asked = []
    clips(SimpleNamespace(clip_grad_norm_=asked.append))
    assert asked == [0.5]


def test_fsdp_refuses_to_clip_by_name_where_parts_alone_are_wrapped():
    with pytest.raises(ValueError, match="set gradient_clip to 0"):
        clips(nn.Linear(2, 2))


@pytest.mark.parametrize("model_class", [DiscreteVAE, MLPDiscreteVAE])
def test_bf16_mixed_steps_are_replayed(without_cuda, data, model_class):
    """The backward pass and the update run without autocast, as in an eager run."""
    dtypes = []

    class Seen(model_class):
        def step_loss(self, batch):
            dtypes.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
            return super().step_loss(batch)

        def logged_settings(self):
            dtypes.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
            return super().logged_settings()

    options = {"precision": "bf16-mixed", "optimizer": "sgd"}
    one, _, log_one = train(model_class, False, 20, data, **options)
    many, _, log_many = train(model_class, None, 20, data, **options)
    assert log_many.series("train/loss")[19] == pytest.approx(log_one.series("train/loss")[19])
    torch.testing.assert_close(dict(many.named_parameters()), dict(one.named_parameters()))
    train(Seen, None, 2, data, **options)
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_without_capture_there_are_no_replayed_steps(without_cuda, data, monkeypatch):
    monkeypatch.setattr(replay.ReplayedSteps, "__init__", None)
    counted(data, replayed=False, max_steps=2)


def test_says_why_not(data):
    with pytest.warns(UserWarning, match="not replayed as CUDA graphs: the device is not a CUDA"):
        train(DiscreteVAE, True, 1, data)


@cuda
@pytest.mark.parametrize("model_class", [DiscreteVAE, MLPDiscreteVAE])
@pytest.mark.parametrize("head", ["softmax", "natural"])
def test_the_same_curve_as_eager(model_class, head, data):
    options = {"accelerator": "gpu", "head": head, "batch_size": 20}  # three batches an epoch
    _, _, eager = train(model_class, False, 100, data, **options)
    _, trainer, graph = train(model_class, None, 100, data, **options)
    assert trainer.global_step == 100
    want, got = eager.series("train/loss"), graph.series("train/loss")
    assert list(got) == [*range(2, 99, 3), 99], "the last step of each block"
    for step in (20, 50, 99):
        assert got[step] == pytest.approx(want[step], rel=1e-3)
    mass = graph.series("fim/off_diagonal_mass_fro")
    assert list(mass) == list(range(100))
    for step, value in eager.series("fim/off_diagonal_mass_fro").items():
        assert mass[step] == pytest.approx(value, abs=1e-3)


@cuda
@pytest.mark.parametrize("case", COUNTED)
def test_options_of_the_trainer_count_steps_on_cuda(data, case):
    options, ends = COUNTED[case]
    _, watched, one, data_one, _ = counted(data, False, accelerator="gpu", **options)
    _, watch, trainer, data_many, _ = counted(data, True, accelerator="gpu", **options)
    assert watch.ends == ends and watch.validated == watched.validated
    assert trainer.global_step == one.global_step
    assert data_many.state_dict() == data_one.state_dict()


@cuda
@pytest.mark.parametrize("model_class", [DiscreteVAE, MLPDiscreteVAE])
def test_bf16_mixed_gives_the_same_curve_as_eager_on_cuda(model_class, data):
    options = {"accelerator": "gpu", "batch_size": 20, "precision": "bf16-mixed"}
    _, _, eager = train(model_class, False, 60, data, **options)
    _, trainer, graph = train(model_class, None, 60, data, **options)
    want, got = eager.series("train/loss"), graph.series("train/loss")
    assert trainer.global_step == 60
    for step in (2, 20, 59):
        assert got[step] == pytest.approx(want[step], rel=1e-2)


@cuda
@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="needs NCCL")
def test_one_rank_with_nccl_takes_the_steps_of_one_process(data):
    """The all-reduce is part of the graph."""
    options = {"accelerator": "gpu", "batch_size": 20}
    _, _, plain = train(DiscreteVAE, None, 60, data, **options)
    model, _, ranked = train(DiscreteVAE, None, 60, data, strategy="ddp", **options)
    try:
        want, got = plain.series("train/loss"), ranked.series("train/loss")
        assert list(got) == list(want)
        for step in (2, 20, 59):
            assert got[step] == pytest.approx(want[step], rel=1e-3)
        assert not model.replays and model.automatic_optimization
    finally:
        torch.distributed.destroy_process_group()


@cuda
def test_fsdp_trains_eagerly_and_clips_on_cuda(data):
    model = DiscreteVAE(num_latents=2, num_categories=2, gradient_clip=1e-3, optimizer="sgd")
    model.learning_rate, watch, images = 1.0, Watch(), MNISTDataModule(str(data), download=False)
    before = [p.detach().clone() for p in model.parameters()]
    images.batch_size = 20
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy="fsdp", max_steps=5, logger=False, callbacks=[watch],
        enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0,
    )  # fmt: skip
    try:
        with pytest.warns(UserWarning, match="the strategy is FSDPStrategy, not one device or ddp"):
            trainer.fit(model, datamodule=images)
    finally:
        torch.distributed.destroy_process_group()
    pairs = zip(model.parameters(), before, strict=True)
    moved = [(p.detach().cpu().flatten() - q.flatten()).norm() for p, q in pairs]
    assert watch.ends == [1, 2, 3, 4, 5] and not watch.replayed
    assert 0 < torch.stack(moved).norm() <= 5 * 1e-3 + 1e-5, "five steps of norm 0.001 at most"
