"""Model-steps per second of M models trained as one, by ``catnat/sweeps/batched.py``.

python benchmarks/bench_many_models.py --root DATA
python benchmarks/bench_many_models.py --model gsl --models 100
"""

from __future__ import annotations

import argparse
import time

import torch

from catnat.cuda_graph import StepGraph
from catnat.sweeps import batched


def rate(args: argparse.Namespace, count: int) -> float:
    """Steps of all models in a second, without validation."""
    more = [f"--root={args.root}"] if args.root else []
    words = [f"--model={args.model}", f"--head={args.head}", "--max_steps=100000", *more]
    members = [
        batched.build([*words, f"--seed={seed}", f"--learning_rate={0.001 * (1 + seed / count)}"])
        for seed in range(count)
    ]
    group = batched.Group(members)
    cuda = group.device.type == "cuda"
    take = StepGraph(group.step) if cuda else group.step
    batches, steps, began = group.batches(), 0, 0.0
    for step in range(10**6):
        if step == 10:  # after the capture
            if cuda:
                torch.cuda.synchronize()
            began, steps = time.perf_counter(), 0
        group.stack.prepare_step(step)
        take(next(batches))
        steps += 1
        if cuda and step % 10 == 0:
            torch.cuda.synchronize()
        if step > 10 and time.perf_counter() - began > args.seconds:
            break
    if cuda:
        torch.cuda.synchronize()
    return count * steps / (time.perf_counter() - began)


def main() -> None:
    """Print a line for each number of models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="vae", choices=("vae", "mlp-vae", "gsl"))
    parser.add_argument("--head", default="natural")
    parser.add_argument("--models", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--root", help="folder of the images")
    args = parser.parse_args()
    for count in args.models:
        print(f"{args.model}, {count} models: {rate(args, count):,.0f} model-steps/s", flush=True)


if __name__ == "__main__":
    main()
