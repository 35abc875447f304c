"""Speed and memory of output layers: forward, backward and optimizer step over K classes.

Every layer takes the same hidden states and targets and is trained by Adam (TreeLinear by RowAdam).
On the CPU the layers are timed in turn, round after round; on CUDA, where they do not all fit,
one after another. The table has medians, ratios to torch's linear layer with cross_entropy (medians
of the ratios of each round), and memory.

    python benchmarks/bench_output_layer.py                  # CPU, one thread, 512 x 512 x 131072
    python benchmarks/bench_output_layer.py --device cuda    # 8192 x 4096 x 131072, bfloat16
    python benchmarks/bench_output_layer.py --device cuda --shape 8192 1024 1048576

Layers of Liger and cut-cross-entropy are timed on CUDA where they are installed. Times on the CPU
are processor time of one thread, which other processes do not lengthen much. Memory on CUDA is the
peak of a step of the layer alone; on the CPU it is that of weights, gradients and moments.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catnat import TreeLinear
from catnat.optim import RowAdam

SHAPES = {"cpu": (512, 512, 131072), "cuda": (8192, 4096, 131072)}
Loss = Callable[[Tensor, Tensor], Tensor]
Made = tuple[nn.Module, Loss, bool]  # the layer, its loss, whether its gradients are sparse


def linear(D: int, K: int) -> Made:
    layer = nn.Linear(D, K)
    return layer, lambda h, t: F.cross_entropy(layer(h).float(), t), False


def adaptive(D: int, K: int) -> Made:
    layer = nn.AdaptiveLogSoftmaxWithLoss(D, K, cutoffs=[K // 16, K // 4])
    return layer, lambda h, t: layer(h, t).loss, False


def liger(D: int, K: int) -> Made:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    layer, loss = nn.Linear(D, K), LigerFusedLinearCrossEntropyLoss()
    return layer, lambda h, t: loss(layer.weight, h, t, layer.bias), False


def cut(D: int, K: int) -> Made:
    from cut_cross_entropy import linear_cross_entropy

    layer = nn.Linear(D, K, bias=False)  # its version 25.1 takes no bias
    return layer, lambda h, t: linear_cross_entropy(h, layer.weight, t), False


def tree(D: int, K: int, head: str, sparse: bool) -> Made:
    layer = TreeLinear(D, K, head, sparse=sparse)
    return layer, layer.nll, sparse


LAYERS: dict[str, Callable[[int, int], Made]] = {
    "linear + cross_entropy": linear,
    "adaptive softmax": adaptive,
    "liger": liger,
    "cut-cross-entropy": cut,
    "tree sigmoid": partial(tree, head="sigmoid", sparse=True),
    "tree natural": partial(tree, head="natural", sparse=True),
    "tree natural, dense gradient": partial(tree, head="natural", sparse=False),
}
NEEDS = {"liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}


def available(device: str) -> list[str]:
    return [
        name
        for name in LAYERS
        if name not in NEEDS or (device == "cuda" and importlib.util.find_spec(NEEDS[name]))
    ]


class Contender:
    """A layer, its optimizer, and the seconds of each part of its steps."""

    def __init__(self, name: str, shape: tuple[int, int, int], device: str, dtype: torch.dtype):
        self.shape, self.device = shape, device
        torch.manual_seed(0)
        with torch.device(device):
            self.layer, self.loss, sparse = LAYERS[name](*shape[1:])
        self.layer.to(dtype)
        parameters = list(self.layer.parameters())
        if sparse:
            self.optimizer: torch.optim.Optimizer = RowAdam(parameters)
        else:
            self.optimizer = torch.optim.Adam(parameters, fused=True)
        self.learning: list[float] = []  # forward and backward
        self.stepping: list[float] = []  # the optimizer

    def step(self, hidden: Tensor, target: Tensor) -> None:
        """One step, timed."""
        self.optimizer.zero_grad()
        start = self._now()
        self.loss(hidden, target).backward()
        middle = self._now()
        self.optimizer.step()
        self.learning.append(middle - start)
        self.stepping.append(self._now() - middle)

    def _now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def both(self) -> list[float]:
        """Seconds of whole steps."""
        return [a + b for a, b in zip(self.learning, self.stepping, strict=True)]

    def forget_tensors(self) -> None:
        """Make room for the next layer; the seconds stay."""
        del self.layer, self.loss, self.optimizer

    def memory(self, hidden: Tensor, target: Tensor) -> float:
        """Gigabytes: on CUDA the peak of a step; on the CPU weights, gradients and moments."""
        if self.device == "cuda":
            self.optimizer.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            self.loss(hidden, target).backward()
            self.optimizer.step()
            return torch.cuda.max_memory_allocated() / 1e9
        tensors = [*self.layer.parameters(), *(p.grad for p in self.layer.parameters())]
        for state in self.optimizer.state.values():
            tensors += [x for x in state.values() if isinstance(x, Tensor)]
        return sum(size_in_bytes(x) for x in tensors if x is not None) / 1e9


def size_in_bytes(x: Tensor) -> int:
    if x.is_sparse:
        return size_in_bytes(x._values()) + size_in_bytes(x._indices())
    return x.numel() * x.element_size()


def measure(names: list[str], shape: tuple[int, int, int], device: str, rounds: int) -> list[dict]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # A softmax over a million classes fills a GPU, so layers go one by one there.
    groups = [[name] for name in names] if device == "cuda" else [names]
    rows: list[dict] = []
    base: Contender | None = None
    for group in groups:
        generator = torch.Generator(device).manual_seed(1)
        contenders = made(group, shape, device, dtype, *batch(shape, dtype, generator))
        for _ in range(rounds):
            hidden, target = batch(shape, dtype, generator)
            for each in contenders.values():
                each.step(hidden, target)
        for name, each in contenders.items():
            base = base or each
            rows.append(row_of(name, each, base) | {"memory GB": each.memory(hidden, target)})
            each.forget_tensors()
    return rows


def batch(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    M, D, K = shape
    hidden = torch.randn(M, D, device=generator.device, generator=generator).to(dtype)
    return hidden.requires_grad_(), torch.randint(
        K, (M,), device=generator.device, generator=generator
    )


def row_of(name: str, each: Contender, base: Contender) -> dict[str, str | float]:
    both, base_both = each.both(), base.both()
    return {
        "layer": name,
        "forward + backward ms": 1e3 * statistics.median(each.learning),
        "with step ms": 1e3 * statistics.median(both),
        "times faster": ratio(base.learning, each.learning),
        "times faster with step": ratio(base_both, both),
    }


def made(
    names: list[str],
    shape: tuple[int, int, int],
    device: str,
    dtype: torch.dtype,
    hidden: Tensor,
    target: Tensor,
) -> dict[str, Contender]:
    """The layers that can take a step with these tensors."""
    contenders = {}
    for name in names:
        try:
            contender = Contender(name, shape, device, dtype)
            contender.step(hidden, target)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}", flush=True)
            continue
        contender.learning, contender.stepping = [], []
        contenders[name] = contender
    return contenders


def ratio(base: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(base, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "D", "K"))
    parser.add_argument("--rounds", type=int, default=None, help="timed steps (3, on CUDA 20)")
    parser.add_argument("--layers", nargs="*", help="some of the layers, the base first")
    parser.add_argument("--out", type=Path, help="a csv file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.layers or available(args.device)
    shape = tuple(args.shape or SHAPES[args.device])
    rows = measure(names, shape, args.device, args.rounds or (20 if args.device == "cuda" else 3))
    print(f"M, D, K = {shape}, {args.device}")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        cells = (x if isinstance(x, str) else f"{x:.3g}" for x in row.values())
        print("| " + " | ".join(cells) + " |")
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
