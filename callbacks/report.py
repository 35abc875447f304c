"""What a run says at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

_MANY = 0.5  # share of saturated scores worth a sentence


def report(trainer: Trainer, metrics: dict[str, float], folder: Path, keep: bool = True) -> None:
    """Print the metrics and where to look further; fill TensorBoard's hparams tab."""
    show_metrics(metrics, folder, trainer.default_root_dir, keep)
    _fill_hparams_tab(trainer, metrics)


def show_metrics(
    metrics: dict[str, float], folder: Path, root: str | Path, keep: bool = True
) -> None:
    """Print the metrics of a run, and where to look further.

    Args:
        metrics: by name.
        folder: of the run.
        root: where all runs are.
        keep: also write them to ``metrics.json`` in the folder, which says that a run is finished
            and what it gave; not for tests of one of its checkpoints.
    """
    if keep:
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
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
            "The run COLLAPSED: its latents tell nothing about an image. "
            "Try a smaller learning rate or another seed."
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
            "gradient (usual for sparsemax, a sign of trouble for natural)."
        )
    return sentences


def _fill_hparams_tab(trainer: Trainer, metrics: dict[str, float]) -> None:
    # They go to step 0, where what was logged during training has another value already.
    metrics = {name: value for name, value in metrics.items() if name.startswith("test/")}
    hparams: dict[str, Any] = {}
    for part in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        hparams |= dict(getattr(part, "hparams", {}))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(hparams, metrics)
            logger.save()
            logger.experiment.flush()
