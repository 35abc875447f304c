"""Where steps are replayed: precisions and strategies; elsewhere one line says why not."""
# ruff: noqa: F811 - a fixture is an argument

from types import SimpleNamespace

import pytest
import torch
from cases_replay import train, without_cuda  # noqa: F401 - a fixture
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from catnat.lit_modules import DiscreteVAE, MLPDiscreteVAE
from catnat.lit_modules.step_module import StepModule

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
    "capture is False": {"capture": False},
    "the strategy is DDPStrategy, not one device": {"strategy": on_cuda(DDPStrategy)},
}


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_not_to_replay_is_told(reason):
    def why(options):
        model = SimpleNamespace(**options, trainer=SimpleNamespace(**options))
        return StepModule._why_eager(model)

    options = {
        "strategy": on_cuda(SingleDeviceStrategy),
        "precision": "32-true",
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "capture": None,
        "why_host_needed": lambda: None,
    }
    assert why(options) is None and why(options | {"precision": "bf16-mixed"}) is None
    assert reason in why(options | REASONS[reason])


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


def test_says_why_not(data):
    with pytest.warns(UserWarning, match="not replayed as CUDA graphs: the device is not a CUDA"):
        train(DiscreteVAE, True, 1, data)
