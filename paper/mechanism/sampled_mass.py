"""Draw what FisherMonitor sees from two draws a row, beside the exact values, while VAEs train.

One VAE a head, on MNIST: ``fim_sampled/off_diagonal_share``, a ratio of sums over the latest steps,
and the exact share, which is the square of the exact Frobenius mass. Below, the difference of the
two. Sparsemax is not shown: its Fisher matrix comes from categories that are hardly ever drawn, so
two draws a row underestimate it.

    python paper/mechanism/sampled_mass.py --root data --out paper/mechanism/sampled_mass.png
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import lightning.pytorch as L
import matplotlib.pyplot as plt
import numpy as np
from lightning.pytorch.loggers import Logger

from catnat.callbacks import FisherMonitor
from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE
from catnat.sweeps.figures import COLORS

HEADS = ("softmax", "sigmoid", "natural")


class Rows(Logger):
    """Keeps what is logged, by tag."""

    name = version = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[float]] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not needed."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add a value to each tag's list."""
        for tag, value in metrics.items():
            self.values.setdefault(tag, []).append(value)


def train(head: str, steps: int, root: str) -> dict[str, np.ndarray]:
    """Train a VAE; return what it logs, by tag."""
    L.seed_everything(0, verbose=False)
    rows = Rows()
    trainer = L.Trainer(
        max_steps=steps,
        limit_val_batches=0,
        logger=rows,
        callbacks=[FisherMonitor(details=True)],
        accelerator="auto",
        devices=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DiscreteVAE(head, capture=True), datamodule=MNISTDataModule(root))
    return {tag: np.array(values) for tag, values in rows.values.items()}


def main() -> None:
    """Train three VAEs and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", type=Path, default=Path("sampled_mass.png"))
    args = parser.parse_args()
    figure, axes = plt.subplots(2, len(HEADS), figsize=(9, 4.4), sharex=True, sharey="row")
    for (axis, below), head in zip(axes.T, HEADS, strict=True):
        logged = train(head, args.steps, args.root)
        shares = logged["fim_sampled/off_diagonal_share"]
        exact = logged["fim/exact_off_diagonal_mass"] ** 2
        axis.plot(shares, color=COLORS[head], lw=1, label="two draws a row")
        axis.plot(exact, color="black", lw=1, label="exact")
        axis.set(title=head)
        below.axhline(0, color="black", lw=1)
        below.plot(shares - exact, color=COLORS[head], lw=1)
        below.set(xlabel="step")
        print(f"{head:10} mean of sampled - exact {(shares - exact).mean():+.5f}")
    axes[0, 0].set_ylabel("off-diagonal share")
    axes[1, 0].set_ylabel("sampled - exact")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
