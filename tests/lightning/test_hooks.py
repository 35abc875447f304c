"""Every hook from a batch to its update is called as often when steps are replayed.

On the CPU the captured step is called eagerly; on CUDA it is captured.
"""

import functools
import warnings

import pytest
import torch
from cases_callbacks import quiet_trainer
from cases_replay import cuda, equal, without_cuda  # noqa: F401 - a fixture
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR

from catnat.callbacks import FisherMonitor, LastCheckpoint
from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE
from catnat.lit_modules.cuda_graph_steps import BATCH_HOOKS, START_AND_END, STEP_HOOKS

pytestmark = pytest.mark.filterwarnings("ignore")
BETWEEN = (*BATCH_HOOKS, *START_AND_END, *STEP_HOOKS, "lr_scheduler_step")
ACCELERATORS = ["cpu", pytest.param("gpu", marks=cuda)]


@pytest.fixture(params=ACCELERATORS)
def accelerator(request):
    if request.param == "cpu":
        request.getfixturevalue("without_cuda")
    return request.param


def recording(base, hooks, called):
    """A subclass whose hooks note their name and the step, and do what the base does."""

    def hook(name):
        inherited = getattr(base, name)

        def noted(self, *args, **kwargs):
            module = self if isinstance(self, LightningModule) else self.trainer_of(args)
            called.append((name, module.global_step))
            return inherited(self, *args, **kwargs)

        return noted

    return type("Own", (base,), {name: hook(name) for name in hooks})


class Bare(Callback):
    def trainer_of(self, args):
        return args[0]


class Images(MNISTDataModule):
    def trainer_of(self, args):
        return self.trainer


def train(root, accelerator, capture, module=DiscreteVAE, callbacks=(), data=Images, **options):
    """Train for two epochs of six batches; the model and what was warned of."""
    torch.manual_seed(1)
    options = {"learning_rate": 1e-2, **options}
    steps = options.pop("max_steps", 12)
    model = module(num_latents=2, num_categories=3, capture=capture, **options)
    model.first_weights = parameters_to_vector(model.parameters()).detach().clone()
    trainer = quiet_trainer(
        max_steps=steps,
        accelerator=accelerator,
        log_every_n_steps=1000,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(x, LastCheckpoint) for x in callbacks),
        callbacks=[*callbacks, seen := Replays()],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, datamodule=data(str(root), batch_size=10, download=False))
    why = [str(x.message) for x in caught if "not replayed" in str(x.message)]
    return model, trainer, seen.replayed, why


class Replays(Callback):
    """Notes whether the last step was replayed."""

    sees_blocks, replayed = True, None

    def on_train_batch_end(self, trainer, module, *args):
        self.replayed = module.replays


def near(one, many, accelerator):
    """Whether two models of one seed have learned the same.

    On CUDA an update has other kernels when it is captured, and Adam scales up what is left by
    rounding where a gradient is small: it is all that a bias before a batch norm gets. Such noise
    moved the weights apart by 1 to 2 % of the way that they went.
    """
    if accelerator == "cpu":
        return equal(one, many)
    weights, other_weights = (parameters_to_vector(model.parameters()) for model in (one, many))
    way = (weights - one.first_weights).norm()
    return bool((weights - other_weights).norm() < 0.1 * way)


OWNERS = [
    *(("module", hook) for hook in BETWEEN),
    *(("callback", hook) for hook in BETWEEN if hasattr(Callback, hook)),
    *(("data", hook) for hook in BATCH_HOOKS),
]


BASES = {"module": DiscreteVAE, "callback": Bare, "data": Images}


def train_with(hooks, owner, data, accelerator, capture):
    """Train with hooks of an owner of one's own; what :func:`train` returns, and the calls."""
    called = []
    kinds = {**BASES, owner: recording(BASES[owner], hooks, called)}
    callbacks = [kinds["callback"]()] if owner == "callback" else []
    schedule = functools.partial(StepLR, step_size=5)
    options = {"module": kinds["module"], "callbacks": callbacks, "data": kinds["data"]}
    return *train(data, accelerator, capture, **options, lr_scheduler=schedule), called


@pytest.fixture(scope="module")
def eager_runs():
    """Eager runs with all hooks of an owner, by owner and device."""
    return {}


@pytest.mark.parametrize(("owner", "hook"), OWNERS)
def test_a_hook_is_called_at_every_step_or_steps_are_eager(
    owner, hook, data, accelerator, eager_runs
):
    if (owner, accelerator) not in eager_runs:
        hooks = [name for other, name in OWNERS if other == owner]
        eager_runs[owner, accelerator] = train_with(hooks, owner, data, accelerator, False)
    one, *_, all_calls = eager_runs[owner, accelerator]
    many, _, replayed, why, calls = train_with([hook], owner, data, accelerator, True)
    assert calls == [call for call in all_calls if call[0] == hook] and len(calls) >= 12
    assert near(one, many, accelerator)
    assert replayed is (hook not in STEP_HOOKS)
    if hook in STEP_HOOKS:
        (line,) = why
        assert f"has a hook {hook} of its own" in line
    else:
        assert not why


