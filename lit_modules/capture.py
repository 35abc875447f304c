"""Training steps replayed as CUDA graphs: a step's kernels launched at once, not one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from catnat.capture import WARM_UP, StepGraph, aside, same_shapes, tensors_of  # noqa: F401
from catnat.transfer import send

STEPS_PER_BATCH = 20  # Lightning's own work for a batch takes as long as a replayed step
_REPLAYED: dict[str, dict[str, bool]] = {
    "adam": {"capturable": True, "fused": True},
    "sgd": {"fused": True},
}


class ReplayedSteps(LightningModule):
    """A module whose training steps are replayed as CUDA graphs wherever that is possible.

    A small model spends most of a step waiting for its kernels to be launched. Here a step, from
    loss to update, is captured once and then launched as a whole, and several of them are taken
    per batch that Lightning hands over (data modules with an attribute ``steps_per_batch`` are
    asked to give out several batches at once). Elsewhere Lightning optimizes as usual; both ways
    take the same steps. A replayed step does not call the hooks of single optimizer steps.

    A subclass has :meth:`step_loss` and uses :meth:`optimizer_options` for its optimizer.

    Args:
        capture: None for wherever possible, False for never, True to be told why not.
        gradient_clip: largest norm of the gradient; 0 for no limit.
    """

    def __init__(self, capture: bool | None = None, gradient_clip: float = 0.0) -> None:
        super().__init__()
        self.capture, self.gradient_clip = capture, gradient_clip
        self.step_observers: list[Callable[[], None]] = []  # called within a replayed step
        self.step_generators: list[torch.Generator] = []  # where they draw from
        self._several = False  # whether a batch of Lightning's holds several
        self._graph: StepGraph[Tensor] | None = None
        self._sent: tuple[int, Callable[[], Tensor], dict[str, float]] | None = None

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a step, as device work alone: no waiting for the host, no logging."""
        raise NotImplementedError

    def prepare_step(self, step: int) -> None:
        """Bring what depends on the step up to date, in place."""

    def settings(self) -> dict[str, float]:
        """What is logged beside the loss."""
        return {}

    def optimizer_options(self, name: str) -> dict[str, bool]:
        """What "adam" or "sgd" need in order to be replayed: their state on the device."""
        return {} if self.automatic_optimization else _REPLAYED[name]

    def setup(self, stage: str) -> None:
        """Decide whether steps are replayed."""
        if stage != "fit":
            return
        reason = "capture is False" if self.capture is False else why_not(self)
        if type(self).training_step is not ReplayedSteps.training_step:
            reason = f"{type(self).__name__} has a training_step of its own"
        if self.capture and reason:
            rank_zero_warn(f"steps are not replayed as CUDA graphs: {reason}")
        self.automatic_optimization = reason is not None
        self._graph = None
        data: Any = getattr(self.trainer, "datamodule", None)
        self._several = reason is None and hasattr(data, "steps_per_batch")
        if hasattr(data, "steps_per_batch"):
            before, data.steps_per_batch = data.steps_per_batch, None
            if self._several:
                data.steps_per_batch = STEPS_PER_BATCH
            every = self.trainer.val_check_interval
            if self._several and before is None and isinstance(every, int):
                # Lightning counts batches, users mean steps.
                self.trainer.val_check_interval = max(1, every // STEPS_PER_BATCH)

    def on_train_start(self) -> None:
        """Go on counting where a resumed run stopped."""
        if not self.automatic_optimization:
            count_steps(self.trainer, 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Prepare the step of this batch."""
        self.prepare_step(self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One loss, or as many steps as there are batches in this one; now and then logged."""
        if not self.automatic_optimization:
            return self._replay(batch)
        loss = self.step_loss(batch)
        every: int = getattr(self.trainer, "log_every_n_steps", 0)
        if every and (self.global_step + 1) % every == 0:
            self.log("train/loss", loss.detach(), prog_bar=True)
            self.log_dict(self.settings())
        return loss

    def on_train_end(self) -> None:
        """Log what is still on its way."""
        self._log_sent()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Optimizers name the kernels they use, which depend on the device."""
        for state in checkpoint.get("optimizer_states", ()):
            for group in state["param_groups"]:
                name = "adam" if "betas" in group else "sgd"
                group |= {"fused": None, "capturable": False} | self.optimizer_options(name)

    def _replay(self, batch: Any) -> Tensor:
        """Steps on one batch, or on several stacked along a first dimension."""
        if self._graph is None:
            self._graph = StepGraph(self._optimize, self.step_generators)
        first = step = self.global_step
        for each in batch if self._several else [batch]:
            if step == self.trainer.max_steps:
                break
            self.prepare_step(step)
            loss = self._graph(each)
            step += 1
            self._step_scheduler()
        count_steps(self.trainer, step - first)
        every: int = getattr(self.trainer, "log_every_n_steps", 0)
        if every and step // every > first // every:
            self._log_sent()  # the one before: waiting for this one would idle the device
            self._sent = (step - 1, send(loss), self.settings())
        return loss.detach()

    def _optimize(self, batch: Any) -> Tensor:
        """One step from loss to update, as device work alone."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, Optimizer)
        optimizer.zero_grad()
        loss = self.step_loss(batch)
        with aside(self.device) as join:  # beside the backward pass, which leaves the device room
            for observe in self.step_observers:
                observe()
        loss.backward()
        if self.gradient_clip:
            clip_grad_norm_(self.parameters(), self.gradient_clip)
        optimizer.step()
        join()
        return loss.detach()

    def _step_scheduler(self) -> None:
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            before = scheduler.get_last_lr()
            scheduler.step()
            if scheduler.get_last_lr() != before and self._graph is not None:
                self._graph.reset()  # the learning rate is baked in

    def _log_sent(self) -> None:
        if self._sent is not None:
            step, receive, settings = self._sent
            self._sent = None
            for logger in self.loggers:
                logger.log_metrics({"train/loss": receive().item()} | settings, step)


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
