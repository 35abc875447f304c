"""M models trained as one batched model take the steps that M separate models take."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from catnat.lit_modules import DiscreteVAE

BENCHMARKS = str(Path(__file__).parent.parent / "benchmarks")
B, N, K = 5, 3, 4
RATES = (1e-3, 1e-2)
BEFORE_NORM = ("encoder.2.bias", "decoder.5.bias", "decoder.8.bias")


@pytest.fixture
def many_vaes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import many_vaes

    return many_vaes


@pytest.mark.parametrize(
    "heads", [("natural", "natural"), ("softmax", "softmax"), ("natural", "sigmoid")]
)
def test_a_batched_step_is_the_step_of_each_model(many_vaes, heads, monkeypatch):
    torch.manual_seed(0)
    separate = [DiscreteVAE(head, N, K).double() for head in heads]
    many = many_vaes.ManyVAEs(separate, RATES)
    adams = [
        torch.optim.Adam(model.parameters(), lr=rate)
        for model, rate in zip(separate, RATES, strict=True)
    ]
    for temperature in (1.0, 0.6):
        images, noise = torch.rand(len(heads), B, 28, 28, dtype=torch.float64), many.noise(B)
        many.temperature.fill_(temperature)
        losses = many.step(images, noise)
        for i, (model, adam) in enumerate(zip(separate, adams, strict=True)):
            model.temperature.set(temperature)
            own = noise[i]
            monkeypatch.setattr("catnat.estimators.gumbel_like", lambda *_, g=own, **__: g)
            loss = model.step_loss(images[i, :, None])
            adam.zero_grad()
            loss.backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
            adam.step()
            assert torch.allclose(losses[i], loss, rtol=1e-12)
            state, mine = model.state_dict(), many.state_of(i)
            counters = {name for name in state if name.endswith("num_batches_tracked")}
            assert set(mine) == set(state) - counters
            for name, value in mine.items():
                # A bias before a norm has gradient 0 but for rounding, and Adam divides by 1e-8.
                loose = name in BEFORE_NORM or name.endswith("running_mean")
                rounding = 1e-7 if loose else 1e-11
                assert torch.allclose(value, state[name], rtol=1e-9, atol=rounding), name


PATCHES = """
import torch
import patches
import triton_patches

for n, padding in ((28, 1), (14, 1), (7, 0)):
    x = torch.randn(2, n, n, 3)
    columns = patches.patches(x, padding)
    assert torch.equal(triton_patches.patches(x, padding), columns)
    image = patches.spread(columns, padding)
    assert image.shape == x.shape
    assert torch.allclose(triton_patches.spread(columns, padding), image, atol=1e-6)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
def test_the_kernels_of_patches_agree_with_plain_torch():
    path = os.pathsep.join([BENCHMARKS, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PATCHES],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
