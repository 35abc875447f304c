"""CUDA graphs: a step's kernels are launched all at once, not one by one.

A step that is captured reads everything that changes between two steps on the device, and never
waits for the host. Besides :class:`StepGraph`, which captures, this file has what follows from
that: numbers that live on the device, and optimizers that can be captured.
"""

import gc
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from catnat.rng import State

WARM_UP = 3  # steps taken eagerly, on a side stream, before one is captured
# What an optimizer needs to be captured: its state on the device, one kernel for all parameters.
CAPTURABLE = ("capturable", "fused")
KERNELS = (*CAPTURABLE, "foreach")  # options that choose the kernels of an optimizer


# -- capturing -------------------------------------------------------------------------------------


class StepGraph:
    """A step of work, captured once and replayed on every later batch of the same shape.

    A batch is a tensor, or a container of tensors. The first calls, and batches of another shape,
    dtype or kind, run eagerly and are real steps all the same. Noise continues from torch's
    generator, so a replayed run takes the same steps as an eager run.

    Args:
        step: takes a batch, works (updates parameters, say) and returns tensors (the loss). All of
            its work happens on the device.
    """

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self.step = step
        self._calls = 0
        self._graph: Any = None  # a torch.cuda.CUDAGraph, once there is one
        self._input: list[Any] = []  # which replays read
        self._layout: Any = None  # of the batches that are replayed
        self._output: Any = None
        self._stream = torch.cuda.Stream()

    def reset(self) -> None:
        """Capture again at the next call, because a constant of the captured step has changed."""
        self._graph = None

    def __call__(self, batch: Any) -> Any:
        """Take one step and return its output, which the next call overwrites."""
        tensors, structure = tree_flatten(batch)
        is_plain = all(isinstance(x, Tensor) for x in tensors)
        layout = structure, [(x.shape, x.dtype) for x in tensors] if is_plain else None
        if is_plain and self._layout is None:
            self._layout = layout
            self._input = [x.clone() for x in tensors]
        if self._calls < WARM_UP or not is_plain or layout != self._layout:
            self._calls += 1
            return self._eagerly(batch)
        for static, x in zip(self._input, tensors, strict=True):
            static.copy_(x)
        if self._graph is None:
            self._capture(tree_unflatten(self._input, structure))
        self._graph.replay()
        return self._output

    def _eagerly(self, batch: Any) -> Any:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = self.step(batch)
        current.wait_stream(self._stream)
        return output

    def _capture(self, batch: Any) -> None:
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        was_enabled = gc.isenabled()
        gc.disable()  # cyclic garbage waits: freeing an old graph would spoil a capture
        # The graph gets a workspace of cuBLAS that is its own. Lightning frees the common one when
        # an evaluation ends, and a later replay would write to memory that is gone.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._output = self.step(batch)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if was_enabled:
                gc.enable()
        # Torch sets the place of the noise back to 0 on the stream that captures. On a busy device
        # that could come after the first replay has set the place: its noise would restart.
        current.wait_stream(self._stream)
        self._graph = graph  # only now: a capture that fails leaves no graph to replay


def why_not_captured(
    capture: bool | None, device: torch.device, obstacles: Mapping[str, bool]
) -> str | None:
    """Why steps on a device are not captured; None if they are.

    Args:
        capture: value of the user's option; False is a reason.
        device: where the steps run.
        obstacles: further reasons, each with whether it applies; the first that does is returned.

    >>> why_not_captured(None, torch.device("cpu"), {})
    'the device is not a CUDA device'
    """
    if capture is False:
        return "capture is False"
    if device.type != "cuda":
        return "the device is not a CUDA device"
    return next((reason for reason, applies in obstacles.items() if applies), None)


# -- numbers that a captured step reads, and results that the host reads ---------------------------


class DeviceScalar(nn.Module):
    """A number that steps read on the device, and the host without waiting for the device.

    Calling it gives the tensor, ``float`` the number. It moves with the module that has it, and is
    not part of the module's ``state_dict``.

    >>> temperature = DeviceScalar(1.0)
    >>> temperature.set(0.5)
    >>> temperature(), float(temperature)
    (tensor(0.5000), 0.5)
    """

    tensor: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("tensor", torch.tensor(float(value)), persistent=False)
        self._value = float(value)

    def set(self, value: float) -> None:
        """Change the number, in place, so that a captured step sees it."""
        if value != self._value:
            self._value = float(value)
            self.tensor.fill_(value)

    def forward(self) -> Tensor:
        """The number as a tensor on the device, ()."""
        return self.tensor

    def __float__(self) -> float:
        return self._value


def send(x: Tensor) -> Callable[[], Tensor]:
    """Start to copy ``x`` to the host; call the result to get the copy, once it has arrived.

    Waiting at once would idle a GPU: it has nothing to do while the host waits.
    """
    # Without waiting, the copy is in pinned memory.
    host = x.detach().to("cpu", non_blocking=x.is_cuda, copy=True)
    if not x.is_cuda:
        return lambda: host
    event = torch.cuda.Event()
    event.record()

    def receive() -> Tensor:
        event.synchronize()
        return host

    return receive


# -- optimizers ------------------------------------------------------------------------------------


def capturable_options(kind: Callable[..., Optimizer]) -> dict[str, bool]:
    """The options with which a kind of optimizer can be captured, if it supports them."""
    parameters = inspect.signature(kind).parameters
    return {name: True for name in CAPTURABLE if name in parameters}


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Move everything that a step of the optimizer reads to the device, the learning rate too."""
    for group in optimizer.param_groups:
        group |= {name: True for name in CAPTURABLE if name in group}
        if "fused" in group:
            group["foreach"] = None  # it would come first
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)


def make_portable(optimizer: Optimizer) -> None:
    """Undo :func:`make_capturable`; other optimizers stay as they are."""
    state = optimizer.state_dict()
    portable = portable_state(state)
    if portable is not state:
        optimizer.load_state_dict(portable)


def portable_state(state: State) -> State:
    """The state of an optimizer as it would be if the optimizer had never been capturable."""
    if not any(isinstance(group["lr"], Tensor) for group in state["param_groups"]):
        return state
    groups = [
        group | {"capturable": False, "fused": None, "lr": float(group["lr"])}
        for group in state["param_groups"]
    ]
    states = {
        key: {name: x.cpu() if name == "step" else x for name, x in values.items()}
        for key, values in state["state"].items()
    }
    return state | {"state": states, "param_groups": groups}


def set_learning_rate(group: dict[str, Any], rate: float, device: torch.device | None) -> None:
    """Set the learning rate of a parameter group.

    Args:
        group: the parameter group.
        rate: the learning rate.
        device: where a captured step reads the rate: there it is changed in place. None: no step
            is captured, and the rate is a plain number.
    """
    present = group["lr"]
    if device is None:
        group["lr"] = rate
    elif isinstance(present, Tensor) and present.device.type == device.type:
        present.fill_(rate)
    else:
        group["lr"] = torch.tensor(rate, device=device)


def keep_kernels(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, which from now on keeps its own kernels when it loads a state.

    A saved state names the kernels (fused, capturable, foreach) of the device that it was saved on.
    The kernels of this optimizer are those of the device that it is on.
    """
    optimizer.register_load_state_dict_pre_hook(_with_kernels_of)
    return optimizer


def _with_kernels_of(optimizer: Optimizer, state: State) -> State:
    groups = [
        saved | {name: group[name] for name in KERNELS if name in group}
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=False)
    ]
    return state | {"param_groups": groups + state["param_groups"][len(groups) :]}
