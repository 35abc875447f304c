"""Bias and variance of gradient estimators in a VAE, against the exact gradient by enumeration.

A DiscreteVAE with N = 4 latents of K = 8 categories is trained briefly for each head. Then the
gradient of E_q[loss] in the scores of some test images is computed exactly, by decoding all
K^N = 4,096 codes, and estimated many times by each estimator.

    python benchmarks/bench_estimators.py --root DATA   # paper/estimators/bias.csv has one run
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from typing import get_args

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from catnat import head_names
from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE
from catnat.lit_modules.vae import Estimator

N, K = 4, 8
TEMPERATURES = {"gumbel": (1.0, 0.5), "relaxed": (1.0, 0.5)}
TOGETHER = 512  # draws whose images are decoded at once


def trained(head: str, args: argparse.Namespace) -> tuple[DiscreteVAE, Tensor]:
    """A model after some steps with the default estimator, and a few test images."""
    pl.seed_everything(args.seed, verbose=False)
    model, data = DiscreteVAE(head, N, K), MNISTDataModule(args.root, seed=args.seed)
    trainer = pl.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    model.eval()  # a batch norm with statistics of the batch would couple the draws
    return model, next(iter(data.test_dataloader()))[: args.images]


def exact_gradient(model: DiscreteVAE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the images and the gradient of the expected loss in them, both (B, N, S)."""
    scores = model.scores(x).detach().requires_grad_()
    codes = torch.cartesian_prod(*[torch.arange(K)] * N)  # (K^N, N)
    z = F.one_hot(codes, K).float()
    with torch.no_grad():
        losses = torch.cat([model.reconstruction(each[None], z[:, None]) for each in x], 1).T
    q = model.head(scores)
    log_q = q.logits[:, torch.arange(N), codes].sum(-1)  # (B, K^N)
    expected = (log_q.exp() * losses).sum(-1) + model.kl(q)
    (gradient,) = torch.autograd.grad(expected.sum(), scores)
    return scores.detach(), gradient


def draws(model: DiscreteVAE, x: Tensor, scores: Tensor, count: int) -> Tensor:
    """Estimates of the gradient by the model's own loss, (count, B, N, S)."""
    found = []
    for start in range(0, count, TOGETHER):
        some = min(TOGETHER, count - start)
        mine = scores.repeat(some, 1, 1).requires_grad_()
        loss = model.loss(x.repeat(some, 1, 1, 1), model.head(mine))
        (gradient,) = torch.autograd.grad(loss * len(mine), mine)  # the loss is a mean
        found.append(gradient.view(some, *scores.shape))
    return torch.cat(found)


def bias_and_variance(estimates: Tensor, exact: Tensor) -> tuple[float, float]:
    """The norm of the bias and the variance of one draw, relative to the exact gradient.

    The squared bias is the product of the errors of two halves of the draws: the noise that is left
    in their means does not add to it.
    """
    scale = exact.square().sum()
    one, other = (half.mean(0) - exact for half in estimates.chunk(2))
    bias = ((one * other).sum() / scale).clamp_min(0).sqrt()
    return float(bias), float(estimates.var(0).sum() / scale)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", default="data", help="folder of the images")
    parser.add_argument("--steps", type=int, default=300, help="of training (default 300)")
    parser.add_argument("--images", type=int, default=8, help="default 8")
    parser.add_argument("--draws", type=int, default=4096, help="of each image (default 4096)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("## Bias and variance of gradient estimators\n")
    print(f"- `python {' '.join(sys.argv)}`, torch {torch.__version__}.")
    print(f"- Gradient of E_q[loss] in the scores of {args.images} test images; {N} latents of {K}")
    print(f"  categories; {args.steps} training steps; {args.draws:,} draws of each image.")
    print("- Bias: norm of the error of the mean, divided by that of the exact gradient. Variance:")
    print("  of one draw, divided by its square. A draw of the score function has two samples.\n")
    heads = head_names()
    print(f"| estimator | {' | '.join(f'{head}: bias | variance' for head in heads)} |")
    print("|---|" + "---|---|" * len(heads), flush=True)
    models = [trained(head, args) for head in heads]
    exact = [exact_gradient(model, x) for model, x in models]
    for estimator in get_args(Estimator):
        for temperature in TEMPERATURES.get(estimator, (math.nan,)):
            cells = []
            for (model, x), (scores, gradient) in zip(models, exact, strict=True):
                model.estimator = estimator
                model.temperature.set(temperature)
                estimates = draws(model, x, scores, args.draws)
                cells += [f"{value:.3g}" for value in bias_and_variance(estimates, gradient)]
            name = estimator if math.isnan(temperature) else f"{estimator}, τ = {temperature:g}"
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
