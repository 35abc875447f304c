"""Launches that keep the binary give it the arguments that Triton would; kernels are made up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from catnat import TreeLinear, make_head
from catnat.ops import (
    adam_rows,
    fused_loss,
    path_scores,
    triton_launch,
    triton_layer,
    triton_path,
    triton_rows,
    triton_softmax,
    triton_sparsemax,
    triton_tree,
)
from catnat.ops.triton_launch import Launch
from catnat.optim import RowAdam

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


def test_numbers_and_programs_of_a_call_reach_the_binary(on_gpu: dict[str, int]) -> None:
    kernel, scores = Kernel(), torch.randn(5, 4)
    launch = Launch(kernel, None, SETTINGS)
    launch(scores, numbers=(7, 0.5), programs=(3, 2))
    assert kernel.calls == [((3, 2), (scores, 7, 0.5), SETTINGS)]
    launch(scores, numbers=(9, 0.25), programs=(6, 4))
    binary = kernel.binary
    start = (6, 4, 1, STREAM, binary.function, binary.packed_metadata, None, None, None)
    assert binary.launches == [(*start, scores.data_ptr(), 9, 0.25, 5, 0.5, 4)]


@pytest.mark.parametrize("number", [1, 16, 2**31, 7.0])
def test_triton_is_asked_again_for_a_number_of_another_kind(
    number: float, on_gpu: dict[str, int]
) -> None:
    kernel, scores = Kernel(), torch.randn(5, 4)
    launch = Launch(kernel, 2, SETTINGS)
    for asked, given in ((1, 7), (1, 9), (2, number), (2, number), (2, 11)):
        launch(scores, numbers=(given,))
        assert len(kernel.calls) == asked


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


@pytest.mark.parametrize("mean", [True, False])
def test_the_loss_of_a_layer_gives_its_kernels_all_settings_in_order(mean: bool) -> None:
    dtypes = (torch.float16, torch.float16, None, torch.int64)
    split = make_head("natural", 8).split
    known = fused_loss._launches(dtypes, (8, 100, 3), split, (True, True), True, -100, mean)
    changing = {"mean": 1, "near": 1, "begins": 1, "starts": 1, "rows": 2}
    tensors = {"forward": 10, "mean": 4, "near": 5, "hidden": 6, "begins": 2, "starts": 2}
    for name, launch in known._asdict().items():
        given = [each for each in launch.settings if each != "num_warps"]
        before = tensors.get(name, 10) + changing.get(name, 0)
        assert launch.kernel.arg_names[before:] == given, name


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


@pytest.fixture
def layer_kernels(
    on_gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Kernel]]:
    """Kernels that do nothing in place of those of a layer and of its optimizer."""
    monkeypatch.setattr(path_scores, "_has_triton", lambda *tensors: True)
    monkeypatch.setattr(adam_rows, "_has_triton", lambda *tensors: True)
    monkeypatch.setattr(adam_rows, "_kernel", lambda: None)
    monkeypatch.setattr(fused_loss, "_promised", lambda number: lambda: 9)  # at least one a level
    kernels = {name: Kernel() for name in (*fused_loss._Launches._fields, "adam")}
    for name, kernel in kernels.items():
        module = triton_rows if name == "adam" else triton_layer
        monkeypatch.setattr(module, f"_{name}_kernel", kernel)
    fused_loss._launches.cache_clear()
    yield kernels
    fused_loss._launches.cache_clear()


@pytest.mark.parametrize("bias", [True, False])
def test_a_step_of_a_layer_asks_triton_once_for_each_kernel(
    bias: bool, layer_kernels: dict[str, Kernel]
) -> None:
    layer = TreeLinear(16, 1000, sparse=True, upper_levels=3, bias=bias)
    optimizer = RowAdam(layer.parameters())
    for rows in (5, 6, 7):  # of any number of rows
        hidden = torch.randn(rows, 16, requires_grad=True)
        loss = layer.nll(hidden, torch.randint(1000, (rows,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, kernel in layer_kernels.items():
        asked = 2 if name == "adam" and bias else 1  # for the weight and for the bias
        assert len(kernel.calls) == asked and len(kernel.binary.launches) == 2 * asked, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_dtype_of_any_tensor_is_another_launch(
    dtype: torch.dtype, layer_kernels: dict[str, Kernel]
) -> None:
    layer = TreeLinear(16, 1000, upper_levels=3)
    hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
    layer.nll(hidden, target)
    for index in (torch.int64, torch.int32):
        layer.to(dtype).nll(hidden.to(dtype), target.to(index))
    known = {dtype, torch.float32}
    assert len(layer_kernels["forward"].calls) == len(known) + 1


def test_the_device_has_work_while_the_host_waits_for_the_number_of_rows(
    layer_kernels: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched_before = []

    def wait() -> int:
        launched_before.extend(name for name, kernel in layer_kernels.items() if kernel.calls)
        return 9

    monkeypatch.setattr(fused_loss, "_promised", lambda number: wait)
    layer = TreeLinear(16, 1000, sparse=True, upper_levels=3)
    layer.nll(torch.randn(5, 16, requires_grad=True), torch.randint(1000, (5,))).backward()
    assert launched_before == ["forward", "mean", "near", "hidden", "begins", "starts"]


@pytest.mark.slow
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
