"""Where steps are replayed: precisions and strategies; elsewhere one line says why not."""
# ruff: noqa: F811 - a fixture is an argument

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases_callbacks import quiet_trainer
from cases_replay import train, without_cuda  # noqa: F401 - a fixture
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE, MLPDiscreteVAE
from catnat.lit_modules.cuda_graph_steps import why_not_replayed

CUDA = torch.device("cuda", 0)


def on_cuda(kind):
    """A strategy of a kind that would run on CUDA."""
    strategy = object.__new__(kind)
    if isinstance(strategy, SingleDeviceStrategy):
        strategy._root_device = CUDA
        return strategy
    strategy.cluster_environment, strategy.parallel_devices = None, [CUDA]
    return strategy


REASONS = {
    "the host is needed": {"why_host_needed": lambda: "the host is needed"},
    "16-mixed, not 32-true or bf16-mixed": {"precision": "16-mixed"},
    "accumulated": {"accumulate_grad_batches": 2},
    "the Trainer clips gradients": {"gradient_clip_val": 1.0},
    "detects anomalies": {"_detect_anomaly": True},
    "automatic_optimization is False": {"automatic_optimization": False},
    "capture is False": {"capture": False},
    "the strategy is DDPStrategy, not one device": {"strategy": on_cuda(DDPStrategy)},
    "the optimizer is RMSprop, not one of Adam, AdamW, SGD": {"kind": torch.optim.RMSprop},
    "the learning rate is a tensor": {"kind": partial(torch.optim.Adam, lr=torch.tensor(0.1))},
}


def why_not(options):
    """Why steps on CUDA are not replayed, with these options of the model and its Trainer."""
    options = {
        "strategy": on_cuda(SingleDeviceStrategy),
        "precision": "32-true",
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "_detect_anomaly": False,
        "callbacks": [],
        "kind": torch.optim.Adam,
        "capture": True,
        "automatic_optimization": True,
        "why_host_needed": lambda: None,
    } | options
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizers = [options["kind"]([parameter])]
    trainer = SimpleNamespace(optimizers=optimizers, **options)
    return why_not_replayed(SimpleNamespace(trainer=trainer, **options))


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_not_to_replay_is_told(reason):
    assert why_not({}) is None and why_not({"precision": "bf16-mixed"}) is None
    assert reason in why_not(REASONS[reason])


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

    options = {"precision": "bf16-mixed", "log_every_n_steps": 20, "optimizer": torch.optim.SGD}
    one, _, log_one = train(model_class, False, 20, data, **options)
    many, _, log_many = train(model_class, True, 20, data, **options)
    assert log_many.series("train/loss")[19] == pytest.approx(log_one.series("train/loss")[19])
    torch.testing.assert_close(dict(many.named_parameters()), dict(one.named_parameters()))
    train(Seen, True, 2, data, **options | {"log_every_n_steps": 2})
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_says_why_not(data):
    images = MNISTDataModule(str(data), batch_size=10, download=False)
    model = DiscreteVAE(num_latents=2, num_categories=2, capture=True)
    with pytest.warns(UserWarning, match="not replayed as CUDA graphs: the device is not a CUDA"):
        quiet_trainer(max_steps=1, limit_val_batches=0).fit(model, datamodule=images)
    assert not model.replays
