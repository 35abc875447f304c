"""Model-steps per second of M VAEs trained in one process, as one batched model under one graph.

A step is a step of all M models: each has its own Gumbel noise, learning rate and clipped gradient.
This is how ``experiments/sweep.py --engine together`` trains. Other sweeps take convolutions in
TF32 and other products in float32, which are torch's defaults. ``--tf32`` says for which of these
settings the batched products are timed: off is more exact than such a sweep, on is less exact.

    python benchmarks/bench_many_models.py --root DATA
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE
from catnat.replay import StepGraph
from experiments.together.vaes import ManyVAEs

BATCH = 100
Step = Callable[[Tensor], Tensor]


def make_models(args: argparse.Namespace, count: int) -> list[DiscreteVAE]:
    """Models of different seeds and rates, the heads in turn but equal ones side by side."""
    models = []
    for number in range(count):
        torch.manual_seed(number)
        head = args.heads[number * len(args.heads) // count]
        rate = 1e-3 * 1.01**number
        models.append(DiscreteVAE(head, *args.size, learning_rate=rate).to(args.device))
    return models


def multiplications(N: int, K: int) -> int:
    """Of one image, forward: six layers of convolutions and four linear ones."""
    convolutions = 14 * 14 * 72 + 7 * 7 * 16 * 72 + 3 * 3 * 32 * 144
    return 2 * (convolutions + 288 * 128) + 128 * (N * (K - 1) + N * K)


def measure(
    step: Step, images: Tensor, models: int, seconds: float, size: tuple[int, int]
) -> dict[str, float]:
    """Model-steps per second, and seconds before the first replay."""
    began = time.perf_counter()
    rows = torch.empty(models, BATCH, dtype=torch.int64, device=images.device)

    def whole(rows: Tensor) -> Tensor:
        return step(images[rows.random_(len(images))][:, :, None])

    replay = StepGraph(whole) if images.is_cuda else whole
    for _ in range(5 if images.is_cuda else 1):
        losses = replay(rows)
    first = losses.cpu()
    start, taken = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(10 if images.is_cuda else 1):
            losses = replay(rows)
            taken += 1
        last = losses.cpu()
    spent = time.perf_counter() - start
    if not bool(last.isfinite().all()):
        raise RuntimeError("a loss is not finite")
    return {
        "ms_per_step": round(1e3 * spent / taken, 3),
        "model_steps_per_second": round(models * taken / spent, 1),
        "teraflops": round(6e-12 * multiplications(*size) * BATCH * models * taken / spent, 2),
        "loss_first": round(float(first.mean()), 1),
        "loss_last": round(float(last.mean()), 1),
        "start_s": round(start - began, 1),
    }


def main() -> None:
    """Print the table and write it as CSV where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", default="data", help="folder of MNIST (default data)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--models", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--size", type=int, nargs=2, default=[10, 8], help="N and K")
    parser.add_argument(
        "--heads", nargs="+", default=["natural"], help="of equal numbers of scores"
    )
    parser.add_argument("--tf32", nargs="+", default=["off"], choices=("off", "on"))
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device; choose cpu")
    data = MNISTDataModule(root=args.root)
    data.prepare_data()
    data.setup("fit")
    train = data._images["train"].reshape(-1, 28, 28)
    images = (train if train.is_floating_point() else train / 255).float().to(args.device)
    table: list[dict[str, object]] = []
    for tf32 in args.tf32:
        torch.backends.cuda.matmul.allow_tf32 = tf32 == "on"
        for count in args.models:
            many = ManyVAEs(make_models(args, count))
            row: dict[str, object] = {
                "N": args.size[0],
                "K": args.size[1],
                "heads": "+".join(args.heads),
                "tf32": tf32,
                "models": count,
            }
            row |= measure(many.step, images, count, args.seconds, args.size)
            if not table:
                print("  ".join(f"{key:>10}" for key in row))
            print(
                "  ".join(f"{value!s:>{max(10, len(key))}}" for key, value in row.items()),
                flush=True,
            )
            table.append(row)
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]))
            writer.writeheader()
            writer.writerows(table)
        print(f"written to {args.csv}")


if __name__ == "__main__":
    main()
