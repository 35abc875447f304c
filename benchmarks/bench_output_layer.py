"""Speed and memory of output layers: forward, backward and optimizer step over K classes.

Every layer takes the same hidden states and targets and is trained by Adam. On the CPU the layers
are timed in turn, round after round; on CUDA, where they do not all fit, one after another. The
table has medians, ratios to the best exact softmax, and memory. The exact softmaxes are torch's
linear layer with cross_entropy (of logits in float32, and on CUDA of those in bfloat16), torch's
linear_cross_entropy (torch 2.13 and later), Liger and cut-cross-entropy; the last two on CUDA where
they are installed. By default cut-cross-entropy leaves out gradients below 2^-12 of the logits; it
is timed with all gradients, too. Targets are as frequent as words are (Zipf: class k has
probability proportional to 1 / (k + 1)), or uniform. The csv file is written after each layer.

With --generate the table also has the milliseconds that it takes to draw one class and to find the
ten likeliest ones for each of 1 and of 64 hidden states, softmax's time over these, and the
megabytes of weights that one drawn class needs: those of a softmax are read once for the batch,
those on paths once for each class. All weights are multiplied by 4 before: a layer that has learned
nothing is nearly uniform, and there a search visits many nodes.

A layer with "RowAdam" in its name is trained by catnat.optim.RowAdam, which updates the rows with a
gradient alone. --quick measures softmax, adaptive softmax and TreeLinear with both optimizers, with
--generate, in less than a minute.

    python benchmarks/bench_output_layer.py                  # CPU, one thread, 512 x 512 x 131072
    python benchmarks/bench_output_layer.py --shape 1024 256 8192 --rounds 15
    python benchmarks/bench_output_layer.py --device cuda   # 8192 x 4096 x 131072, bfloat16
    python benchmarks/bench_output_layer.py --device cuda --shape 8192 1024 1048576
    python benchmarks/bench_output_layer.py --device cuda --quick --out quick.csv

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catnat import TreeLinear
from catnat.optim import RowAdam

SHAPES = {"cpu": (512, 512, 131072), "cuda": (8192, 4096, 131072)}
Loss = Callable[[Tensor, Tensor], Tensor]
LayerAndLoss = tuple[nn.Module, Loss, str]  # and the name of its optimizer


def linear(D: int, K: int) -> LayerAndLoss:
    layer = nn.Linear(D, K)
    return layer, lambda h, t: F.cross_entropy(layer(h).float(), t), "Adam"


def linear_in_bfloat16(D: int, K: int) -> LayerAndLoss:
    layer = nn.Linear(D, K)
    return layer, lambda h, t: F.cross_entropy(layer(h), t), "Adam"


def fused(D: int, K: int) -> LayerAndLoss:
    layer = nn.Linear(D, K)
    options = nn.LinearCrossEntropyOptions()  # without them torch makes all logits
    more = {"linear_bias": layer.bias, "options": options}
    return layer, lambda h, t: F.linear_cross_entropy(h, layer.weight, t, **more), "Adam"


def adaptive(D: int, K: int) -> LayerAndLoss:
    layer = nn.AdaptiveLogSoftmaxWithLoss(D, K, cutoffs=[K // 16, K // 4])
    return layer, lambda h, t: layer(h, t).loss, "Adam"


def liger(D: int, K: int) -> LayerAndLoss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    layer, loss = nn.Linear(D, K), LigerFusedLinearCrossEntropyLoss()
    return layer, lambda h, t: loss(layer.weight, h, t, layer.bias), "Adam"


def cut(D: int, K: int, **options: Any) -> LayerAndLoss:
    from cut_cross_entropy import linear_cross_entropy

    layer = nn.Linear(D, K, bias=False)  # its version 25.1 takes no bias
    return layer, lambda h, t: linear_cross_entropy(h, layer.weight, t, **options), "Adam"


def tree(
    D: int,
    K: int,
    head: str = "sigmoid",
    sparse: bool = False,
    frequent: int = 0,
    optimizer: str = "Adam",
) -> LayerAndLoss:
    layer = TreeLinear(D, K, head, sparse=sparse, frequent=frequent)
    return layer, layer.nll, "SparseAdam" if sparse else optimizer


LAYERS: dict[str, Callable[[int, int], LayerAndLoss]] = {
    "linear + cross_entropy": linear,
    "linear + cross_entropy in bfloat16": linear_in_bfloat16,
    "linear_cross_entropy": fused,
    "liger": liger,
    "cut-cross-entropy": cut,
    "cut-cross-entropy, all gradients": partial(cut, filter_eps=None),
    "adaptive softmax": adaptive,
    "tree sigmoid": tree,
    "tree natural": partial(tree, head="natural"),
    "tree natural, sparse gradient": partial(tree, head="natural", sparse=True),
    "hybrid, F = 64": partial(tree, frequent=64),
    "hybrid, F = 256": partial(tree, frequent=256),
    "hybrid, F = 1024": partial(tree, frequent=1024),
    "hybrid, F = 4096": partial(tree, frequent=4096),
    "hybrid, F = 8192": partial(tree, frequent=8192),
    "tree sigmoid, RowAdam": partial(tree, optimizer="RowAdam"),
    "hybrid, F = 1024, RowAdam": partial(tree, frequent=1024, optimizer="RowAdam"),
    "hybrid, F = 4096, RowAdam": partial(tree, frequent=4096, optimizer="RowAdam"),
}
QUICK = (
    "linear + cross_entropy",
    "linear + cross_entropy in bfloat16",
    "adaptive softmax",
    "tree sigmoid",
    "tree sigmoid, RowAdam",
    "hybrid, F = 4096",
    "hybrid, F = 4096, RowAdam",
)
GENERATED = (1, 64)  # hidden states that classes are drawn and searched for
LIKELIEST = 10
SHARPNESS = 4  # of the weights at the start
EXACT = tuple(LAYERS)[:6]
NEEDS = {  # a package, on CUDA alone
    "linear + cross_entropy in bfloat16": "torch",
    "liger": "liger_kernel",
    "cut-cross-entropy": "cut_cross_entropy",
    "cut-cross-entropy, all gradients": "cut_cross_entropy",
}


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
            self.layer, self.loss, optimizer = LAYERS[name](*shape[1:])
        self.layer.to(dtype)
        parameters = list(self.layer.parameters())
        makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "Adam": partial(torch.optim.Adam, fused=True),
            "RowAdam": RowAdam,
            "SparseAdam": torch.optim.SparseAdam,
        }
        self.optimizer = makers[optimizer](parameters)
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

    def whole_steps(self) -> list[float]:
        """Seconds of whole steps."""
        return [a + b for a, b in zip(self.learning, self.stepping, strict=True)]

    def forget_tensors(self) -> None:
        """Make room for the next layer; the seconds stay."""
        del self.layer, self.loss, self.optimizer

    @torch.no_grad()
    def generation(self, rounds: int) -> dict[str, float | str]:
        """Milliseconds to draw a class and to find the likeliest ones, and megabytes of a draw."""
        row: dict[str, float | str] = {}
        layer, D = self.layer, self.shape[1]
        for parameter in layer.parameters():
            parameter.mul_(SHARPNESS)
        for batch_size in GENERATED:
            draw_name, megabytes_name, search_name = generation_names(batch_size)
            row |= dict.fromkeys((draw_name, megabytes_name, search_name), "")
            if isinstance(layer, TreeLinear):
                shared = layer.num_frequent + 1 if layer.num_frequent else 0
                rows_read = shared / batch_size + (len(layer.weight)).bit_length()
                draw: Callable[[Tensor], object] = layer.sample
                search: Callable[[Tensor], object] = partial(layer.topk, k=LIKELIEST)
            elif isinstance(layer, nn.Linear):
                rows_read = len(layer.weight) / batch_size
                draw = partial(draw_from_softmax, layer)
                search = partial(topk_of_softmax, layer)
            else:
                continue
            weight = next(layer.parameters())
            hidden = torch.randn(batch_size, D, device=self.device).to(weight.dtype)
            row[draw_name] = self._milliseconds(draw, hidden, rounds)
            row[megabytes_name] = rows_read * D * weight.element_size() / 1e6
            row[search_name] = self._milliseconds(search, hidden, rounds)
        return row

    def _milliseconds(
        self, function: Callable[[Tensor], object], hidden: Tensor, rounds: int
    ) -> float:
        """The median time of a call."""
        seconds = []
        for _ in range(rounds + 3):
            start = self._now()
            function(hidden)
            seconds.append(self._now() - start)
        return 1e3 * statistics.median(seconds[3:])

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


def draw_from_softmax(layer: nn.Linear, hidden: Tensor) -> Tensor:
    return layer(hidden).float().softmax(-1).multinomial(1)


def topk_of_softmax(layer: nn.Linear, hidden: Tensor) -> object:
    return layer(hidden).topk(LIKELIEST)


def generation_names(batch_size: int) -> tuple[str, str, str]:
    """Columns: the time of a draw, its megabytes, and the time of a search."""
    return (
        f"sample ms, batch {batch_size}",
        f"MB a sample, batch {batch_size}",
        f"topk({LIKELIEST}) ms, batch {batch_size}",
    )


def size_in_bytes(x: Tensor) -> int:
    if x.is_sparse:
        return size_in_bytes(x._values()) + size_in_bytes(x._indices())
    return x.numel() * x.element_size()


def measure(args: argparse.Namespace, targets: str) -> Iterator[list[dict]]:
    """The rows of the layers that have been measured, again after each of them."""
    device, shape = args.device, tuple(args.shape)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # A softmax over a million classes fills a GPU, so layers go one by one there.
    groups = [[name] for name in args.layers] if device == "cuda" else [args.layers]
    results: dict[str, tuple[Contender, dict[str, float | str]]] = {}
    for group in groups:
        generator = torch.Generator(device).manual_seed(1)
        hidden, target = batch(shape, dtype, generator, targets)
        contenders = make_contenders(group, shape, device, dtype, hidden, target)
        for _ in range(args.rounds):
            hidden, target = batch(shape, dtype, generator, targets)
            for contender in contenders.values():
                contender.step(hidden, target)
        for name, contender in contenders.items():
            numbers: dict[str, float | str] = {"memory GB": contender.memory(hidden, target)}
            if args.generate:
                numbers |= contender.generation(args.rounds)
            results[name] = contender, numbers
            contender.forget_tensors()
        if results:
            yield rows_of(results, targets)


def rows_of(
    results: dict[str, tuple[Contender, dict[str, float | str]]], targets: str
) -> list[dict]:
    exact = [results[name][0] for name in EXACT if name in results]
    exact = exact or [contender for contender, _ in results.values()]
    learning = min((contender.learning for contender in exact), key=statistics.median)
    stepping = min((contender.whole_steps() for contender in exact), key=statistics.median)
    rows = [
        {
            **dict(zip("MDK", contender.shape, strict=True)),
            "layer": name,
            "targets": targets,
            "forward + backward ms": 1e3 * statistics.median(contender.learning),
            "with step ms": 1e3 * statistics.median(contender.whole_steps()),
            "times faster": ratio(learning, contender.learning),
            "times faster with step": ratio(stepping, contender.whole_steps()),
            **numbers,
        }
        for name, (contender, numbers) in results.items()
    ]
    add_ratios(rows)
    return rows


def add_ratios(rows: list[dict]) -> None:
    """Add softmax's time of a draw and of a search over that of each layer."""
    for batch_size in GENERATED:
        draw_name, _, search_name = generation_names(batch_size)
        for column in (draw_name, search_name):
            times = [row[column] for row in rows if row["layer"] in EXACT and row.get(column)]
            for row in rows:
                if column in row:
                    has_both = bool(times and row[column])
                    name = column.replace(" ms", ", times faster")
                    row[name] = min(times) / row[column] if has_both else ""


