"""The checkpoints of a run, best.ckpt and last.ckpt, and stopping without losing work."""

import signal
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from catnat.callbacks.signals import Stopped, StopSignals
from catnat.checks import require_at_least
from catnat.lightning_compat import accumulates, log_step_now, validates_now
from catnat.rng import State, random_states, set_random_states

_DEFAULT_METRIC = "val/loss"  # of best.ckpt


class LastCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``, from which a run resumes.

    The callback saves it every n steps, after the last step, and on a signal. On a signal, all
    ranks finish the current step with all accumulated batches, save, and raise :class:`Stopped`. A
    second SIGINT does not wait. If a validation follows a step, the checkpoint of this step is
    saved after the validation and contains its result, so a resumed run neither repeats nor skips
    the validation. With this callback, every checkpoint contains the random states of all ranks, so
    a resumed run draws the random numbers of an uninterrupted run.

    Args:
        dirpath: folder of the checkpoint, as given on rank 0.
        every_n_steps: number of steps between checkpoints.
    """

    sees_blocks = True  # of replayed steps, which end where a checkpoint is due

    def __init__(self, dirpath: str | Path, every_n_steps: int = 500) -> None:
        require_at_least(1, every_n_steps=every_n_steps)
        self.path = str(Path(dirpath) / "last.ckpt")
        self.every_n_steps = every_n_steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the path of rank 0, which is the one that writes; forget an earlier run."""
        self.path = trainer.strategy.broadcast(self.path)
        self._signals = StopSignals()
        self._due = False
        self._stop = False
        self._random = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count steps; restore the random states of a resumed run."""
        self._saved_step = trainer.global_step
        self._signals.listen()  # not before: Lightning puts back what it finds after setup
        if self._random is not None:
            set_random_states(self._random, pl_module.device, pl_module.global_rank)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: State
    ) -> None:
        """Save random states; make a checkpoint within a validation look like one of its step.

        Lightning resumes from either without validating again. But if the resumed run validates
        at other steps, Lightning finds the next batch only from the latter.
        """
        checkpoint["random"] = random_states(pl_module.device)
        if trainer.state.fn == "fit" and trainer.validating:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            progress["total"]["completed"] -= 1
            progress["current"]["completed"] -= 1

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: State
    ) -> None:
        """Keep the random states for the start of training."""
        self._random = checkpoint.get("random")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals here as well: this can take minutes, and stopping it loses nothing."""
        self._signals.listen()

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Save if a checkpoint is due or a signal came, but only after the step's validation."""
        step = trainer.global_step
        # Not with the gradients of a part of the batches, which a checkpoint does not hold.
        if not accumulates(trainer):
            self._listen_to_ranks(trainer)
        due = step // self.every_n_steps > self._saved_step // self.every_n_steps
        self._due = self._stop or due or step == trainer.max_steps
        if not validates_now(trainer):
            if self._due:  # Lightning logs a step after this hook: a kill in between would lose it
                log_step_now(trainer)
            self._save_if_due(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Stop if a signal came; within training that waits for the end of a step."""
        if trainer.state.fn != "fit":
            self._listen_to_ranks(trainer)
            self._save_if_due(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if training ended between two checkpoints; stop if a signal came at the end."""
        self._due = trainer.global_step > self._saved_step
        self._listen_to_ranks(trainer)
        self._save_if_due(trainer)

    def _listen_to_ranks(self, trainer: Trainer) -> None:
        """Stop after the next save if a signal came to any rank."""
        self._stop = trainer.strategy.reduce_boolean_decision(bool(self._signals.signum), all=False)

    def _save_if_due(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Save if that is due, and then stop if a signal asks for it."""
        if self._due:
            self._due = False
            self._saved_step = trainer.global_step
            for logger in trainer.loggers:  # values of steps that a resumed run does not take again
                logger.save()
            trainer.save_checkpoint(self.path)
        if self._stop:
            signum = self._signals.signum or signal.SIGTERM  # another rank got the signal
            raise Stopped(signum, trainer.global_step, self.path)

    on_validation_end = _save_if_due  # a checkpoint that was due at the step that is validated


class BestCheckpoint(ModelCheckpoint):
    """Keeps ``best.ckpt``, the checkpoint with the best value of a validation metric.

    If a model does not log the default metric, val/loss, there is no ``best.ckpt``. A resumed run
    compares its values with that of the file in its folder, even if the folder was moved. A new run
    that starts from the checkpoint of another run has no such file, so its first value is the best.

    Args:
        monitor: name of the metric.
        mode: "min" if lower values are better, or "max".
        dirpath: folder of the checkpoint (default: the logger's folder).
    """

    def __init__(
        self, monitor: str = _DEFAULT_METRIC, mode: str = "min", dirpath: str | Path | None = None
    ) -> None:
        super().__init__(
            dirpath,
            "best",
            monitor=monitor,
            mode=mode,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.strict = monitor != _DEFAULT_METRIC  # see catnat.callbacks.monitors

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the value is the best so far."""
        if self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)
        elif self.strict and not trainer.sanity_checking:
            logged = ", ".join(trainer.callback_metrics)
            rank_zero_warn(f"no best.ckpt: the model logs no {self.monitor!r}, but {logged}")

    def load_state_dict(self, state_dict: State) -> None:
        """Remember the value of the file in this folder."""
        if Path(str(self.dirpath), "best.ckpt").is_file():
            super().load_state_dict(state_dict | {"dirpath": self.dirpath})
