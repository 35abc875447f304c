"""Speed of the heads as a ratio to ``torch.nn.functional.log_softmax`` on the same rows.

Forward plus backward of ``head.log_probs``. Every head and log_softmax are timed in turn, round
after round, and the median of the per-round ratios is printed: a slow moment of the machine hits
numerator and denominator alike.

    python benchmarks/bench_heads.py                  # CPU, one thread
    python benchmarks/bench_heads.py --device cuda    # device time by graph replay, host overhead

With ``--paths`` the catnat heads' ``sample``, and ``log_prob`` forward plus backward (the gradient
is dense), are timed in the same way, called on the head and on the distribution it returns. They
are compared with torch's ``Categorical(logits=...).sample()`` and with log_softmax and gather, and
at K = 32 with the same head when it computes all log-probabilities first.

    python benchmarks/bench_heads.py --paths
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

from catnat import CategoricalHead, HeadCategorical, head_names, make_head

SHAPES = {
    "cpu": [(2000, 32), (3000, 8), (64, 1024), (16, 32768)],
    "cuda": [(2000, 32), (200000, 32), (65536, 256), (8192, 4096)],
}
PATH_SHAPES = {"cpu": [(8, 2**20), (64, 32), (2000, 32)], "cuda": [(8192, 2**17), (2000, 32)]}
PATH_LIMITS = {  # the largest ratio that is good enough, for many categories and for few
    ("cpu", "sample"): (1 / 50, 1.0),
    ("cpu", "log_prob"): (1 / 3, 1.0),
    ("cuda", "sample"): (1 / 5, 1.0),
    ("cuda", "log_prob"): (1 / 5, 1.0),
}
Step = Callable[[], object]


def make_step(name: str, rows: int, K: int, device: str) -> Step:
    """Forward and backward of one head (or of log_softmax) on fixed random scores."""
    head = None if name == "log_softmax" else make_head(name, K).to(device)
    S = K if head is None else head.num_scores
    scores = torch.randn(rows, S, device=device, requires_grad=True)
    grad = torch.randn(rows, K, device=device)

    def step() -> tuple[Tensor, ...]:
        out = F.log_softmax(scores, -1) if head is None else head.log_probs(scores)
        return torch.autograd.grad(out, scores, grad)

    return step


def host_seconds(step: Step, calls: int) -> float:
    """Seconds a call takes on the host, without waiting for a device."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def graph_replay(step: Step) -> Step:
    """The step captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = [step() for _ in range(10)]  # several steps, to measure kernels and not launches

    def replay() -> object:
        graph.replay()
        return keep

    return replay


def device_seconds(step: Step, calls: int) -> float:
    """Device seconds of a call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def peak_memory(name: str, rows: int, K: int) -> int:
    """Most bytes allocated on the GPU by one step beyond what its inputs take."""
    step = make_step(name, rows, K, "cuda")
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare(rows: int, K: int, device: str, rounds: int) -> list[dict[str, object]]:
    """One table row per head for one shape."""
    names = ["log_softmax", *head_names()]
    steps = {name: make_step(name, rows, K, device) for name in names}
    for step in steps.values():  # warm up, compile
        for _ in range(3):
            step()
    host: dict[str, float] = {}
    if device == "cuda":
        calls = 200 if rows * K <= 2**17 else 20  # never so many that the device's queue is full
        on_host: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(9):
            for name, step in steps.items():
                torch.cuda.synchronize()
                on_host[name].append(host_seconds(step, calls))
        host = {name: statistics.median(each) for name, each in on_host.items()}
        steps = {name: graph_replay(step) for name, step in steps.items()}

        def timer(step: Step) -> float:
            return device_seconds(step, 1) / 10  # a replay has ten steps

        memory = {name: peak_memory(name, rows, K) for name in names}
    else:
        calls = max(1, int(0.02 / host_seconds(steps["log_softmax"], 3)))

        def timer(step: Step) -> float:
            return host_seconds(step, calls)

    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timer(step))
    table = []
    for name in names:
        ratios = [a / b for a, b in zip(times[name], times["log_softmax"], strict=True)]
        row: dict[str, object] = {
            "device": device,
            "rows": rows,
            "K": K,
            "head": name,
            "microseconds": round(statistics.median(times[name]) * 1e6, 1),
            "ratio": round(statistics.median(ratios), 2),
        }
        if device == "cuda":
            row["memory_ratio"] = round(memory[name] / memory["log_softmax"], 2)
            row["host_microseconds"] = round(host[name] * 1e6, 1)
        table.append(row)
    return table