def test_no_hook_of_lightning_is_left_out(data):
    """Whatever Lightning calls between the start and the end of a batch is on the lists."""
    of_module, of_callback = [], []
    names = {x for x in dir(LightningModule) if x.startswith("on_")} | set(BETWEEN)
    taken = [x for x in names if hasattr(DiscreteVAE, x) and callable(getattr(DiscreteVAE, x))]
    module = recording(DiscreteVAE, taken, of_module)
    callback = recording(Bare, [x for x in dir(Callback) if x.startswith("on_")], of_callback)
    schedule = functools.partial(StepLR, step_size=5)
    train(data, "cpu", False, module, [callback()], lr_scheduler=schedule, max_steps=1)
    for called in (of_module, of_callback):
        hooks = [name for name, _ in called]
        start, end = hooks.index(START_AND_END[0]), hooks.index(START_AND_END[1])
        assert set(hooks[start : end + 1]) <= set(BETWEEN)
    assert {name for name, _ in of_module} >= set(BETWEEN)
    assert set(dir(LightningDataModule)) >= set(BATCH_HOOKS)


# -- optimizers and schedules ----------------------------------------------------------------------


class Plain(DiscreteVAE):
    """The most ordinary subclass."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class ByEpoch(DiscreteVAE):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [StepLR(optimizer, 1, 0.1)]


class Plateau(DiscreteVAE):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)
        plan = {"scheduler": plateau, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": plan}


class Two(DiscreteVAE):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.5)
        cosine = {"scheduler": CosineAnnealingLR(optimizer, 12), "interval": "step"}
        every_third = {"scheduler": StepLR(optimizer, 1), "interval": "step", "frequency": 3}
        return [optimizer], [cosine, every_third]


KINDS = {
    Plain: {},
    ByEpoch: {},
    Plateau: {},
    Two: {"gradient_clip": 0.5},
    DiscreteVAE: {"lr_scheduler": functools.partial(CosineAnnealingLR, T_max=12)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_and_schedules_of_any_kind_are_replayed(kind, data, accelerator):
    one, trainer_one, *_ = train(data, accelerator, False, kind, **KINDS[kind])
    many, trainer_many, replayed, why = train(data, accelerator, True, kind, **KINDS[kind])
    assert replayed and not why and near(one, many, accelerator)
    states = [trainer.optimizers[0].state_dict() for trainer in (trainer_one, trainer_many)]
    assert states[0]["param_groups"] == states[1]["param_groups"], "kernels and rates, too"
    plans = [trainer.lr_scheduler_configs for trainer in (trainer_one, trainer_many)]
    for plan, other_plan in zip(*plans, strict=True):
        assert plan.scheduler.last_epoch == other_plan.scheduler.last_epoch > 0


@pytest.mark.parametrize("capture", [False, True])
def test_an_ordinary_subclass_is_eager_unless_asked(capture, data, accelerator):
    *_, replayed, why = train(data, accelerator, capture, Plain)
    assert replayed is capture and not why


REFUSED = {
    "optimizer is RMSprop, not one of": {"optimizer": torch.optim.RMSprop},
    "other than its learning rate have changed": {
        "lr_scheduler": functools.partial(OneCycleLR, max_lr=1e-2, total_steps=12)
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_replayed_is_eager_with_one_line(reason, data, accelerator):
    one, *_ = train(data, accelerator, False, **REFUSED[reason])
    many, _, replayed, (line,) = train(data, accelerator, True, **REFUSED[reason])
    assert reason in line and not replayed and near(one, many, accelerator)


@cuda
def test_a_falling_rate_does_not_capture_the_step_again(data, monkeypatch):
    captures = []
    begin = torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(
        torch.cuda.CUDAGraph,
        "capture_begin",
        lambda graph, *args, **options: [captures.append(1), begin(graph, *args, **options)],
    )
    train(data, "gpu", True, **KINDS[DiscreteVAE], callbacks=[FisherMonitor()])
    assert len(captures) == 1


def test_a_checkpoint_of_replayed_steps_resumes_in_an_eager_run(data, accelerator, tmp_path):
    """And the reverse: optimizers are saved as an eager run has them."""
    last = functools.partial(LastCheckpoint, tmp_path)
    straight, *_ = train(data, accelerator, False, Plain, [last()])
    for first, second in ((True, False), (False, True)):
        train(data, accelerator, first, Plain, [last()], max_steps=7)
        saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
        (group,) = saved["optimizer_states"][0]["param_groups"]
        assert not group["capturable"] and not isinstance(group["lr"], torch.Tensor)
        torch.manual_seed(5)
        model = Plain(num_latents=2, num_categories=3, capture=second, learning_rate=1e-2)
        trainer = quiet_trainer(
            max_steps=12,
            accelerator=accelerator,
            log_every_n_steps=1000,
            limit_val_batches=1,
            num_sanity_val_steps=0,
            enable_checkpointing=True,
            callbacks=[last()],
        )
        images = Images(str(data), batch_size=10, download=False)
        trainer.fit(model, datamodule=images, ckpt_path=tmp_path / "last.ckpt")
        assert near(straight, model, accelerator) and trainer.global_step == 12
