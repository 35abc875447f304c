"""Training steps replayed as CUDA graphs: a step's kernels launched at once, not one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from catnat.checks import require_precision
from catnat.noise import noise_state, own_noise, separate_noise, set_noise_state
from catnat.replay import Backlog, StepGraph
from catnat.transfer import send

STEPS_PER_BATCH = 20  # Lightning's own work for a batch takes as long as a replayed step
_STEPS_AHEAD = 2 * STEPS_PER_BATCH  # enough for the host to write logs while the device works on
_REPLAYED: dict[str, dict[str, bool]] = {
    "adam": {"capturable": True, "fused": True},
    "sgd": {"fused": True},
}


class StepObserver(Protocol):
    """Something that looks on while steps are replayed."""

    def look(self) -> Any:
        """Tensors of this step; called within it, so not where it is replayed."""

    def note(self, step: int, seen: Any) -> None:
        """Called after each step with what ``look`` gave, which the next step overwrites."""


class ReplayedSteps(LightningModule):
    """A module whose training steps are replayed as CUDA graphs wherever that is possible.

    A small model spends most of a step waiting for its kernels to be launched. Here a step, from
    loss to update, is captured once and then launched as a whole, and several of them are taken
    per batch that Lightning hands over (data modules with an attribute ``steps_per_batch`` are
    asked to give out several batches at once). Elsewhere Lightning optimizes as usual; both ways
    take the same steps. A replayed step does not call the hooks of single optimizer steps, and
    the Trainer's ``limit_train_batches`` counts what is handed over, not steps.

    Random states are part of a checkpoint, so that a resumed run draws what it would have drawn;
    every rank has noise of its own.

    A subclass has :meth:`step_loss` and uses :meth:`optimizer_options` and :func:`keep_kernels`
    for its optimizer. One with a ``training_step`` of its own, or that optimizes by hand
    (``automatic_optimization = False``), is left to do so.

    Args:
        capture: None for wherever possible, False for never, True to be told why not.
        gradient_clip: largest norm of the gradient; 0 for no limit.
    """

    def __init__(self, capture: bool | None = None, gradient_clip: float = 0.0) -> None:
        super().__init__()
        self.capture, self.gradient_clip = capture, gradient_clip
        self.step_observers: list[StepObserver] = []  # of replayed steps
        self.replays = False  # whether this run replays its steps; decided in setup
        self._several = False  # whether a batch of Lightning's holds several
        self._val_check_interval: int | None = None  # what the user said, where it is changed
        self._graph: StepGraph[tuple[Tensor, list[Any]]] | None = None
        self._backlog: Backlog | None = None
        self._sent: tuple[int, Callable[[], Tensor], dict[str, float]] | None = None
        self._noise_to_restore: dict[str, Tensor] | None = None

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a step, as device work alone: no waiting for the host, no logging."""
        raise NotImplementedError

    def prepare_step(self, step: int) -> None:
        """Bring what depends on the step up to date, in place."""

    def settings(self) -> dict[str, float]:
        """What is logged beside the loss."""
        return {}

    def optimizer_options(self, name: str) -> dict[str, bool]:
        """What "adam" or "sgd" need in order to be fast, or replayed: their state on the device."""
        if self.replays:
            return _REPLAYED[name]
        if self._trainer is None or self.trainer.precision != "32-true":
            return {}  # where gradients are scaled, the fused ones cannot clip them
        place = self.trainer.strategy.root_device.type  # the model comes there later
        return {"fused": True} if place in ("cpu", "cuda") else {}

    def why_not_replayed(self) -> str | None:
        """Why the steps of this model cannot be replayed here; None if they can."""
        return why_not(self)

    def set_learning_rates(self, *rates: float) -> None:
        """Set the rate of each parameter group, also within a captured step."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, Optimizer)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if not self.replays:
                group["lr"] = rate
            elif isinstance(group["lr"], Tensor) and group["lr"].device == self.device:
                group["lr"].fill_(rate)
            else:  # a captured step reads it on the device
                group["lr"] = torch.tensor(rate, device=self.device)

    def num_steps(self) -> float:
        """Optimizer steps of the whole run; infinite if nothing but time limits it."""
        trainer, most = self.trainer, float("inf")
        if trainer.max_steps > 0:
            most = trainer.max_steps
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            return most
        batches = float(trainer.num_training_batches)
        if self._several:
            data: Any = trainer.train_dataloader
            batches = min(batches * STEPS_PER_BATCH, data.num_batches)
        batches = -(-batches // trainer.accumulate_grad_batches)
        return min(most, batches * trainer.max_epochs)

    def setup(self, stage: str) -> None:
        """Decide whether steps are replayed."""
        require_precision(self.trainer.precision)
        if stage != "fit":
            return
        if self.replays:  # in the run before
            self.replays, self.automatic_optimization = False, True
        reason = "capture is False" if self.capture is False else self.why_not_replayed()
        name, own_step = type(self).__name__, type(self).training_step
        if own_step is not ReplayedSteps.training_step:
            reason = f"{name} has a training_step of its own"
        elif not self.automatic_optimization:
            raise ValueError(
                f"{name} sets automatic_optimization to False, and has no training_step of its own "
                "that would optimize"
            )
        if self.capture and reason:
            rank_zero_warn(f"steps are not replayed as CUDA graphs: {reason}")
        if reason is None:
            self.replays, self.automatic_optimization = True, False
        self._graph = None if reason else StepGraph(self._optimize)
        data: Any = getattr(self.trainer, "datamodule", None)
        self._several = reason is None and hasattr(data, "steps_per_batch")
        self._backlog = None
        if self.trainer.strategy.root_device.type == "cuda":
            self._backlog = Backlog(_STEPS_AHEAD // (STEPS_PER_BATCH if self._several else 1))
        if self._several:
            data.steps_per_batch = STEPS_PER_BATCH
            # A Trainer that validates by the clock has none.
            every = getattr(self.trainer, "val_check_interval", None)
            if isinstance(every, int):  # Lightning counts batches, users mean steps.
                self._val_check_interval = every
                self.trainer.val_check_interval = max(1, every // STEPS_PER_BATCH)

    def on_train_start(self) -> None:
        """Go on counting, and drawing, where a resumed run stopped."""
        if self.replays:
            count_steps(self.trainer, 0)
        if self._noise_to_restore is not None:
            set_noise_state(self._noise_to_restore, self.device, self.global_rank)
            self._noise_to_restore = None
        else:
            separate_noise(self.global_rank)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Prepare the step of this batch."""
        self.prepare_step(self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One loss, or as many steps as there are batches in this one; now and then logged."""
        if self.replays:
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

    def teardown(self, stage: str) -> None:
        """Give data module and Trainer back as they were."""
        if stage == "fit" and self._several:
            data: Any = getattr(self.trainer, "datamodule", None)
            data.steps_per_batch = None
            if self._val_check_interval is not None:
                self.trainer.val_check_interval = self._val_check_interval
                self._val_check_interval = None

    @contextmanager
    def evaluation_noise(self, batch_idx: int) -> Iterator[None]:
        """Noise for a batch, the same each time: evaluation does not change what is learned."""
        with own_noise(self.device, seed=batch_idx * self.trainer.world_size + self.global_rank):
            yield

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random states of all ranks."""
        checkpoint["noise"] = noise_state(self.device, self.all_gather)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the random states."""
        self._noise_to_restore = checkpoint.get("noise")

    def _replay(self, batch: Any) -> Tensor:
        """Steps on one batch, or on several stacked along a first dimension."""
        first = step = self.global_step
        for each in batch if self._several else [batch]:
            if step == self.trainer.max_steps:
                break
            self.prepare_step(step)
            assert self._graph is not None
            loss, seen = self._graph(each)
            for observer, what in zip(self.step_observers, seen, strict=True):
                observer.note(step, what)
            step += 1
            self._step_scheduler()
        count_steps(self.trainer, step - first)
        if self._backlog is not None:
            self._backlog.add()
        every: int = getattr(self.trainer, "log_every_n_steps", 0)
        if every and step // every > first // every:
            self._log_sent()  # the one before: waiting for this one would idle the device
            self._sent = (step - 1, send(loss), self.settings())
        return loss.detach()

    def _optimize(self, batch: Any) -> tuple[Tensor, list[Any]]:
        """One step from loss to update, as device work alone."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, Optimizer)
        optimizer.zero_grad()
        loss = self.step_loss(batch)
        seen = [observer.look() for observer in self.step_observers]
        loss.backward()
        if self.gradient_clip:
            clip_grad_norm_(self.parameters(), self.gradient_clip)
        optimizer.step()
        return loss.detach(), seen

    def _step_scheduler(self) -> None:
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            before = scheduler.get_last_lr()
            scheduler.step()
            if self._graph is not None and scheduler.get_last_lr() != before:
                self._graph.reset()  # the learning rate is baked in

    def _log_sent(self) -> None:
        if self._sent is not None:
            step, receive, settings = self._sent
            self._sent = None
            for logger in self.loggers:
                logger.log_metrics({"train/loss": receive().item()} | settings, step)


def keep_kernels(optimizer: Optimizer) -> Optimizer:
    """The optimizer, which from now on keeps its own kernels when it loads a state.

    Saved groups name the kernels of the device they were saved on. The kernels of this optimizer
    are those of the device it is on.
    """
    optimizer.register_load_state_dict_pre_hook(_with_kernels_of)
    return optimizer


def _with_kernels_of(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    saved, own = state["param_groups"], optimizer.param_groups
    if len(saved) != len(own):
        return state  # torch says what is wrong with it
    kernels = ("fused", "capturable", "foreach")
    groups = [
        group | {name: mine[name] for name in kernels if name in mine}
        for group, mine in zip(saved, own, strict=True)
    ]
    return state | {"param_groups": groups}


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
