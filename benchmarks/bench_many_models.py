"""Model-steps per second of M VAEs trained in one process, as one batched model under one graph.

A step is a step of all M models: each has its own batch, Gumbel noise, learning rate and clipped
gradient. Ways to take it:

- ``vmap``: ``torch.func.stack_module_state``, ``vmap`` and ``grad`` of ``DiscreteVAE`` itself;
- ``batched``: the layers of ``many_vaes.py``;
- ``compiled``: these layers under ``torch.compile``, which joins what lies between the products.

Sweeps take convolutions in TF32 and other products in float32, which are torch's defaults.
``--tf32`` says for which of these settings the batched products are timed: off is more exact than
a sweep, on is less exact.

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
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from many_vaes import ManyVAEs, adam, flattened, unflattened

from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE
from catnat.replay import StepGraph

N, K, BATCH = 10, 8, 100
# Multiplications of one image, forward: six layers of convolutions and four linear ones.
MULTIPLICATIONS = 2 * (14 * 14 * 72 + 7 * 7 * 16 * 72 + 3 * 3 * 32 * 144 + 288 * 128) + 128 * (
    N * (K - 1) + N * K
)
Step = Callable[[Tensor], Tensor]


def make_models(count: int, heads: list[str], device: str) -> tuple[list[DiscreteVAE], list[float]]:
    """Models of different seeds, the heads in turn but equal ones side by side, and their rates."""
    models = []
    for number in range(count):
        torch.manual_seed(number)
        models.append(DiscreteVAE(heads[number * len(heads) // count], N, K).to(device))
    return models, [1e-3 * 1.01**number for number in range(count)]


def batched_step(models: list[DiscreteVAE], rates: list[float], compiled: bool) -> Step:
    """A step of the layers in ``many_vaes.py``."""
    many = ManyVAEs(models, rates)
    if compiled:
        many.losses = torch.compile(many.losses, dynamic=False)  # type: ignore[method-assign]
        many.update = torch.compile(many.update, dynamic=False)  # type: ignore[method-assign]
    return lambda images: many.step(images, many.noise(images.shape[1]))


def vmap_step(models: list[DiscreteVAE], rates: list[float], device: str) -> Step:
    """A step by ``torch.func``; batch norms keep no running statistics, which vmap cannot write."""
    for model in models:
        torch.func.replace_all_batch_norm_modules_(model)
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]
    bare = LossOf(models[0])
    state = [
        torch.zeros_like(flattened(each.detach() for each in parameters.values())) for _ in range(2)
    ]
    steps, lr = torch.zeros((), device=device), torch.tensor(rates, device=device)[:, None]

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], images: Tensor) -> Tensor:
        named = {f"model.{name}": x for name, x in {**parameters, **buffers}.items()}
        out: Tensor = functional_call(bare, named, (images,))
        return out

    def step(images: Tensor) -> Tensor:
        taken = vmap(grad_and_value(loss), randomness="different")
        grads, losses = taken(parameters, buffers, images[:, :, None])
        with torch.no_grad():
            flat = flattened(each.detach() for each in parameters.values())
            adam(flattened(grads[name] for name in parameters), flat, *state, steps, lr)
            shapes = [each.shape for each in parameters.values()]
            new = unflattened(flat, shapes)
            for mine, each in zip(parameters.values(), new, strict=True):
                mine.copy_(each)
        return losses.detach()

    return step


class LossOf(nn.Module):
    """A module whose forward is the loss, for ``functional_call``."""

    def __init__(self, model: DiscreteVAE) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """The loss of a batch."""
        return self.model.step_loss(images)


def measure(step: Step, images: Tensor, models: int, seconds: float) -> dict[str, float]:
    """Model-steps per second, and seconds before the first replay."""
    began = time.perf_counter()
    rows = torch.empty(models, BATCH, dtype=torch.int64, device=images.device)

    def whole(rows: Tensor) -> Tensor:
        return step(images[rows.random_(len(images))])

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
        "teraflops": round(6e-12 * MULTIPLICATIONS * BATCH * models * taken / spent, 2),
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
    parser.add_argument(
        "--ways", nargs="+", default=["batched"], choices=("vmap", "batched", "compiled")
    )
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
        for way in args.ways:
            for count in args.models:
                models, rates = make_models(count, args.heads, args.device)
                if way == "vmap":
                    step = vmap_step(models, rates, args.device)
                else:
                    step = batched_step(models, rates, way == "compiled")
                row: dict[str, object] = {
                    "way": way,
                    "heads": "+".join(args.heads),
                    "tf32": tf32,
                    "models": count,
                }
                row |= measure(step, images, count, args.seconds)
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
