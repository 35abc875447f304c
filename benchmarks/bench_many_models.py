"""Model-steps per second of M models trained in one process, as one batched model under one graph.

A step is a step of all M models: each has its own noise, batch and learning rate. This is how
``experiments/sweep.py --engine together`` trains, but for the order of batches and validation.
Other sweeps take convolutions in TF32 and other products in float32, which are torch's defaults.
``--tf32`` says for which of these settings the batched products are timed: off is more exact than
such a sweep, on is less exact.

    python benchmarks/bench_many_models.py --root DATA
    python benchmarks/bench_many_models.py --model gsl --models 100
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner
from catnat.replay import StepGraph
from experiments.together.graphs import ManyGraphLearners
from experiments.together.vaes import ManyVAEs

BATCHES = {"vae": 100, "gsl": 64}


def make_step(args: argparse.Namespace, count: int) -> Callable[[Any], Tensor]:
    """A step of models with different seeds and rates, equal heads side by side."""
    models: list[Any] = []
    for number in range(count):
        torch.manual_seed(number)
        head, rate = args.heads[number * len(args.heads) // count], 1e-3 * 1.01**number
        if args.model == "vae":
            model: Any = DiscreteVAE(head, *args.size, learning_rate=rate)
        else:
            model = GraphStructureLearner(head, learning_rate=rate)
        models.append(model.to(args.device))
    return ManyVAEs(models).step if args.model == "vae" else ManyGraphLearners(models).step


def read_data(args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Training images, (n, 1, 28, 28); or pairs (x, y)."""
    data: Any = MNISTDataModule(args.root) if args.model == "vae" else CommunityGraphDataModule()
    data.prepare_data()
    data.setup("fit")
    loader = data.make_loader("train", torch.device(args.device))
    if args.model == "vae":
        return (loader.gather(torch.arange(loader.size, device=args.device), 0, 0),)
    items: tuple[Tensor, ...] = loader.items
    return items


def measure(
    step: Callable[[Any], Tensor], data: tuple[Tensor, ...], shape: tuple[int, int], seconds: float
) -> dict[str, float]:
    """Model-steps per second, and seconds before the first replay; ``shape`` is (M, B)."""
    began = time.perf_counter()
    on_gpu = data[0].is_cuda
    rows = torch.empty(shape, dtype=torch.int64, device=data[0].device)

    def whole(rows: Tensor) -> Tensor:
        rows.random_(len(data[0]))
        batch = tuple(each[rows] for each in data)
        return step(batch if len(batch) > 1 else batch[0])

    replay = StepGraph(whole) if on_gpu else whole
    for _ in range(5 if on_gpu else 1):
        losses = replay(rows)
    first = losses.cpu()
    start, taken = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(10 if on_gpu else 1):
            losses = replay(rows)
            taken += 1
        last = losses.cpu()
    spent = time.perf_counter() - start
    if not bool(last.isfinite().all()):
        raise RuntimeError("a loss is not finite")
    return {
        "ms_per_step": round(1e3 * spent / taken, 3),
        "model_steps_per_second": round(shape[0] * taken / spent, 1),
        "loss_first": round(float(first.mean()), 1),
        "loss_last": round(float(last.mean()), 1),
        "start_s": round(start - began, 1),
    }


def main() -> None:
    """Print the table and write it as CSV where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tuple(BATCHES), default="vae")
    parser.add_argument("--root", default="data", help="folder of MNIST (default data)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--models", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--size", type=int, nargs=2, default=[10, 8], help="N and K, of vae")
    parser.add_argument(
        "--heads", nargs="+", default=["natural"], help="of equal numbers of scores"
    )
    parser.add_argument("--tf32", nargs="+", default=["off"], choices=("off", "on"))
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device; choose cpu")
    data = read_data(args)
    table: list[dict[str, object]] = []
    for tf32 in args.tf32:
        torch.backends.cuda.matmul.allow_tf32 = tf32 == "on"
        for count in args.models:
            size = args.size if args.model == "vae" else ["", ""]
            row: dict[str, object] = {
                "model": args.model,
                "N": size[0],
                "K": size[1],
                "heads": "+".join(args.heads),
                "tf32": tf32,
                "models": count,
            }
            shape = (count, BATCHES[args.model])
            row |= measure(make_step(args, count), data, shape, args.seconds)
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
