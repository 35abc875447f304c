"""Checkpoints that survive a kill at any moment, and stopping on a signal without losing work."""

from __future__ import annotations

import io
import os
import pickle
import signal
import threading
import zipfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from catnat.checks import require_at_least
from catnat.rng import random_states, set_random_states


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file; a reader never sees a part of it, and a failure leaves what was there before.

    Args:
        path: of the file; its folder is made if there is none.
        content: all of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:  # a full disk does not say of which file
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


class Stopped(Exception):  # noqa: N818 - like KeyboardInterrupt, not an error
    """Raised after a signal, once everything is saved."""

    def __init__(self, signum: int, step: int, path: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step, self.path = signum, step, path


class StopSignals:
    """Remembers that SIGINT, SIGTERM or SIGHUP arrived; a second SIGINT raises at once."""

    def __init__(self) -> None:
        self.signum = 0
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """Start to handle signals if this is the main thread: Python allows it nowhere else."""
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                if signum := getattr(signal, name, None):  # Windows has no SIGHUP
                    before = signal.signal(signum, self._ask_to_stop)
                    self._handlers.setdefault(signum, before)

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
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; if that fails, the file that was there before is untouched."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        content.seek(0)
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(content):
            raise ValueError(
                f"checkpoint {path} could not be read back: it holds {', '.join(sorted(unsafe))}; "
                "keep numbers, strings, lists, dictionaries and tensors in hyperparameters and in "
                "the state of callbacks, or leave a hyperparameter out with "
                "save_hyperparameters(ignore=...)"
            )
        write_whole(Path(path), content.getbuffer())

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Load with ``weights_only=True``, whatever the argument says."""
        return load_checkpoint(path, map_location)


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Load a checkpoint: tensors and plain values, never code.

    The checksums of the archive are compared first: a flipped bit does not become a weight.

    Raises:
        ValueError: of one line, if the file is damaged, or not a checkpoint.
    """
    content = io.BytesIO(Path(path).read_bytes())  # an OSError of the disk is raised here
    try:
        with zipfile.ZipFile(content) as archive:
            if name := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {name} is wrong")
        content.seek(0)
        return dict(torch.load(content, map_location=map_location, weights_only=True))
    except pickle.UnpicklingError as error:
        what = "it holds more than tensors and plain values"
        raise ValueError(f"checkpoint {path} is refused: {what}") from error
    except Exception as error:
        what = f"is damaged, or not a checkpoint at all: {error}"
        if Path(path).suffix == ".zip" and zipfile.is_zipfile(path):
            what = "is a file of Stable-Baselines3, for HeadPPO.load: take the .ckpt beside it"
        raise ValueError(f"checkpoint {path} {what}") from error


class LastCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``, from which a run resumes.

    It is written every n steps, after the last step, and when a signal asks to stop: the step in
    progress is finished, with all the batches it accumulates, saved, and :class:`Stopped` raised,
    on all ranks alike. A second SIGINT does not wait. A step that is followed by a validation is
    saved after the validation, with its result: a resumed run neither repeats the validation nor
    leaves it out. While it is among the callbacks, every checkpoint has the random states of all
    ranks: a resumed run draws the numbers that the run would have drawn without the interruption.

    Args:
        dirpath: the folder; rank 0's counts.
        every_n_steps: how often.
    """

    def __init__(self, dirpath: str | Path, every_n_steps: int = 500) -> None:
        require_at_least(1, every_n_steps=every_n_steps)
        self.path = str(Path(dirpath) / "last.ckpt")
        self.every_n_steps = every_n_steps
        self._saved_step = 0
        self._due = self._stop = False
        self._random: list[dict[str, Any]] | None = None
        self._signals = StopSignals()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the path of rank 0, which is the one that writes; forget signals of a run before."""
        self.path = trainer.strategy.broadcast(self.path)
        self._signals = StopSignals()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count steps; restore the random states of a resumed run."""
        self._saved_step = trainer.global_step
        self._due = self._stop = False
        self._signals.listen()  # not before: Lightning puts back what it finds after setup
        if self._random is not None:
            set_random_states(self._random, pl_module.device, pl_module.global_rank)
            self._random = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
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
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the random states for the start of training."""
        self._random = checkpoint.get("random")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals here as well: this can take minutes, and stopping it loses nothing."""
        self._signals.listen()

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Save if a checkpoint is due or a signal came, but only after the step's validation."""
        step, loop = trainer.global_step, trainer.fit_loop
        assert loop._data_fetcher is not None
        # Not with the gradients of some batches only, which a checkpoint does not hold.
        whole = not loop.epoch_loop._should_accumulate()
        self._stop = whole and self._any_rank_asked(trainer)
        due = step // self.every_n_steps > self._saved_step // self.every_n_steps
        self._due = self._stop or due or step == trainer.max_steps
        if not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):  # Lightning's own rule
            if self._due:  # Lightning logs a step after this hook: a kill in between would lose it
                trainer._logger_connector.update_train_step_metrics()
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if a checkpoint was due at the step that is validated."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save_if_due(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Stop if a signal came; within training that waits for the end of a step."""
        if trainer.state.fn != "fit" and self._any_rank_asked(trainer):
            self._raise_stopped(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if training ended between two checkpoints; stop if a signal came at the end."""
        if trainer.global_step > self._saved_step:
            self._save(trainer)
        if self._any_rank_asked(trainer):
            self._raise_stopped(trainer)

    def _save_if_due(self, trainer: Trainer) -> None:
        if self._due:
            self._save(trainer)
        if self._stop:
            self._raise_stopped(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._due = False
        self._saved_step = trainer.global_step
        for logger in trainer.loggers:  # values of steps that a resumed run does not take again
            logger.save()
        trainer.save_checkpoint(self.path)

    def _any_rank_asked(self, trainer: Trainer) -> bool:
        asked = bool(self._signals.signum)
        return trainer.strategy.reduce_boolean_decision(asked, all=False)

    def _raise_stopped(self, trainer: Trainer) -> None:
        signum = self._signals.signum or signal.SIGTERM  # another rank got the signal
        raise Stopped(signum, trainer.global_step, self.path)


class BestCheckpoint(ModelCheckpoint):
    """Keeps ``best.ckpt``, the checkpoint with the best value of a metric of validation.

    A model that does not log the metric gets no ``best.ckpt``. A resumed run compares with the
    value of the file in its folder, even if the folder was moved. A new run that starts from
    another run's checkpoint has no such file, and compares with nothing at first.

    Args:
        monitor: the metric.
        mode: "min" or "max".
        dirpath: the folder; by default that of the logger.
    """

    def __init__(
        self, monitor: str = "val/loss", mode: str = "min", dirpath: str | Path | None = None
    ) -> None:
        super().__init__(
            dirpath,
            "best",
            monitor=monitor,
            mode=mode,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if the value is the best so far."""
        if self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)
        elif self.monitor != "val/loss" and not trainer.sanity_checking:
            there = ", ".join(trainer.callback_metrics)
            rank_zero_warn(f"no best.ckpt: the model logs no {self.monitor!r}, but {there}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the value of the file in this folder."""
        if Path(str(self.dirpath), "best.ckpt").is_file():
            super().load_state_dict(state_dict | {"dirpath": self.dirpath})
