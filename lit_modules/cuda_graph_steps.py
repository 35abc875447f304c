"""ReplayedSteps: training steps as CUDA graphs, several of them for each batch of Lightning's."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from catnat.cuda_graph import StepGraph, send

if TYPE_CHECKING:
    from catnat.lit_modules.step_module import StepModule

STEPS_AT_ONCE = 20  # Lightning's own work for one batch takes as long as a replayed step
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class ReplayedSteps:
    """The training steps of a module, captured once, from loss to update, and then replayed.

    A small model spends most of a step waiting for its kernels to be launched; a captured step is
    launched as a whole. Lightning hands over one batch. The next ones, up to ``STEPS_AT_ONCE`` in
    all, are drawn from the loader itself, if the loader has a method ``next_batches(most)`` and no
    hook changes batches on their way to the device. Where Lightning has something to do (validate,
    save, end the epoch, end the run) no further batch is drawn. Lightning's counters count every
    step, so the options of the Trainer and checkpoints mean the same as in an eager run.

    The module's ``step_observers``, such as :class:`~catnat.callbacks.FisherMonitor`, see every
    step: ``look()`` is called while a step is captured, and gives tensors of the step. Each later
    step overwrites them, and then ``note(step, tensors)`` is called.

    Args:
        module: whose steps are taken.
    """

    def __init__(self, module: "StepModule") -> None:
        self._module = module
        self._trainer = module.trainer
        self._graph = StepGraph(self._optimize)
        self._sent: tuple[int, Callable[[], Tensor], dict[str, float]] | None = None  # to be logged

    def start(self) -> None:
        """Continue to count where a resumed run stopped; decide how steps are taken."""
        count_steps(self._trainer, 0)
        data = getattr(self._trainer, "datamodule", None)
        has_hooks = any(
            is_overridden(hook, owner) for hook in BATCH_HOOKS for owner in (self._module, data)
        )
        can_draw = hasattr(self._trainer.train_dataloader, "next_batches")
        is_endless = self._trainer.num_training_batches == torch.inf
        # Whether Lightning hands over every single batch.
        self._one_by_one = has_hooks or is_endless or not can_draw

    def take(self, batch: Any) -> Tensor:
        """Take the step of this batch, and of the batches that follow; return the last loss."""
        # Lightning calls this with autocast on, which belongs around the loss alone.
        with torch.autocast(self._trainer.strategy.root_device.type, enabled=False):
            module = self._module
            first_step = module.global_step
            batches = [batch]
            if not self._one_by_one:
                loader: Any = self._trainer.train_dataloader
                batches += loader.next_batches(self._steps_at_once() - 1)
            end_step = first_step + len(batches)
            scheduler: Any = module.lr_schedulers()
            for step, step_batch in enumerate(batches, first_step):
                module.prepare_step(step)
                loss, seen = self._graph(step_batch)
                for observer, tensors in zip(module.step_observers, seen, strict=True):
                    observer.note(step, tensors)
                if scheduler is not None:
                    before = scheduler.get_last_lr()
                    scheduler.step()
                    if scheduler.get_last_lr() != before:
                        self._graph.reset()  # the learning rate is a constant of the captured step
            count_steps(self._trainer, len(batches))
            every = self._trainer.log_every_n_steps  # type: ignore[attr-defined]
            if every and end_step // every > first_step // every:
                self.log()
                self._sent = end_step - 1, send(loss), module.logged_settings()
            return loss

    def log(self) -> None:
        """Log the loss that was copied last: by now it has arrived."""
        if self._sent is not None:
            step, receive, settings = self._sent
            self._sent = None
            metrics = {"train/loss": receive().item(), **settings}
            for logger in self._module.loggers:
                logger.log_metrics(metrics, step)

    def _steps_at_once(self) -> int:
        """Steps from here to where Lightning validates, saves, ends the epoch or ends the run."""
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        limits = [STEPS_AT_ONCE, int(trainer.num_training_batches) - loop.batch_idx]
        if trainer.max_steps > 0:
            limits.append(trainer.max_steps - trainer.global_step)
        every = trainer.val_check_batch  # None where validation goes by the clock
        if trainer.enable_validation and every is not None:
            over_epochs = trainer.check_val_every_n_epoch is None
            batch = loop.total_batch_idx if over_epochs else loop.batch_idx
            limits.append(int(every) - batch % int(every))
        for callback in trainer.checkpoint_callbacks:
            every = getattr(callback, "_every_n_train_steps", 0)
            if every > 0:
                limits.append(every - trainer.global_step % every)
        return max(1, min(limits))

    def _optimize(self, batch: Any) -> tuple[Tensor, list[Any]]:
        """One step from loss to update, on the device alone; what its observers saw, too."""
        module = self._module
        optimizer: Any = module.optimizers(use_pl_optimizer=False)
        precision = self._trainer.precision_plugin
        optimizer.zero_grad()
        with precision.train_step_context():
            loss = module.step_loss(batch)
        seen = [observer.look() for observer in module.step_observers]
        loss.backward()
        if module.gradient_clip:
            precision.clip_grad_by_norm(optimizer, module.gradient_clip)
        optimizer.step()
        return loss.detach(), seen


def count_steps(trainer: Trainer, steps: int) -> None:
    """Tell Lightning that so many batches were taken as one, each with one optimizer step.

    Lightning's counters become those of an eager run: a checkpoint of a replayed run continues in
    an eager run, and the reverse. With 0 steps, before the first batch, the counters of a loaded
    checkpoint are brought in line.
    """
    loop = trainer.fit_loop.epoch_loop
    replayed = loop.manual_optimization.optim_step_progress.total
    eager = loop.automatic_optimization.optim_progress.optimizer.step.total
    replayed.ready = replayed.completed = max(replayed.completed, eager.completed) + steps
    eager.ready = eager.completed = replayed.completed
    uncounted = steps - 1  # Lightning counts one
    if uncounted > 0:
        loop._batches_that_stepped += uncounted  # loggers take this for the step
        fetcher: Any = trainer.fit_loop._data_fetcher
        fetcher.fetched += uncounted
        fetcher.done = fetcher.fetched >= fetcher.length
        loop.batch_progress.increment_by(uncounted, fetcher.done)
