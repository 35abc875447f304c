"""Without its noise, a run that is trained together with others is the run of train.py."""

import json

import pytest
import torch
import yaml
from cases_together import run_all, write_plan

import train
from catnat.graphs import sample_graphs
from experiments import runs


def same_gumbel(x, generator=None):
    """Noise that is the same in every step, for all models of one size."""
    numbers = torch.arange(x.shape[-3:].numel(), dtype=x.dtype)
    return (7 * numbers).sin().view(x.shape[-3:]).expand(x.shape)


def same_graphs(theta, count, generator=None):
    """Graphs from noise that is the same in every step; evaluation keeps its own noise."""
    if not torch.is_grad_enabled():
        return sample_graphs(theta, count, generator)
    noise = torch.rand(count, *theta.shape[-2:], generator=torch.Generator().manual_seed(5))
    return (noise.view(count, *[1] * (theta.dim() - 2), *theta.shape[-2:]) < theta).to(theta.dtype)


@pytest.fixture(autouse=True)
def _same_noise(monkeypatch):
    for place in ("catnat.estimators", "experiments.together.vaes"):
        monkeypatch.setattr(f"{place}.gumbel_like", same_gumbel)
    for place in ("catnat.lit_modules.graph", "experiments.together.graphs"):
        monkeypatch.setattr(f"{place}.sample_graphs", same_graphs)


TABLES = {
    "vae": (
        # An epoch has 6 batches. The temperature is another one every two steps.
        {"optimizer": "sgd", "temperature_steps": 2, "temperature_rate": 0.1, "head": "natural"},
        {"num_categories": [3, 4], "head_options": ['{"tail": 0.01}', '{"mix": 0.05}']},
    ),
    "gsl": (
        # 13 pairs of 130 are validated, 8 and 5.
        {"batch_size": 8, "theta_init": [0.0, 0.9], "test_passes": 2, "num_pairs": 130},
        {"theta": [0.5, 0.75], "head": ["softmax", "sparsemax"]},
    ),
}


@pytest.mark.parametrize("model", TABLES)
def test_a_run_takes_the_steps_of_train_py(model, tmp_path, data):
    options, grid = TABLES[model]
    root = data if model != "gsl" else tmp_path
    steps = {"max_steps": 14, "val_check_interval": 5}
    path = write_plan(tmp_path, model, root, seeds=(1,), **options, **steps)
    content = yaml.safe_load(path.read_text())
    content["grid"] = grid | {"learning_rate": [0.01]}
    content["seeds"] = [3]
    path.write_text(yaml.safe_dump(content))
    for number, run in enumerate(run_all(path, tmp_path / "together")[1:3]):
        alone = tmp_path / f"alone{number}"
        assert train.main([*run.command[2:-1], f"--default_root_dir={alone}"]) == 0
        folders = runs.version(run), next(alone.glob("*/*/version_0"))
        ours, theirs = (
            torch.load(each / "checkpoints" / "last.ckpt", weights_only=True) for each in folders
        )
        for name, value in theirs["state_dict"].items():
            assert torch.allclose(ours["state_dict"][name], value, rtol=1e-3, atol=1e-5), name
        ours, theirs = (json.loads((each / "metrics.json").read_text()) for each in folders)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
