"""Speed of the heads as a ratio to ``torch.nn.functional.log_softmax`` on the same rows.

Forward plus backward of ``head.log_probs``. Every head and log_softmax are timed in turn, round
after round, and the median of the per-round ratios is printed: a slow moment of the machine hits
numerator and denominator alike.

    python benchmarks/bench_heads.py                  # CPU, one thread
    python benchmarks/bench_heads.py --device cuda    # device time by graph replay, host overhead
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

from catnat import head_names, make_head

SHAPES = {
    "cpu": [(2000, 32), (3000, 8), (64, 1024), (16, 32768)],
    "cuda": [(2000, 32), (200000, 32), (65536, 256), (8192, 4096)],
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


def device_seconds(replay: Step) -> float:
    """Device seconds of one step of a graph of ten."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e4


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
        torch.cuda.synchronize()
        for name, step in steps.items():
            torch.cuda.synchronize()
            host[name] = statistics.median(host_seconds(step, 20) for _ in range(5))
        steps = {name: graph_replay(step) for name, step in steps.items()}
        timer = device_seconds
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


def main() -> None:
    """Print the table and write it as CSV where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="repeats (default 15)")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device; choose cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread"
    print(f"forward + backward, float32, torch {torch.__version__}, {where}")
    table: list[dict[str, object]] = []
    for rows, K in SHAPES[args.device]:
        part = compare(rows, K, args.device, args.rounds)
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
