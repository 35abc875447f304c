"""How well gradients of straight-through Gumbel point the right way, head by head.

    python gradient_signal.py --root data CHECKPOINT...

Takes the distributions that trained models of small_vae.py have for test images. Each head gets the
scores of these same distributions, and two numbers in its own scores, medians over images:

- direction: cosine of the mean gradient, over many draws, with the gradient of the exact ELBO;
- signal: the same of a single draw, E<g, exact> / (rms |g| |exact|).

Heads that change their gradient, such as sigmoid-ungated, are compared with the exact gradient as
it is without the change.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import mean

import mechanism_heads  # noqa: F401 - registers heads
import torch
import torch.nn.functional as F
from small_vae import SmallVAE
from torch import Tensor

from catnat import CategoricalHead, make_head
from catnat.datamodules import MNISTDataModule

HEADS = ["softmax", "softmax-paths", "sigmoid", "sigmoid-rotated-3", "sigmoid-ungated", "natural",
         "natural-ungated", "softmax-natural-gradient-0.01"]  # fmt: skip
TEMPERATURE = 0.5  # that of the end of training
AT_ONCE = 20


def gradient(model: SmallVAE, head: CategoricalHead, scores: Tensor, images: Tensor) -> Tensor:
    """Of the exact loss, or of one draw for each row, in the scores."""
    scores = scores.clone().requires_grad_()
    q = head(scores)
    if model.exact:
        loss = model.loss(images, q) * len(images)
    else:
        z = q.rsample(temperature=TEMPERATURE, estimator="gumbel")
        loss = (model.reconstruction(images, z) + model.kl(q)).sum()
    return torch.autograd.grad(loss, scores)[0].flatten(1)


def measure(model: SmallVAE, name: str, probs: Tensor, images: Tensor, draws: int) -> list[float]:
    """Direction and signal."""
    head = make_head(name, probs.shape[-1])
    plain = getattr(head, "inner", head) if "rotated" not in name and "paths" not in name else head
    scores = head.inverse(probs)
    model.exact = True
    exact = gradient(model, plain, scores, images)  # of the loss, not what a head makes of it
    model.exact = False
    total, squares = torch.zeros_like(exact), torch.zeros(len(exact))
    for _ in range(draws // AT_ONCE):
        several = scores.repeat(AT_ONCE, 1, 1), images.repeat(AT_ONCE, 1, 1, 1)
        each = gradient(model, head, *several).view(AT_ONCE, *exact.shape)
        total += each.sum(0)
        squares += each.square().sum((0, 2))
    average, size = total / draws, (squares / draws).sqrt()
    signal = (average * exact).sum(1) / (size * exact.norm(dim=1))
    return [float(F.cosine_similarity(average, exact).median()), float(signal.median())]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--root", default="data")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--draws", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = MNISTDataModule(root=args.root, batch_size=args.images, eval_batch_size=args.images)
    data.prepare_data()
    data.setup("test")
    images = next(iter(data.test_dataloader()))[: args.images]
    found = defaultdict(list)
    for path in args.checkpoints:
        kept = torch.load(path, map_location="cpu", weights_only=True)
        trained = kept["hyper_parameters"]["head"]
        model = SmallVAE(trained, estimator="exact").eval().requires_grad_(False)
        model.load_state_dict(kept["state_dict"], strict=False)
        probs = model.head(model.scores(images)).probs.clamp_min(1e-6)
        probs = probs / probs.sum(-1, keepdim=True)
        for name in HEADS:
            found[name, trained].append(measure(model, name, probs, images, args.draws))
    models = list(dict.fromkeys(trained for _, trained in found))
    print("| head | " + " | ".join(f"{x} models: direction | signal" for x in models) + " |")
    print("|---" * (1 + 2 * len(models)) + "|")
    for name in HEADS:
        cells = [f"{mean(c):.2f}" for x in models for c in zip(*found[name, x], strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    counts = ", ".join(f"{len(found[HEADS[0], x])} {x} models" for x in models)
    print(f"\n{counts}; {args.images} images, {args.draws} draws.")


if __name__ == "__main__":
    main()
