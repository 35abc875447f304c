"""Bias, variance, decoder passes and time of gradient estimators in a VAE, against enumeration.

A DiscreteVAE with N = 4 latents of K = 8 categories is trained briefly for each head. Then the
gradient of E_q[loss] in the scores of some test images is computed exactly, by decoding all
K^N = 4,096 codes, and estimated many times by each estimator: those of catnat, of torch, and of
Storchastic if it is installed (``pip install storchastic``).

    python benchmarks/bench_estimators.py --root DATA   # paper/estimators/bias.csv has one run
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import (
    OneHotCategorical,
    OneHotCategoricalStraightThrough,
    RelaxedOneHotCategorical,
)

from catnat import HeadCategorical, head_names
from catnat.datamodules import MNISTDataModule
from catnat.estimator_table import TABLE
from catnat.estimators import score_function_surrogate, unordered_set_surrogate
from catnat.lit_modules import DiscreteVAE

N, K = 4, 8
TEMPERATURES = (1.0, 0.5)  # of estimators that have one
TIMED = 20  # steps, of which the median is shown

Losses = Callable[[DiscreteVAE, Tensor, HeadCategorical], Tensor]
"""Surrogate losses (B,) of images (B, 1, 28, 28) and q (B, N), without the KL divergence."""


def codes_of(q: HeadCategorical) -> Tensor:
    """All codes as one-hot vectors, (K^N, N, K)."""
    codes = torch.cartesian_prod(*[torch.arange(K)] * N)
    return F.one_hot(codes, K).to(q.logits)


def joint_log_probs(q: HeadCategorical) -> Tensor:
    """Log-probabilities of all codes, (B, N) -> (B, K^N)."""
    return q.logits.flatten(1) @ codes_of(q).flatten(1).mT


# -- the estimators --------------------------------------------------------------------------------


def sampled(options: dict[str, Any], model: DiscreteVAE, x: Tensor, q: HeadCategorical) -> Tensor:
    """Losses of one sample of ``rsample``."""
    return model.reconstruction(x, q.rsample(**options))


def score_function(model: DiscreteVAE, x: Tensor, q: HeadCategorical) -> Tensor:
    """The score function with two samples, each the baseline of the other."""
    z = q.one_hot_sample((2,))
    return score_function_surrogate(model.reconstruction(x, z), (z * q.logits).sum((-2, -1)))


def unordered_set(model: DiscreteVAE, x: Tensor, q: HeadCategorical) -> Tensor:
    """The unordered set estimator with two different codes."""
    joint = HeadCategorical(joint_log_probs(q), normalized=True)
    codes, log_probs = joint.sample_without_replacement(2)
    losses = model.reconstruction(x, codes_of(q)[codes])
    return unordered_set_surrogate(losses, log_probs)


def of_torch(make: Callable[..., Any], model: DiscreteVAE, x: Tensor, q: HeadCategorical) -> Tensor:
    """Losses of one sample of a distribution of torch."""
    return model.reconstruction(x, make(logits=q.logits).rsample())


def gumbel_of_torch(tau: float, model: DiscreteVAE, x: Tensor, q: HeadCategorical) -> Tensor:
    """Losses of a sample of torch's gumbel_softmax."""
    return model.reconstruction(x, F.gumbel_softmax(q.logits, tau, hard=True))


def gradient_of(losses: Losses, model: DiscreteVAE, x: Tensor, scores: Tensor) -> Tensor:
    """Gradient of the losses and of the KL divergence in scores, (B, N, S)."""
    scores = scores.clone().requires_grad_()
    q = model.head(scores)
    total = losses(model, x, q).sum() + model.kl(q).sum()
    return torch.autograd.grad(total, scores)[0]


def storchastic_gradient(
    method: Callable[[], Any], model: DiscreteVAE, x: Tensor, scores: Tensor
) -> Tensor:
    """Gradient in scores by a method of Storchastic for codes drawn jointly, (B, N, S)."""
    import storch

    storch.reset()
    scores = scores.clone().requires_grad_()
    q = model.head(scores)
    codes = codes_of(q)

    @storch.deterministic
    def cost(z: Tensor, pixels: Tensor) -> Tensor:
        z = (z @ codes.flatten(1)).unflatten(-1, (N, K))
        images = pixels.unflatten(-1, x.shape[1:]).expand(*z.shape[:-2], *x.shape[1:])
        return model.reconstruction(images, z)

    rows = storch.denote_independent(joint_log_probs(q), 0, "image")
    z = method()(OneHotCategorical(logits=rows))
    pixels = storch.denote_independent(x.flatten(1), 0, "image")
    storch.add_cost(cost(z, pixels), "reconstruction")
    storch.backward()  # the mean over images; it frees the graph of q
    assert scores.grad is not None
    estimate = scores.grad * len(x)
    scores.grad = None
    (of_kl,) = torch.autograd.grad(model.kl(model.head(scores)).sum(), scores)
    return estimate + of_kl


@dataclass
class Contender:
    """A line of the table: a name, and the gradient (B, N, S) of images (B, ...) and scores."""

    name: str
    gradient: Callable[[DiscreteVAE, Tensor, Tensor], Tensor]
    together: int = 512  # draws of all images that are computed at once


