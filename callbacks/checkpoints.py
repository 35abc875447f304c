"""Checkpoints that survive a kill at any moment, and stopping on a signal without losing work."""

from __future__ import annotations

import io
import os
import pickle
import signal
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_only


class Stopped(Exception):  # noqa: N818 - like KeyboardInterrupt, no error
    """Raised after a signal, once everything is saved."""

    def __init__(self, signum: int, step: int, path: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step, self.path = signum, step, path


class StopSignals:
    """Remembers that SIGINT or SIGTERM asked to stop; a second SIGINT does not wait."""

    def __init__(self) -> None:
        self.signum = 0
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """Begin, in the main thread: that is Python's rule for signals."""
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._handlers[signum] = signal.signal(signum, self._ask_to_stop)

    def give_back(self) -> None:
        """Restore what was done about signals before."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}

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
        """Save; whatever goes wrong, the file that was there before is untouched."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        content = io.BytesIO()  # torch.save straight into a full disk fails without saying why
        torch.save(checkpoint, content)
        try:
            with open(partial, "wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Load with ``weights_only=True``, whatever was asked for."""
        return load_checkpoint(path, map_location)


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint; a ``ValueError`` of one line says what is wrong with it."""
    if not Path(path).is_file():
        raise ValueError(f"there is no checkpoint {path}")
    content = io.BytesIO(Path(path).read_bytes())  # so that an OSError is the disk's
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = torch.load(content, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint {path} is refused: it holds more than tensors and plain values"
        ) from error
    except Exception as error:  # a damaged file fails in many ways
        raise ValueError(f"checkpoint {path} is damaged, or no checkpoint at all") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"checkpoint {path} is no checkpoint of a model")
    return checkpoint


class LastCheckpoint(Checkpoint):
    """Keeps ``last.ckpt``, from which a run can continue.

    It is written every n steps, after the last step, and when SIGINT or SIGTERM asks to stop: the
    step in progress is finished, with all the batches it accumulates, saved, and :class:`Stopped`
    raised, on all ranks alike. A second SIGINT does not wait.

    Args:
        dirpath: the folder; rank 0's counts.
        every_n_steps: how often.
    """

    def __init__(self, dirpath: str | Path, every_n_steps: int = 500) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.path = str(Path(dirpath) / "last.ckpt")
        self.every_n_steps = every_n_steps
        self._saved_step = 0
        self._unasked = 0  # steps since the ranks agreed whether to stop
        self._signals = StopSignals()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """All ranks write, or rather let rank 0 write, to one place."""
        self.path = trainer.strategy.broadcast(self.path)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on there is something to save."""
        self._saved_step = trainer.global_step
        self._signals.listen()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A test can take minutes; nothing is lost when it stops."""
        self._signals.listen()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """So can a validation that is not part of training."""
        if trainer.state.fn == "validate":
            self._signals.listen()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save if it is time, or if a signal came."""
        step = trainer.global_step
        stop = self._must_stop(trainer)
        due = step // self.every_n_steps > self._saved_step // self.every_n_steps
        if stop or due or (step == trainer.max_steps != self._saved_step):
            self._save(trainer)
        if stop:
            raise Stopped(self._signals.signum or signal.SIGTERM, step, self.path)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop if a signal came."""
        self._stop_if_asked(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Stop if a signal came; within training that waits for the end of a step."""
        if trainer.state.fn == "validate":
            self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training may end for other reasons than the number of steps; a signal may be late."""
        if trainer.global_step > self._saved_step:
            self._save(trainer)
        self._stop_if_asked(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._signals.give_back()

    def _save(self, trainer: Trainer) -> None:
        self._saved_step = trainer.global_step
        trainer.save_checkpoint(self.path)

    def _must_stop(self, trainer: Trainer) -> bool:
        """Whether a signal came; ranks agree every ten steps, as asking costs time."""
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return False  # there is half a step, which cannot be saved
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


def find_checkpoint(home: Path, wanted: str) -> Path:
    """A file, or the checkpoint called "last" or "best" of the newest run in home that has one."""
    if wanted not in ("last", "best"):
        return Path(wanted)
    for run in reversed(_runs(home)):
        path = run / "checkpoints" / f"{wanted}.ckpt"
        if path.is_file():
            return path
    raise ValueError(f"--ckpt_path {wanted}: there is no {wanted}.ckpt in any run under {home}")


def check_same(path: Path, model: LightningModule) -> None:
    """Raise a ``ValueError`` of one line if the checkpoint is not one of this very model.

    Heads can have equal shapes: without this, the wrong one would load without complaint.
    """
    names = ("head", "head_options", "num_latents", "num_categories")
    compare(path, load_checkpoint(path), {name: model.hparams.get(name) for name in names}, model)


def compare(
    path: Path, checkpoint: dict[str, Any], here: dict[str, Any], model: torch.nn.Module
) -> None:
    """Raise a ``ValueError`` of one line if a checkpoint has other hyperparameters or shapes."""
    made = checkpoint.get("hyper_parameters", {})
    for name, value in here.items():
        if made.get(name) != value:
            raise ValueError(
                f"checkpoint {path} has {name} {made.get(name)}, the command line {value}"
            )
    shapes = {name: value.shape for name, value in checkpoint.get("state_dict", {}).items()}
    if shapes != {name: value.shape for name, value in model.state_dict().items()}:
        raise ValueError(f"checkpoint {path} is one of another model")


def open_run(home: Path, ckpt_path: Path | None, config: str | None) -> Path:
    """The folder of the checkpoint's run, or home/version_k with the next free k.

    Where a configuration is given, it is written there; otherwise nothing is. What goes on from
    another checkpoint than the last is a new run: the last one of the old run stays.
    """
    runs = _runs(home)
    number = int(runs[-1].name.removeprefix("version_")) + 1 if runs else 0
    folder, resumed = home / f"version_{number}", False
    if ckpt_path is not None and ckpt_path.parent.name == "checkpoints":
        resumed = config is None or ckpt_path.name == "last.ckpt"
        folder = ckpt_path.parent.parent if resumed else folder
    if (
        config is None or getattr(rank_zero_only, "rank", 0) != 0
    ):  # other ranks only need to know a path
        return folder
    while not resumed:
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:  # another process was faster
            number += 1
            folder = home / f"version_{number}"
    (folder / "config.yaml").write_text(config)
    return folder


def _runs(home: Path) -> list[Path]:
    runs = [run for run in home.glob("version_*") if run.name[8:].isdigit()]
    return sorted(runs, key=lambda run: int(run.name[8:]))
