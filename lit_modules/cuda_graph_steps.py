"""ReplayLoop: training steps as CUDA graphs, several of them for each batch that Lightning sees."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from catnat.cuda_graph import (
    CAPTURABLE,
    KERNELS,
    StepGraph,
    make_capturable,
    send,
    why_not_captured,
)
from catnat.lightning_compat import (
    AutomaticOptimization,
    count_batch,
    count_step,
    detects_anomalies,
    logging_in,
    optimization_loop,
    save_interval,
    set_optimization_loop,
    step_schedulers,
    trainer_of,
)
from catnat.rng import State

if TYPE_CHECKING:
    from catnat.lit_modules.step_module import StepModule

STEPS_AT_ONCE = 25  # Lightning's own work for one batch takes as long as a replayed step

# The hooks of a LightningModule, a LightningDataModule and a Callback from a batch to its update.
# Lightning calls these for each batch that it sees: with one of them it sees every batch.
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
START_AND_END = ("on_train_batch_start", "on_train_batch_end")
# A captured step calls none of these: with one of them steps are not replayed.
STEP_HOOKS = (
    "training_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "optimizer_step",
)
# Their work at the end of a batch depends on the step alone: a block of steps ends where it is due.
_COUNTS_STEPS = (ModelCheckpoint, ProgressBar, Timer)

_OPTIMIZERS = (Adam, AdamW, SGD)  # their steps read the learning rate on the device
# Of replayed steps: others change weights, or scale losses on the host.
_PRECISIONS = ("32-true", "bf16-mixed")


class ReplayLoop(AutomaticOptimization):
    """Lightning's loop of optimizer steps, with steps that are captured once and then replayed.

    A small model spends most of a step waiting for its kernels to be launched; a captured step is
    launched as a whole. Lightning hands over one batch. The next ones, up to ``STEPS_AT_ONCE`` in
    all, are drawn from the loader itself, if the loader has a method ``next_batches(most)`` and
    nothing needs to see every batch. A block of steps ends where Lightning has something to do: to
    log, validate, save, or end the epoch or the run. Counters, schedulers and checkpoints are those
    of an eager run.

    A callback with the methods ``look`` and ``note``, such as
    :class:`~catnat.callbacks.FisherMonitor`, sees every step: ``look()`` is called while a step is
    captured, and returns tensors of the step. Each later step overwrites them, and then
    ``note(step, tensors)`` is called. A callback with ``sees_blocks = True`` needs no call of its
    hooks for every batch.

    Args:
        module: the module that is trained.
    """

    def __init__(self, module: "StepModule") -> None:
        trainer = module.trainer
        super().__init__(trainer)
        self._module = module
        self._optimizer = trainer.optimizers[0]
        self._observers: list[Any] = [
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if hasattr(callback, "look") and hasattr(callback, "note")
        ]
        self._loader: Any = trainer.train_dataloader
        self._is_one_by_one = not self._can_take_blocks()
        self._graph = StepGraph(self._step)
        self._sent: tuple[int, Callable[[], Tensor], dict[str, float]] | None = None  # to be logged
        groups = self._optimizer.param_groups
        self._kernels = [
            {name: group[name] for name in KERNELS if name in group} for group in groups
        ]
        # What a captured step reads: learning rates on the device, everything else as constants.
        self._rates = [float(group["lr"]) for group in groups]
        self._device_rates: list[Tensor] = []
        self._constants = self._present_constants()
        device = trainer.strategy.root_device
        if device.type == "cuda":
            make_capturable(self._optimizer, device)
            self._device_rates = [group["lr"] for group in groups]
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
            self._constants = self._present_constants()

    @classmethod
    def of(cls, module: LightningModule) -> "ReplayLoop | None":
        """The loop that currently replays a module's steps; None if steps are eager."""
        trainer = trainer_of(module)
        loop = optimization_loop(trainer) if isinstance(trainer, Trainer) else None
        return loop if isinstance(loop, cls) else None

    @classmethod
    def start(cls, module: "StepModule") -> None:
        """Replay the steps of a run that begins, or warn why they are eager ones."""
        cls.stop(module)
        if not module.capture or not isinstance(module.trainer, Trainer):
            return
        reason = why_not_replayed(module)
        if reason is None:
            set_optimization_loop(module.trainer, cls(module))
        else:
            rank_zero_warn(f"steps are not replayed as CUDA graphs: {reason}")

    @classmethod
    def stop(cls, module: "StepModule") -> None:
        """Take eager steps from now on."""
        loop = cls.of(module)
        if loop is not None:
            loop.restore_optimizer()
            set_optimization_loop(module.trainer, AutomaticOptimization(module.trainer))

    # -- steps ---------------------------------------------------------------------------------

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Take the step of a batch, and of the batches that follow; return the last loss."""
        constants = self._present_constants()
        if constants != self._constants:
            rank_zero_warn(
                "steps are not replayed as CUDA graphs any more: options of the optimizer other "
                "than its learning rate have changed"
            )
            self.stop(self._module)
            loop = optimization_loop(self.trainer)
            return loop.run(optimizer, batch_idx, kwargs)
        module = self._module
        trainer = self.trainer
        batches = [kwargs["batch"]]
        if not self._is_one_by_one:
            batches += self._loader.next_batches(self._block_size() - 1)
        for number, batch in enumerate(batches):
            if number:
                step_schedulers(trainer)
                count_batch(trainer)
            step = module.global_step
            module.prepare_step(step)
            self._send_rates()
            loss, seen = self._graph(batch)
            for observer, tensors in zip(self._observers, seen, strict=True):
                observer.note(step, tensors)
            count_step(self)
        loss = loss.clone()  # the next step overwrites it
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and module.global_step % every == 0:
            self._log_step(module.global_step - 1, loss)
        return {"loss": loss}

    def _step(self, batch: Any) -> tuple[Tensor, list[Any]]:
        """One step from loss to update, on the device alone; what its observers saw, too."""
        module = self._module
        optimizer = self._optimizer
        precision = self.trainer.precision_plugin
        with torch.enable_grad():
            with precision.train_step_context():
                loss = module.step_loss(batch)
            seen = [observer.look() for observer in self._observers]
            optimizer.zero_grad()
            loss.backward()
        if module.gradient_clip:
            precision.clip_grad_by_norm(optimizer, module.gradient_clip)
        with self._rates_on_device():
            optimizer.step()
        return loss.detach(), seen

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Let the optimizer read its learning rates on the device; elsewhere they are numbers."""
        groups = self._optimizer.param_groups
        for group, rate in zip(groups, self._device_rates, strict=False):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, number in zip(groups, self._rates, strict=True):
                group["lr"] = number

    def _send_rates(self) -> None:
        """Copy learning rates that have changed to the device."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        if rates != self._rates:
            self._rates = rates
            for tensor, rate in zip(self._device_rates, rates, strict=False):
                tensor.fill_(rate)

    def _present_constants(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name not in _NO_CONSTANTS}
            for group in self._optimizer.param_groups
        ]

    # -- blocks of steps -----------------------------------------------------------------------

    def _can_take_blocks(self) -> bool:
        """Whether Lightning need not see every batch."""
        trainer = self.trainer
        if not hasattr(self._loader, "next_batches") or trainer.num_training_batches == torch.inf:
            return False
        plans = trainer.lr_scheduler_configs
        if any(plan.reduce_on_plateau and plan.interval == "step" for plan in plans):
            return False
        data = getattr(trainer, "datamodule", None)
        owners = ((self._module, LightningModule), (data, LightningDataModule))
        for owner, base in owners:
            if owner is not None and any(is_own(owner, hook, base) for hook in BATCH_HOOKS):
                return False
        if any(is_own(self._module, hook, LightningModule) for hook in START_AND_END):
            return False
        return all(
            isinstance(callback, _COUNTS_STEPS)
            or getattr(callback, "sees_blocks", False)
            or not any(is_own(callback, hook, Callback) for hook in START_AND_END)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )

    def _block_size(self) -> int:
        """Steps from here to where Lightning logs, validates, saves, or ends the epoch or run."""
        trainer = self.trainer
        loop = trainer.fit_loop.epoch_loop
        limits = [STEPS_AT_ONCE, int(trainer.num_training_batches) - loop.batch_idx]
        if trainer.max_steps > 0:
            limits.append(trainer.max_steps - trainer.global_step)
        every = trainer.val_check_batch  # None where validation goes by the clock
        if trainer.enable_validation and every is not None:
            over_epochs = trainer.check_val_every_n_epoch is None
            batch = loop.total_batch_idx if over_epochs else loop.batch_idx
            limits.append(int(every) - batch % int(every))
        intervals = [save_interval(callback) for callback in trainer.checkpoint_callbacks]
        intervals.append(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        limits += [every - trainer.global_step % every for every in intervals if every > 0]
        return max(1, min(limits))

    # -- logging and saving --------------------------------------------------------------------

    def _log_step(self, step: int, loss: Tensor) -> None:
        """Log a step; the loss is copied to loggers later, when it has arrived on the host."""
        module = self._module
        self.log()
        settings = module.logged_settings()
        self._sent = step, send(loss), settings
        with logging_in(module, "training_step"):
            module.log("train/loss", loss, prog_bar=True, logger=False)
            module.log_dict(settings, logger=False)

    def log(self) -> None:
        """Give loggers the loss that was copied last: by now it has arrived."""
        if self._sent is not None:
            step, receive, settings = self._sent
            self._sent = None
            metrics = {"train/loss": receive().item(), **settings}
            for logger in self._module.loggers:
                logger.log_metrics(metrics, step)

    def restore_optimizer(self) -> None:
        """Restore the optimizer to its state before capture."""
        for group, kernels in zip(self._optimizer.param_groups, self._kernels, strict=True):
            group |= kernels
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                if "step" in state and not any(map(kernels.get, CAPTURABLE)):
                    state["step"] = state["step"].cpu()

    def portable(self, state: State) -> State:
        """The state of the optimizer as an eager run would save it."""
        groups = [
            group | kernels
            for group, kernels in zip(state["param_groups"], self._kernels, strict=True)
        ]
        states = {
            key: {name: x.cpu() if name == "step" else x for name, x in values.items()}
            for key, values in state["state"].items()
        }
        return state | {"state": states, "param_groups": groups}


_NO_CONSTANTS = {"params", "lr", "initial_lr", "max_lr", "min_lr"}


def is_own(owner: Any, name: str, base: type) -> bool:
    """Whether a class outside of this package, or an object itself, overrides a hook of a base.

    >>> is_own(Callback(), "on_train_batch_end", Callback)
    False
    """
    if name in vars(owner):  # as LambdaCallback and torch.compile do it
        return True
    for kind in type(owner).__mro__:
        if name in vars(kind):
            is_known = kind.__module__.startswith("catnat.lit_modules.")
            return not is_known and kind not in base.__mro__
    return False


def why_not_replayed(module: "StepModule") -> str | None:
    """The reason why the steps of a run are eager; None if they can be replayed."""
    trainer = module.trainer
    strategy = trainer.strategy
    obstacles = {
        f"the strategy is {type(strategy).__name__}, not one device": (
            not isinstance(strategy, SingleDeviceStrategy)
        ),
        f"the precision is {trainer.precision}, not {' or '.join(_PRECISIONS)}": (
            trainer.precision not in _PRECISIONS
        ),
        "gradients are accumulated over batches": trainer.accumulate_grad_batches > 1,
        "the Trainer clips gradients; use the model's gradient_clip": (
            trainer.gradient_clip_val is not None
        ),
        "the Trainer detects anomalies": detects_anomalies(trainer),
        "automatic_optimization is False": not module.automatic_optimization,
    }
    owners: list[tuple[Any, type]] = [(module, LightningModule)]
    owners += [(callback, Callback) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    for owner, base in owners:
        for hook in STEP_HOOKS:
            if hasattr(base, hook) or owner is module:
                name = f"{type(owner).__name__} has a hook {hook} of its own"
                obstacles[name] = is_own(owner, hook, base)
    for optimizer in trainer.optimizers:
        name = type(optimizer).__name__
        known = ", ".join(kind.__name__ for kind in _OPTIMIZERS)
        obstacles[f"the optimizer is {name}, not one of {known}"] = (
            type(optimizer) not in _OPTIMIZERS
        )
        obstacles["the learning rate is a tensor"] = any(
            isinstance(group["lr"], Tensor) for group in optimizer.param_groups
        )
    reason = why_not_captured(module.capture, strategy.root_device, obstacles)
    return reason or module.why_host_needed()
