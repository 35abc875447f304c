"""The report at the end of a run: a table of metrics, warnings, and TensorBoard's hparams tab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from catnat.callbacks.dashboard import write_hparams
from catnat.callbacks.run_record import RunLogger
from catnat.files import write_whole

_MANY = 0.5  # share of saturated scores above which there is a warning


def write_hparams_of(trainer: Trainer, metrics: dict[str, float], seed: int) -> None:
    """Fill TensorBoard's hparams tab, and end our log file."""
    tested = [name for name in metrics if name.startswith("test/")]
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            write_hparams(logger.experiment, hparams_of(trainer, seed), tested)
            logger.experiment.flush()
        if isinstance(logger, RunLogger):
            logger.close()


def show_metrics(
    metrics: dict[str, float], folder: Path, root: str | Path, keep: bool = True
) -> None:
    """Print the metrics of a run, and where to look further.

    Args:
        metrics: by name.
        folder: of the run.
        root: where all runs are.
        keep: also write the metrics to ``metrics.json`` in the folder. That file marks a run as
            finished, so a mere test of a checkpoint does not write it.
    """
    if keep:
        write_whole(folder / "metrics.json", (json.dumps(metrics, indent=1) + "\n").encode())
    table = Table(show_header=False)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    console = Console(soft_wrap=True)
    console.print(table)
    for sentence in warnings_of(metrics):
        console.print(sentence, highlight=False)
    console.print(f"run: {folder}", highlight=False)
    console.print(f"compare runs: tensorboard --logdir {root}", highlight=False)


def warnings_of(metrics: dict[str, float]) -> list[str]:
    """Plain sentences about a run that did not learn what it should."""
    sentences = []
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
    share = metrics.get("test/saturated", metrics.get("fim/saturated", 0))
    # Most edges of a graph are absent: there a saturated score is usually what was wanted.
    if share > _MANY and "test/dead_edges" not in metrics:
        sentences.append(
            f"{share:.0%} of the scores are SATURATED: they lie where the head is flat and get no "
            "gradient (usual for sparsemax, and for natural in VAEs and policies)."
        )
    return sentences


def hparams_of(trainer: Trainer, seed: int) -> dict[str, Any]:
    """The hyperparameters of a run: its seed and steps, and the options of its model and data.

    An option of the data that the run or the model has too is called data_<name>.
    """
    hparams: dict[str, Any] = {"seed": seed, "steps": trainer.global_step}
    model: Any = trainer.lightning_module
    hparams |= dict(model.hparams)
    if hparams.get("learning_rate", 0) is None:  # the model has a default for each head
        hparams["learning_rate"] = getattr(model, "learning_rates", (None,))[0]
    if (data := getattr(trainer, "datamodule", None)) is not None:
        hparams["data"] = type(data).__name__
    for name, value in getattr(data, "hparams", {}).items():
        same = name in hparams and name != "seed" and hparams[name] == value
        hparams[name if name not in hparams or same else f"data_{name}"] = value
    return hparams