def torch_steps(rows: int, K: int, device: str) -> dict[str, Step]:
    """What torch offers: sampling, and log_softmax with gather, forward and backward."""
    scores = torch.randn(rows, K, device=device, requires_grad=True)
    value, ones = torch.randint(K, (rows,), device=device), torch.ones(rows, device=device)

    def log_prob() -> object:
        out = F.log_softmax(scores, -1).gather(-1, value[:, None])[:, 0]
        return torch.autograd.grad(out, scores, ones)

    given = scores.detach()
    return {"sample": lambda: Categorical(logits=given).sample(), "log_prob": log_prob}


def path_steps(head: CategoricalHead, how: str, rows: int, device: str) -> dict[str, Step]:
    """Sampling, and log_prob forward and backward.

    Args:
        head: a catnat head.
        how: ask the "head", the "distribution" it returns, or a distribution to which the head
            gave "all" log-probabilities.
        rows: B.
        device: of the scores.
    """
    scores = torch.randn(rows, head.num_scores, device=device, requires_grad=True)
    value, ones = torch.randint(head.num_categories, (rows,), device=device), torch.ones(rows)
    ones, given = ones.to(device), scores.detach()

    def distribution(scores: Tensor) -> HeadCategorical:
        if how == "all":
            return HeadCategorical(head.log_probs(scores), normalized=True)
        return head(scores)

    def sample() -> object:
        return head.sample(given) if how == "head" else distribution(given).sample()

    def log_prob() -> object:
        by_head = how == "head"
        out = head.log_prob(scores, value) if by_head else distribution(scores).log_prob(value)
        return torch.autograd.grad(out, scores, ones)

    return {"sample": sample, "log_prob": log_prob}


def compare_paths(rows: int, K: int, device: str, rounds: int) -> list[dict[str, object]]:
    """Table rows for one shape: every catnat head, asked in every way."""
    seconds = device_seconds if device == "cuda" else host_seconds
    table = []
    for name in ("sigmoid", "natural"):
        head, many = make_head(name, K).to(device), K > 2**10
        ways = {how: path_steps(head, how, rows, device) for how in ("head", "distribution")}
        base = torch_steps(rows, K, device) if many else path_steps(head, "all", rows, device)
        steps = {"torch" if many else "all": base, **ways}
        for what in ("sample", "log_prob"):
            for each in steps.values():
                each[what]()
            calls = max(1, int(0.02 / seconds(base[what], 1)))
            times: dict[str, list[float]] = {how: [] for how in steps}
            for _ in range(rounds):
                for how, each in steps.items():
                    # Where all log-probabilities take long, a path needs more calls than one.
                    n = calls if how in ("torch", "all") or not many else 10
                    times[how].append(seconds(each[what], n))
            first = times["torch" if many else "all"]
            for how, mine in times.items():
                ratio = statistics.median(a / b for a, b in zip(mine, first, strict=True))
                row: dict[str, object] = {
                    "device": device,
                    "rows": rows,
                    "K": K,
                    "head": "torch" if how == "torch" else name,
                    "what": what,
                    "how": how,
                    "microseconds": round(statistics.median(mine) * 1e6, 1),
                    "ratio": float(f"{ratio:.3g}"),
                    "limit": float(f"{PATH_LIMITS[device, what][0 if many else 1]:.3g}"),
                }
                table.append(row)
    return table


def main() -> None:
    """Print the table and write it as CSV where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="repeats (default 15)")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--paths", action="store_true", help="sample and log_prob instead")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device; choose cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread"
    print(f"forward + backward, float32, torch {torch.__version__}, {where}")
    table: list[dict[str, object]] = []
    for rows, K in (PATH_SHAPES if args.paths else SHAPES)[args.device]:
        measure = compare_paths if args.paths else compare
        part = measure(rows, K, args.device, args.rounds)
        if not table:
            print("  ".join(f"{key:>12}" for key in part[0]))
        for row in part:
            print("  ".join(f"{value!s:>12}" for value in row.values()), flush=True)
        table += part
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]))
            writer.writeheader()
            writer.writerows(table)
        print(f"written to {args.csv}")


if __name__ == "__main__":
    main()
