"""M models trained as one batched model take the steps that M separate models take."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from catnat import SoftmaxHead
from catnat.lit_modules import DiscreteVAE, MLPDiscreteVAE
from experiments.together import patches
from experiments.together.stack import neighbours
from experiments.together.vaes import ManyMLPVAEs, ManyVAEs

B = 5
BEFORE_NORM = ("encoder.2.bias", "decoder.5.bias", "decoder.8.bias")
GROUPS = [  # head, N, K
    [("natural", 3, 4), ("natural", 3, 4)],
    [("softmax", 3, 4), ("sparsemax", 3, 4)],
    [("natural", 3, 4), ("sigmoid", 3, 4), ("softmax", 3, 4), ("softmax", 2, 5)],
]


def separate_models(kind, group, optimizer):
    torch.manual_seed(0)
    rates = [1e-3 * 3**i for i in range(len(group))]
    return [
        kind(head, N, K, learning_rate=rate, optimizer=optimizer).double()
        for (head, N, K), rate in zip(group, rates, strict=True)
    ]


def assert_same_state(many, number, model):
    state, mine = model.state_dict(), many.state_of(number)
    assert set(mine) == set(state)
    for name, value in mine.items():
        # A bias before a norm has gradient 0 but for rounding, and Adam divides by 1e-8.
        loose = name in BEFORE_NORM or name.endswith("running_mean")
        rounding = 1e-7 if loose else 1e-11
        assert torch.allclose(value, state[name], rtol=1e-9, atol=rounding), name


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("group", GROUPS)
def test_a_batched_step_is_the_step_of_each_model(group, optimizer, monkeypatch):
    separate = separate_models(DiscreteVAE, group, optimizer)
    many = ManyVAEs(separate)
    optimizers = [each.configure_optimizers() for each in separate]
    for step in (0, 20_000):
        images, noise = torch.rand(len(group), B, 1, 28, 28, dtype=torch.float64), many.noise(B)
        many.prepare_step(step)
        losses = many.step(images, noise)
        own_noise = [each for part in noise for each in part]
        for i, (model, taken) in enumerate(zip(separate, optimizers, strict=True)):
            model.prepare_step(step)
            own = own_noise[i]
            monkeypatch.setattr("catnat.estimators.gumbel_like", lambda *_, g=own, **__: g)
            loss = model.step_loss(images[i])
            taken.zero_grad()
            loss.backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
            taken.step()
            assert torch.allclose(losses[i], loss, rtol=1e-12)
            assert_same_state(many, i, model)


@pytest.mark.parametrize("group", GROUPS[1:])
def test_a_batched_step_by_score_function_is_the_step_of_each_model(group, monkeypatch):
    separate = separate_models(MLPDiscreteVAE, group, "adam")
    many = ManyMLPVAEs(separate)
    optimizers = [each.configure_optimizers() for each in separate]
    for step in range(2):
        images = torch.rand(len(group), B, 1, 28, 28, dtype=torch.float64).bernoulli()
        noise = many.noise(B)
        many.prepare_step(step)
        losses = many.step(images, noise)
        own_noise = [each for part in noise for each in part]
        for i, (model, taken) in enumerate(zip(separate, optimizers, strict=True)):
            q = model(images[i])
            index = (q.logits.detach() + own_noise[i]).argmax(-1)
            monkeypatch.setattr(type(q), "sample", lambda *_, index=index: index[None])
            loss = model.loss(images[i], q)
            taken.zero_grad()
            loss.backward()
            taken.step()
            assert torch.allclose(losses[i], loss, rtol=1e-12)
            assert_same_state(many, i, model)


def test_models_that_cannot_be_trained_together_are_named():
    with pytest.raises(ValueError, match=r"gradient_clip, got \[0.5, 1.0\]"):
        ManyVAEs([DiscreteVAE(gradient_clip=0.5), DiscreteVAE()])
    with pytest.raises(ValueError, match=r"lr_decay 1, got 0\.9"):
        ManyVAEs([DiscreteVAE(lr_decay=0.9)])
    with pytest.raises(ValueError, match="num_samples 2"):
        ManyMLPVAEs([MLPDiscreteVAE(num_samples=2)])


def test_heads_are_equal_by_their_options_and_not_by_what_they_print():
    class Sharp(SoftmaxHead, name="sharp-of-test"):
        def __init__(self, num_categories, width=1.0):
            super().__init__(num_categories)
            self.width = width

        def log_probs(self, scores):
            return super().log_probs(scores * self.width)

    models = [DiscreteVAE("sharp-of-test", 2, 3, head_options={"width": w}) for w in (1.0, 10.0)]
    assert repr(models[0].head) == repr(models[1].head)
    heads = neighbours(models)
    assert [(head.width, count) for head, count in heads] == [(1.0, 1), (10.0, 1)]
    assert len(neighbours([models[0], models[0]])) == 1


PATCHES = """
import torch
from experiments.together import patches, triton_patches

for n, padding in ((28, 1), (14, 1), (7, 0)):
    x = torch.randn(2, n, n, 3)
    columns = patches.patches(x, padding)
    assert torch.equal(triton_patches.patches(x, padding), columns)
    image = patches.spread(columns, padding)
    assert image.shape == x.shape
    assert torch.allclose(triton_patches.spread(columns, padding), image, atol=1e-6)
"""


@pytest.mark.parametrize("installed", [False, True])
def test_a_gpu_gathers_patches_by_triton_where_triton_is_installed(installed, monkeypatch):
    monkeypatch.setattr(patches, "HAS_TRITON", installed)
    if installed:
        pytest.importorskip("triton")
    found = patches._kernels(SimpleNamespace(is_cuda=True))
    assert (found == (patches.patches, patches.spread)) != installed


def test_more_numbers_than_the_kernels_of_patches_can_count_are_refused():
    pytest.importorskip("triton")
    from experiments.together import triton_patches

    images = torch.empty(20_000, 1000, 28, 28, 1, device="meta")
    with pytest.raises(ValueError, match="choose fewer with --jobs"):
        triton_patches.patches(images, 1)
    with pytest.raises(ValueError, match="choose fewer with --jobs"):
        triton_patches.spread(torch.empty(2000, 1000, 14, 14, 9, device="meta"), 1)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
def test_the_kernels_of_patches_agree_with_plain_torch():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PATCHES],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
