"""Checkpoints that survive a kill at any moment, and stopping on a signal without losing work."""

from __future__ import annotations

import io
import pickle
import signal
import threading
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from catnat.checks import require_at_least
from catnat.files import write_whole


class Stopped(Exception):  # noqa: N818 - like KeyboardInterrupt, no error
    """Raised after a signal, once everything is saved."""

    def __init__(self, signum: int, step: int, path: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step, self.path = signum, step, path


class StopSignals:
    """Remembers that SIGINT or SIGTERM arrived; a second SIGINT raises at once."""

    def __init__(self) -> None:
        self.signum = 0
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """Start to handle signals, if this is the main thread: Python allows it nowhere else."""
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._handlers[signum] = signal.signal(signum, self._ask_to_stop)

    def give_back(self) -> None:
        """Put back the handlers that were there before."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers, self.signum = {}, 0

    def _ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        if self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames; reads tensors and plain values, never code.

    Lightning's own writer goes through the system's temporary folder, and moving a file from
    there to another disk is a copy that a kill can cut short.

    A thread writes the file while training goes on; :meth:`finish` waits for it. An error of the
    disk is raised by the next call of any method. ``seconds`` is the time for which training has
    waited.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread: ThreadPoolExecutor | None = None  # made when needed: processes may be forked
        self._writing: Future[None] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; if that fails, the file that was there before is untouched."""
        began = time.monotonic()
        content = io.BytesIO()  # a copy: training may change the tensors before they are written
        torch.save(checkpoint, content)
        self.finish()
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoints")
        self._writing = self._thread.submit(write_whole, Path(path), content.getbuffer())
        self.seconds += time.monotonic() - began

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint that may still be on its way to the disk."""
        self.finish()
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for the disk, and end the thread."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Load with ``weights_only=True``, whatever the argument says."""
        self.finish()
        return load_checkpoint(path, map_location)


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint; a ``ValueError`` of one line says what is wrong with it."""
    if not Path(path).is_file():
        raise ValueError(f"there is no checkpoint {path}")
    content = io.BytesIO(Path(path).read_bytes())  # an OSError of the disk is raised here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = torch.load(content, map_location=map_location, weights_only=True)
    except Exception as error:  # a damaged file fails in many ways
        archive_or_pickle = content.getvalue()[:1] in (b"P", b"\x80")
        if isinstance(error, pickle.UnpicklingError) and archive_or_pickle:
            raise ValueError(
                f"checkpoint {path} is refused: it holds more than tensors and plain values"
            ) from error
        raise ValueError(f"checkpoint {path} is damaged, or no checkpoint at all") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"checkpoint {path} is no checkpoint of a model")
    return checkpoint


class LastCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``, from which a run can continue.

    It is written every n steps, after the last step, and when SIGINT or SIGTERM asks to stop: the
    step in progress is finished, with all the batches it accumulates, saved, and :class:`Stopped`
    raised, on all ranks alike. A second SIGINT does not wait. A step that is followed by a
    validation is saved after the validation, with its result: a run that continues neither repeats
    the validation nor leaves it out.

    Args:
        dirpath: the folder; rank 0's counts.
        every_n_steps: how often.
    """

    def __init__(self, dirpath: str | Path, every_n_steps: int = 500) -> None:
        require_at_least(1, every_n_steps=every_n_steps)
        self.path = str(Path(dirpath) / "last.ckpt")
        self.every_n_steps = every_n_steps
        self._saved_step = 0
        self._unasked = 0  # steps since the ranks last asked each other whether to stop
        self._due = self._stop = False
        self._signals = StopSignals()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the path of rank 0, which is the one that writes."""
        self.path = trainer.strategy.broadcast(self.path)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count steps and to handle signals."""
        self._saved_step = trainer.global_step
        self._due = self._stop = False
        self._signals.listen()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Make a checkpoint that is saved within a validation look like one of the step before it.

        Lightning continues from either without validating again. But if the continued run
        validates at other steps, Lightning finds the next batch only from the latter.
        """
        if trainer.state.fn == "fit" and trainer.validating:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            progress["total"]["completed"] -= 1
            progress["current"]["completed"] -= 1

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals: a test can take minutes, and stopping it loses nothing."""
        self._signals.listen()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals in a validation that is not part of training."""
        if trainer.state.fn == "validate":
            self._signals.listen()

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Save if a checkpoint is due or a signal came, but only after the step's validation."""
        step = trainer.global_step
        self._stop = self._must_stop(trainer)
        due = step // self.every_n_steps > self._saved_step // self.every_n_steps
        self._due = self._stop or due or (step == trainer.max_steps != self._saved_step)
        if not _validation_follows(trainer):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if a checkpoint was due at the step that is validated."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            # Already saved at this step: a validation that was not foreseen; save its result too.
            self._due = self._due or self._saved_step == trainer.global_step
            self._save_if_due(trainer)

    def on_test_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Stop if a signal came."""
        self._stop_if_asked(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Stop if a signal came; within training that waits for the end of a step."""
        if trainer.state.fn == "validate":
            self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if training ended between two checkpoints; stop if a signal came at the end."""
        if trainer.global_step > self._saved_step:
            self._save(trainer)
        _finish_writing(trainer)
        self._stop_if_asked(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._signals.give_back()

    def _save_if_due(self, trainer: Trainer) -> None:
        if self._due:
            self._save(trainer)
        if self._stop:
            _finish_writing(trainer)
            raise Stopped(self._signals.signum or signal.SIGTERM, trainer.global_step, self.path)

    def _save(self, trainer: Trainer) -> None:
        self._due = False
        self._saved_step = trainer.global_step
        trainer.save_checkpoint(self.path)

    def _must_stop(self, trainer: Trainer) -> bool:
        """Whether a signal came to any rank; ranks ask each other every ten steps only."""
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return False  # gradients of some batches only, which a checkpoint does not hold
        self._unasked += 1
        if trainer.world_size > 1 and self._unasked < 10:
            return False
        self._unasked = 0
        return self._any_rank_asked(trainer)

    def _any_rank_asked(self, trainer: Trainer) -> bool:
        asked = bool(self._signals.signum)
        return trainer.strategy.reduce_boolean_decision(asked, all=False)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if self._any_rank_asked(trainer):
            signum = self._signals.signum or signal.SIGTERM
            raise Stopped(signum, trainer.global_step, self.path)


def _finish_writing(trainer: Trainer) -> None:
    """Wait until all checkpoints are on the disk."""
    writer = trainer.strategy.checkpoint_io
    if isinstance(writer, AtomicCheckpointIO):
        writer.finish()


def _validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning validates after the present step; Lightning's own loop is asked."""
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


class BestCheckpoint(ModelCheckpoint):
    """Keeps ``best.ckpt``, the checkpoint with the smallest ``val/loss``.

    A model that does not log ``val/loss`` gets no ``best.ckpt``. A run that continues compares with
    the loss of the file in its folder, even if the folder was moved. A new run that starts from
    another run's checkpoint has no such file, and compares with nothing at first.
    """

    def __init__(self, dirpath: str | Path) -> None:
        super().__init__(
            dirpath,
            "best",
            monitor="val/loss",
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the loss is the smallest so far."""
        if self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the loss of the file in this folder."""
        path, loss = Path(str(self.dirpath), "best.ckpt"), state_dict["best_model_score"]
        if loss is None or not path.is_file():
            return
        place = {"dirpath": self.dirpath, "best_k_models": {str(path): loss}}
        paths = dict.fromkeys(("best_model_path", "kth_best_model_path"), str(path))
        super().load_state_dict(state_dict | place | paths)