def contenders() -> Iterator[Contender]:
    """All estimators that are installed; a line for a missing package."""
    surrogates: dict[str, Losses] = {
        "score-function": score_function,
        "unordered-set": unordered_set,
    }
    for estimator in TABLE:
        name = f"catnat {estimator.name}"
        if estimator.draw is None:
            losses = surrogates[estimator.name]
            yield Contender(f"{name}, 2 samples", partial(gradient_of, losses))
            continue
        for tau in TEMPERATURES if estimator.has_temperature else (None,):
            options = {"estimator": estimator.name, "temperature": tau}
            of_tau = "" if tau is None else f", τ = {tau:g}"
            yield Contender(name + of_tau, partial(gradient_of, partial(sampled, options)))
    straight_through = partial(of_torch, OneHotCategoricalStraightThrough)
    yield Contender(
        "torch OneHotCategoricalStraightThrough", partial(gradient_of, straight_through)
    )
    for tau in TEMPERATURES:
        gumbel = partial(gumbel_of_torch, tau)
        yield Contender(f"torch gumbel_softmax, τ = {tau:g}", partial(gradient_of, gumbel))
        relaxed = partial(of_torch, partial(RelaxedOneHotCategorical, torch.tensor(tau)))
        name = f"torch RelaxedOneHotCategorical, τ = {tau:g}"
        yield Contender(name, partial(gradient_of, relaxed))
    try:
        from storch.method import ScoreFunction
    except ImportError as error:
        print(f"| Storchastic is not installed: {error} |", flush=True)
        return
    # Its UnorderedSetEstimator takes seconds for a draw from the 4,096 codes, and is left out.
    method = partial(ScoreFunction, "z", n_samples=2, baseline_factory="batch_average")
    gradient = partial(storchastic_gradient, method)
    # Its memory is quadratic in the rows.
    yield Contender("Storchastic ScoreFunction, 2 samples", gradient, together=8)


# -- what is measured ------------------------------------------------------------------------------


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
    model.requires_grad_(False)
    return model, next(iter(data.test_dataloader()))[: args.images]


def exact_gradient(model: DiscreteVAE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the images and the gradient of the expected loss in them, both (B, N, S)."""
    scores = model.scores(x).detach().requires_grad_()
    q = model.head(scores)
    with torch.no_grad():
        z = codes_of(q)[:, None]
        losses = torch.cat([model.reconstruction(each[None], z) for each in x], 1).T
    expected = (joint_log_probs(q).exp() * losses).sum(-1) + model.kl(q)
    (gradient,) = torch.autograd.grad(expected.sum(), scores)
    return scores.detach(), gradient


def draws(
    contender: Contender, model: DiscreteVAE, x: Tensor, scores: Tensor, count: int
) -> Tensor:
    """Estimates of the gradient, (count, B, N, S)."""
    found = []
    for start in range(0, count, contender.together):
        some = min(contender.together, count - start)
        rows = scores.repeat(some, 1, 1)
        gradient = contender.gradient(model, x.repeat(some, 1, 1, 1), rows)
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


def passes_and_time(
    contender: Contender, model: DiscreteVAE, x: Tensor, scores: Tensor
) -> tuple[float, float]:
    """Codes decoded for one image, and milliseconds for a batch of 128 images."""
    repeats = 128 // len(x)
    x = x.repeat(repeats, 1, 1, 1)
    scores = scores.repeat(repeats, 1, 1)
    decoded = []
    hook = model.decoder.register_forward_hook(lambda _, inputs, __: decoded.append(len(inputs[0])))
    contender.gradient(model, x, scores)
    hook.remove()
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        contender.gradient(model, x, scores)
        times.append(time.perf_counter() - start)
    return sum(decoded) / len(x), 1000 * statistics.median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", default="data", help="folder of the images")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--images", type=int, default=8, help="number of images (default 8)")
    parser.add_argument("--draws", type=int, default=4096, help="for each image (default 4096)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", nargs="+", default=list(head_names()), choices=head_names())
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("## Bias and variance of gradient estimators\n")
    print(f"- `python {' '.join(sys.argv)}`, torch {torch.__version__}.")
    print(f"- Gradient of E_q[loss] in the scores of {args.images} test images; {N} latents of {K}")
    print(f"  categories; {args.steps} training steps; {args.draws:,} draws of each image.")
    print("- Bias: norm of the error of the mean, divided by that of the exact gradient. Variance:")
    print("  of one draw, divided by its square. Each head has a model of its own.")
    print("- Passes: codes that are decoded for an image and a draw. Time: ms for a batch of 128")
    print(f"  images, forward and backward, first head, {torch.get_num_threads()} threads.")
    print("- Sets and Storchastic draw from the joint distribution of all latents.\n")
    columns = " | ".join(f"{head}: bias | variance" for head in args.heads)
    print(f"| estimator | passes | ms | {columns} |")
    print("|---|---|---|" + "---|---|" * len(args.heads), flush=True)
    models = [trained(head, args) for head in args.heads]
    exact = [exact_gradient(model, x) for model, x in models]
    for contender in contenders():
        passes, milliseconds = passes_and_time(contender, *models[0], exact[0][0])
        cells = [f"{passes:g}", f"{milliseconds:.1f}"]
        for (model, x), (scores, gradient) in zip(models, exact, strict=True):
            estimates = draws(contender, model, x, scores, args.draws)
            cells += [f"{value:.3g}" for value in bias_and_variance(estimates, gradient)]
        print(f"| {contender.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
