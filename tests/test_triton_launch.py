"""Launches that keep the binary give it the arguments that Triton would; kernels are made up."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from catnat import make_head
from catnat.ops import triton_launch, triton_path, triton_softmax, triton_sparsemax, triton_tree
from catnat.ops.triton_launch import Launch

STREAM = 77
SETTINGS = {"rows": 5, "rate": 0.5, "R": 4, "num_warps": 2}


class Binary:
    """What Triton returns from a launch."""

    def __init__(self, name: str) -> None:
        self.function, self.packed_metadata = f"function of {name}", f"metadata of {name}"
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class Kernel:
    """A kernel that counts the calls in which Triton would look for a binary."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.binary = Binary("kernel")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*tensors: torch.Tensor, **settings: Any) -> Binary:
            self.calls.append((grid, tensors, settings))
            return self.binary

        return call


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Tensors seem to be on device 0, which is the current one until ``current`` is changed."""
    state = {"current": 0}
    monkeypatch.setattr(triton_launch, "KEEPS_BINARIES", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state["current"], raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False
    )
    return state


def test_the_second_launch_hands_the_binary_what_triton_would(on_gpu: dict[str, int]) -> None:
    kernel, scores, out = Kernel(), torch.randn(5, 4), torch.empty(5, 4)
    launch = Launch(kernel, 2, SETTINGS)
    launch(scores, out)
    assert kernel.calls == [((2,), (scores, out), SETTINGS)] and not kernel.binary.launches
    other = torch.empty(5, 4)
    launch(scores, other)
    assert len(kernel.calls) == 1
    binary = kernel.binary
    start = (2, 1, 1, STREAM, binary.function, binary.packed_metadata, None, None, None)
    addresses = (scores.data_ptr(), other.data_ptr())
    assert binary.launches == [(*start, *addresses, 5, 0.5, 4)]


def test_triton_launches_where_a_kept_binary_could_be_the_wrong_one(
    on_gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, scores, out = Kernel(), torch.randn(5, 4), torch.empty(5, 4)
    launch = Launch(kernel, 2, SETTINGS)
    launch(scores.view(-1)[1:], out)  # not a multiple of 16: that binary is not kept
    launch(scores, out)
    assert len(kernel.calls) == 2
    launch(scores, out)
    assert len(kernel.calls) == 2
    launch(scores.view(-1)[1:], out)
    assert len(kernel.calls) == 3
    on_gpu["current"] = 1  # another device than that of the tensors
    launch(scores, out)
    assert len(kernel.calls) == 4
    on_gpu["current"] = 0
    monkeypatch.setattr(triton_launch, "KEEPS_BINARIES", False)  # another version of Triton
    launch(scores, out)
    assert len(kernel.calls) == 5 and len(kernel.binary.launches) == 1


def test_a_profiler_is_told_of_every_launch(on_gpu: dict[str, int]) -> None:
    hooks = triton_launch.triton.knobs.runtime.launch_enter_hook
    kernel, scores = Kernel(), torch.randn(5, 4)
    launch = Launch(kernel, 2, SETTINGS)
    launch(scores)

    def hook(metadata: object) -> None:
        pass

    hooks.add(hook)
    try:
        launch(scores)
    finally:
        hooks.remove(hook)
    assert len(kernel.calls) == 2
    launch(scores)
    assert len(kernel.calls) == 2


def test_settings_are_in_the_order_of_the_arguments_of_their_kernel() -> None:
    split = make_head("natural", 8).split
    launches = [triton_tree._kept_launch(name, 9, 8, split, True) for name in triton_tree._KERNELS]
    paths = triton_path._KERNELS
    launches += [triton_path._kept_launch(name, 9, 9, 8, split, True) for name in paths]
    for module in (triton_sparsemax, triton_softmax):
        launches += [module._kept_launch(name, 9, 8) for name in module._KERNELS]
    for launch in launches:
        given = [name for name in launch.settings if name != "num_warps"]
        names = launch.kernel.arg_names
        assert given == names[len(names) - len(given) :]
        assert names[0] in ("scores", "log_probs") and len(names) - len(given) <= 5


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "sigmoid", "natural"])
def test_a_call_of_a_head_asks_triton_once_for_each_pass(
    name: str, on_gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = Kernel(), Kernel()
    tuned = {"forward": (forward, 1024, 1), "backward": (backward, 512, 2)}
    monkeypatch.setattr(triton_tree, "_KERNELS", tuned)
    for module in (triton_sparsemax, triton_softmax):
        monkeypatch.setattr(module, "_KERNELS", {"forward": forward, "backward": backward})
    monkeypatch.setattr("catnat.ops.dispatch.kernels_for", lambda *given: "triton")
    caches = [each._kept_launch for each in (triton_tree, triton_sparsemax, triton_softmax)]
    for cache in caches:
        cache.cache_clear()
    head = make_head(name, 32)
    scores = torch.randn(6, 7, head.num_scores, requires_grad=True)
    for _ in range(3):
        out = head.log_probs(scores)
        assert out.shape == (6, 7, 32)
        (grad,) = torch.autograd.grad(out, scores, torch.randn(6, 7, 32))
        assert grad.shape == scores.shape
    for kernel in (forward, backward):
        assert len(kernel.calls) == 1 and len(kernel.binary.launches) == 2
    for cache in caches:
        cache.cache_clear()


def test_heads_of_many_dimensions_go_through_the_interpreted_kernels() -> None:
    code = """
import torch
from catnat import make_head
from catnat.ops import dispatch

torch.manual_seed(0)
for name in ("softmax", "sparsemax", "sigmoid", "natural"):
    head = make_head(name, 5)
    for shape in ((), (3,), (2, 3), (2, 0, 3)):
        scores = torch.randn(*shape, head.num_scores)
        for given in (scores, scores.mT.contiguous().mT if len(shape) > 1 else scores):
            results = []
            for kind in ("triton", None):
                dispatch.kernels_for = lambda *a, kind=kind: kind
                leaf = given.clone().requires_grad_()
                out = head.log_probs(leaf)
                (grad,) = torch.autograd.grad((out * torch.arange(5)).sum(), leaf)
                results.append((out, grad))
            for ours, theirs in zip(*results):
                assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-5)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1"},  # read when Triton is imported
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
