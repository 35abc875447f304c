"""CUDA graphs: the kernels of a step launched at once, not one by one."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output")
WARM_UP = 3  # steps taken eagerly, on a side stream, before one is captured


class StepGraph(Generic[Output]):
    """A step of work, captured once and replayed on every later batch of the same shape.

    A batch is a tensor or a sequence of tensors. The first calls, and batches of another shape,
    dtype or kind, run eagerly and are real steps all the same, and noise goes on from torch's
    generator, so that a replayed run takes the steps an eager one would take.

    Args:
        step: takes a batch, works (updates parameters, say) and returns tensors (the loss);
            device work alone.
    """

    def __init__(self, step: Callable[[Any], Output]) -> None:
        self.step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input: list[Tensor] | None = None
        self._output: Output | None = None
        self._stream = torch.cuda.Stream()

    def reset(self) -> None:
        """Capture anew at the next call: something that was baked in has changed."""
        self._graph = None

    def __call__(self, batch: Any) -> Output:
        """Take one step and return what it gives, which the next call overwrites."""
        given = tensors_of(batch)
        if given is not None and self._input is None:
            self._input = [each.clone() for each in given]
        if self._calls < WARM_UP or not same_shapes(given, self._input):
            self._calls += 1
            return self._eagerly(batch)
        assert given is not None and self._input is not None
        for mine, each in zip(self._input, given, strict=True):
            mine.copy_(each)
        if self._graph is None:
            self._capture(self._input[0] if isinstance(batch, Tensor) else tuple(self._input))
        assert self._graph is not None and self._output is not None
        self._graph.replay()
        return self._output

    def _eagerly(self, batch: Any) -> Output:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = self.step(batch)
        current.wait_stream(self._stream)
        return output

    def _capture(self, batch: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with (
            _garbage_waits(),
            torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            self._output = self.step(batch)


class Backlog:
    """Work that the device has not done yet; keeps the host from running far ahead of it.

    A host that waits here sleeps, so that many runs can share a machine. Left alone it would wait
    too, once the queue of the driver is full, but at full load.

    Args:
        most: parts of work that may be under way.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._events: deque[torch.cuda.Event] = deque()

    def add(self) -> None:
        """All work up to here is one more part; wait for the oldest if there are too many."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._events.append(event)
        if len(self._events) > self.most:
            self._events.popleft().synchronize()


@contextmanager
def _garbage_waits() -> Iterator[None]:
    """No cyclic garbage is collected inside: freeing an old graph would spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tensors_of(batch: Any) -> list[Tensor] | None:
    """The tensors of a batch, itself one or a sequence of them; None for any other kind."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, (list, tuple)) and all(isinstance(each, Tensor) for each in batch):
        return list(batch)
    return None


def same_shapes(one: list[Tensor] | None, other: list[Tensor] | None) -> bool:
    """Whether both are there, and alike in shapes and dtypes."""
    if one is None or other is None:
        return False
    return [(x.shape, x.dtype) for x in one] == [(x.shape, x.dtype) for x in other]