def batch(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator, targets: str
) -> tuple[Tensor, Tensor]:
    M, D, K = shape
    device = generator.device
    hidden = torch.randn(M, D, device=device, generator=generator).to(dtype).requires_grad_()
    if targets == "uniform":
        return hidden, torch.randint(K, (M,), device=device, generator=generator)
    frequencies = 1 / torch.arange(1, K + 1, device=device)
    return hidden, frequencies.multinomial(M, True, generator=generator)


def make_contenders(
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
            for _ in range(3):
                contender.step(hidden, target)
        except Exception as error:  # of any package: the others are measured all the same
            print(f"{name} is left out: {error!r:.200}", flush=True)
            continue
        contender.learning, contender.stepping = [], []
        contenders[name] = contender
    return contenders


def ratio(base: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(base, other, strict=True))


def write(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "D", "K"))
    parser.add_argument("--targets", nargs="+", choices=("zipf", "uniform"), default=["zipf"])
    parser.add_argument("--generate", action="store_true", help="also draw classes")
    parser.add_argument("--rounds", type=int, default=None, help="timed steps (3, on CUDA 20)")
    parser.add_argument("--quick", action="store_true", help="few layers, --generate, one minute")
    parser.add_argument("--layers", nargs="*", choices=LAYERS, help="some of the layers")
    parser.add_argument("--out", type=Path, help="a csv file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    possible = available(args.device)
    if args.quick:
        args.generate = True
        possible = [name for name in QUICK if name in possible]
    args.layers = args.layers or possible
    args.shape = args.shape or SHAPES[args.device]
    args.rounds = args.rounds or (20 if args.device == "cuda" else 3)
    rows: list[dict] = []
    for targets in args.targets:
        rows_before = rows
        for measured in measure(args, targets):
            rows = rows_before + measured
            if args.out:
                write(args.out, rows)
    print(f"M, D, K = {tuple(args.shape)}, {args.device}, torch {torch.__version__}")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        cells = (x if isinstance(x, str) else f"{x:.3g}" for x in row.values())
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
