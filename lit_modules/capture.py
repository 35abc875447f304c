"""Training steps replayed as CUDA graphs: the kernels of a step launched at once, not one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

STEPS_PER_BATCH = 20  # Lightning's own work for a batch takes as long as a replayed step
WARM_UP = 3  # steps taken eagerly, on a side stream, before one is captured


class StepGraph:
    """An optimizer step, captured once and replayed on every later batch of the same shape.

    The first calls and batches of another shape run eagerly and are real steps all the same, and
    noise goes on from torch's generator, so that a replayed run takes the steps an eager one
    would take.

    Args:
        step: takes a batch, updates the parameters and returns the loss; device work alone.
        generators: what else inside the step draws random numbers, besides torch's default.
    """

    def __init__(
        self, step: Callable[[Tensor], Tensor], generators: list[torch.Generator] | None = None
    ) -> None:
        self.step = step
        self.generators = generators or []
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._stream = torch.cuda.Stream()

    def reset(self) -> None:
        """Capture anew at the next call: something that was baked in has changed."""
        self._graph = None

    def __call__(self, batch: Tensor) -> Tensor:
        """Take one step and return its loss, which the next call overwrites."""
        if self._input is None:
            self._input = batch.clone()
        if batch.shape != self._input.shape or self._calls < WARM_UP:
            self._calls += 1
            return self._eagerly(batch)
        self._input.copy_(batch)
        if self._graph is None:
            self._capture()
        assert self._graph is not None and self._output is not None
        self._graph.replay()
        return self._output

    def _eagerly(self, batch: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self.step(batch)
        current.wait_stream(self._stream)
        return loss

    def _capture(self) -> None:
        assert self._input is not None
        self._graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            self._graph.register_generator_state(generator)
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._output = self.step(self._input)


@contextmanager
def aside(device: torch.device) -> Iterator[Callable[[], None]]:
    """Run a block on another stream; yields what makes the present one wait for it."""
    if device.type != "cuda":
        yield lambda: None
        return
    present = torch.cuda.current_stream(device)
    other = torch.cuda.Stream(device)
    other.wait_stream(present)
    with torch.cuda.stream(other):
        yield lambda: present.wait_stream(other)


def why_not(module: LightningModule) -> str | None:
    """Why the steps of a module cannot be captured; None if they can."""
    trainer = module.trainer
    if trainer.strategy.root_device.type != "cuda":
        return "the device is not a CUDA device"
    if trainer.world_size > 1:
        return "there is more than one process"
    if trainer.precision != "32-true":
        return f"the precision is {trainer.precision}, not 32-true"
    if trainer.accumulate_grad_batches > 1:
        return "gradients are accumulated over batches"
    if trainer.gradient_clip_val is not None:
        return "the Trainer clips gradients; use the model's gradient_clip"
    return None


def count_steps(trainer: Trainer, steps: int) -> None:
    """Tell Lightning that so many optimizer steps were taken within one batch.

    Both of its counters are kept, so that a checkpoint of a replayed run continues in an eager
    one and the other way round.
    """
    loop = trainer.fit_loop.epoch_loop
    replayed = loop.manual_optimization.optim_step_progress.total
    eager = loop.automatic_optimization.optim_progress.optimizer.step.total
    replayed.ready = replayed.completed = max(replayed.completed, eager.completed) + steps
    eager.ready = eager.completed = replayed.completed
    loop._batches_that_stepped += max(0, steps - 1)  # what loggers take for the step
