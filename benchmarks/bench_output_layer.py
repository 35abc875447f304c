"""Speed and memory of output layers: forward, backward and optimizer step over K classes.

Every layer takes the same hidden states and targets and is trained by Adam. On the CPU the layers
are timed in turn, round after round; on CUDA, where they do not all fit, one after another. The
table has medians, ratios to the best exact softmax, and memory. The exact softmaxes are torch's
linear layer with cross_entropy, torch's linear_cross_entropy (torch 2.13 and later), Liger and
cut-cross-entropy; the last two on CUDA where they are installed.

    python benchmarks/bench_output_layer.py                  # CPU, one thread, 512 x 512 x 131072
    python benchmarks/bench_output_layer.py --device cuda    # 8192 x 4096 x 131072, bfloat16
    python benchmarks/bench_output_layer.py --device cuda --shape 8192 1024 1048576

Times on the CPU are processor time of one thread, which other processes do not lengthen much.
Memory on CUDA is the peak of a step of the layer alone; on the CPU it is that of weights, gradients
and moments.
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

SHAPES = {"cpu": (512, 512, 131072), "cuda": (8192, 4096, 131072)}
Loss = Callable[[Tensor, Tensor], Tensor]
Made = tuple[nn.Module, Loss, bool]  # the layer, its loss, whether its gradients are sparse


def linear(D: int, K: int) -> Made:
    layer = nn.Linear(D, K)
    return layer, lambda h, t: F.cross_entropy(layer(h).float(), t), False


def fused(D: int, K: int) -> Made:
    layer = nn.Linear(D, K)
    options = nn.LinearCrossEntropyOptions()  # without them torch makes all logits
    given = {"linear_bias": layer.bias, "options": options}
    return layer, lambda h, t: F.linear_cross_entropy(h, layer.weight, t, **given), False


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
    "linear_cross_entropy": fused,
    "liger": liger,
    "cut-cross-entropy": cut,
    "adaptive softmax": adaptive,
    "tree sigmoid": partial(tree, head="sigmoid", sparse=False),
    "tree natural": partial(tree, head="natural", sparse=False),
    "tree natural, sparse gradient": partial(tree, head="natural", sparse=True),
}
EXACT = ("linear + cross_entropy", "linear_cross_entropy", "liger", "cut-cross-entropy")
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
            self.optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(parameters)
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
    done: dict[str, tuple[Contender, float]] = {}
    for group in groups:
        generator = torch.Generator(device).manual_seed(1)
        contenders = made(group, shape, device, dtype, *batch(shape, dtype, generator))
        for _ in range(rounds):
            hidden, target = batch(shape, dtype, generator)
            for each in contenders.values():
                each.step(hidden, target)
        for name, each in contenders.items():
            done[name] = each, each.memory(hidden, target)
            each.forget_tensors()
    exact = [done[name][0] for name in EXACT if name in done] or [each for each, _ in done.values()]
    learning = min((each.learning for each in exact), key=statistics.median)
    both = min((each.both() for each in exact), key=statistics.median)
    return [row_of(name, *each, learning, both) for name, each in done.items()]


def batch(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    M, D, K = shape
    hidden = torch.randn(M, D, device=generator.device, generator=generator).to(dtype)
    return hidden.requires_grad_(), torch.randint(
        K, (M,), device=generator.device, generator=generator
    )


def row_of(
    name: str, each: Contender, memory: float, best: list[float], best_with_step: list[float]
) -> dict[str, str | float]:
    """A row of the table; the seconds of the best exact softmax are what ratios refer to."""
    return {
        "layer": name,
        "forward + backward ms": 1e3 * statistics.median(each.learning),
        "with step ms": 1e3 * statistics.median(each.both()),
        "times faster": ratio(best, each.learning),
        "times faster with step": ratio(best_with_step, each.both()),
        "memory GB": memory,
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
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
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
    parser.add_argument("--layers", nargs="*", help="some of the layers")
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
