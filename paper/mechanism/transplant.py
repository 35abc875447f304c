"""Does softmax keep what the tree has found? One head's encoder, continued with another head.

    python transplant.py --root data --seed 1 --out transplant.csv

Trains a VAE with softmax and one with sigmoid. Then each of the two continues with either head: the
last layer of the encoder is replaced by one for the new head, which is fitted to the old q(z | x)
on the training images with all other weights fixed, and training continues with a new optimizer.
So all four continuations, also those with the same head as before, begin in the same way.

The rows have the ELBO of validation images: of the first part of training, before and after the
new layer (step 0), and over the steps of the second part.

Hypotheses. The readout cannot express the tree's q: the ELBO falls at step 0, when softmax gets
sigmoid's encoder. The tree only gets there faster: softmax keeps that ELBO and continues from it.
Softmax drifts to codes of its own: it falls back to where softmax from softmax is.
"""

from __future__ import annotations

import argparse
import copy
import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE

HEADS = ("softmax", "sigmoid")
FITTING_STEPS = 4000
COLUMNS = (
    *("num_latents", "num_categories", "seed", "steps", "source", "head"),
    *("step", "val/elbo", "val/kl", "fit/kl"),
)
Point = tuple[int, float, float]  # step, ELBO, KL


class VAE(DiscreteVAE):
    """A VAE whose temperature continues that of an earlier training."""

    first_step = 0

    def annealed_temperature(self, step: int) -> float:
        """As if the earlier steps were of this training."""
        return super().annealed_temperature(step + self.first_step)


class Curve(Callback):
    """Keeps the ELBO of every validation."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add a point."""
        if not trainer.sanity_checking:
            values = trainer.callback_metrics
            elbo = float(values["val/elbo"])
            self.points.append((trainer.global_step, elbo, float(values["val/kl"])))


def train(model: VAE, data: MNISTDataModule, steps: int) -> list[Point]:
    """The curve of a training: step, ELBO, KL; first before it."""
    curve = Curve()
    trainer = Trainer(
        max_steps=steps,
        val_check_interval=steps // 8,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[curve],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(model, data, verbose=False)
    trainer.fit(model, data)
    return curve.points


@torch.no_grad()
def features(model: VAE, data: MNISTDataModule) -> tuple[Tensor, Tensor]:
    """What the last layer of the encoder sees of the training images, and log q(z | x)."""
    model.eval()
    inputs = []
    log_q = []
    for batch in data.train_dataloader():
        inputs.append(model.encoder[:-1](model.images(batch)))
        log_q.append(model(batch).logits)
    return torch.cat(inputs), torch.cat(log_q)


def transplanted(model: VAE, head: str, data: MNISTDataModule, steps: int) -> tuple[VAE, float]:
    """The model with a new last layer for a head, and KL(old q || new q) after fitting it."""
    new = VAE(**{**model.hparams, "head": head})
    new.first_step = steps
    inputs, old_log_q = features(model, data)
    new.encoder = copy.deepcopy(model.encoder)
    new.decoder = copy.deepcopy(model.decoder)
    layer = nn.Linear(new.encoder[-1].in_features, new.num_latents * new.head.num_scores)
    new.encoder[-1] = layer
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FITTING_STEPS)
    for _ in range(FITTING_STEPS):
        rows = torch.randint(len(inputs), (1000,))
        log_q = new.head.log_probs(layer(inputs[rows]).unflatten(-1, (new.num_latents, -1)))
        kl = F.kl_div(log_q, old_log_q[rows], log_target=True, reduction="sum") / len(rows)
        optimizer.zero_grad()
        kl.backward()
        optimizer.step()
        schedule.step()
    return new, float(kl.detach())


def main() -> None:
    """Train, transplant, train again; write rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="data")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10000, help="of each part of the training")
    parser.add_argument("--num_latents", type=int, default=10)
    parser.add_argument("--num_categories", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("transplant.csv"))
    args = parser.parse_args()
    size = (args.num_latents, args.num_categories, args.seed, args.steps)
    rows: list[tuple[object, ...]] = []
    data = MNISTDataModule(root=args.root, batch_size=100, seed=args.seed)
    data.prepare_data()
    data.setup("fit")

    def add(source: str, head: str, fit_kl: object, curve: list[Point]) -> None:
        for step, elbo, kl in curve:
            rows.append((*size, source, head, step, round(elbo, 4), round(kl, 4), fit_kl))
        with args.out.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(COLUMNS)
            table.writerows(rows)
        print(f"{source or 'new'} -> {head}: {curve[0][1]:.2f} to {curve[-1][1]:.2f}", flush=True)

    for source in HEADS:
        seed_everything(args.seed, workers=True, verbose=False)
        model = VAE(source, args.num_latents, args.num_categories)
        add("", source, "", train(model, data, args.steps))
        for head in HEADS:
            seed_everything(args.seed + 100, workers=True, verbose=False)
            new, fit_kl = transplanted(model, head, data, args.steps)
            add(source, head, round(fit_kl, 4), train(new, data, args.steps))


if __name__ == "__main__":
    main()
