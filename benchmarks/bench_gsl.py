"""Time of a training step of graph structure learning, by graph size and against a plain loop.

CPU: one thread, in CPU seconds, which do not depend on what else the machine does.
``GraphStructureLearner`` in Lightning with ``FisherMonitor`` at every step, both estimators; the
same step written with torch-geometric's batches of sparse graphs and pairwise differences; time
and peak memory (on Linux) of a step on graphs of 24, 96 and 384 nodes.
CUDA: steps replayed as graphs against eager ones.

    python benchmarks/bench_gsl.py
    python benchmarks/bench_gsl.py --device cuda
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from bench_vae import Clock, now
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from catnat.callbacks import FisherMonitor
from catnat.datamodules import CommunityGraphDataModule
from catnat.lit_modules import GraphStructureLearner

ESTIMATORS = ("score_function", "local_expectation")
BATCH, STEPS_OF_A_RUN = 64, 5000


def lightning(args: argparse.Namespace, capture: bool, **options: Any) -> float:
    """Seconds per step in a Lightning Trainer with TensorBoard, monitored at every step."""
    pl.seed_everything(0, verbose=False)
    clock = Clock(args.steps // 4, now if args.device == "cuda" else time.process_time)
    trainer = pl.Trainer(
        max_steps=args.steps,
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1,
        logger=TensorBoardLogger(args.logs, name="bench"),
        callbacks=[clock, FisherMonitor()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    model = GraphStructureLearner(args.head, capture=capture, **options)
    trainer.fit(model, datamodule=CommunityGraphDataModule())
    return clock.seconds_per_step


def a_batch(num_nodes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, num_nodes, 4), torch.randn(BATCH, num_nodes, 2)


def step_of(model: GraphStructureLearner, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """One step from loss to update, without Lightning."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def plain_step(args: argparse.Namespace) -> Callable[[], None]:
    """Our step without Lightning."""
    torch.manual_seed(0)
    model, batch = GraphStructureLearner(args.head), a_batch(24)
    return step_of(model, lambda: model.step_loss(batch))


def sparse_batches_step(args: argparse.Namespace) -> Callable[[], None]:
    """The same step as one would write it with torch-geometric: same loss, same estimator."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv

    torch.manual_seed(0)
    model, (x, y) = GraphStructureLearner(args.head), a_batch(24)
    conv = GCNConv(4, 2, normalize=False, add_self_loops=False, bias=False)
    model.predictor = conv
    M = model.num_samples

    def loss() -> Tensor:
        q = model((x, y))
        graphs = q.sample((M,))
        edges = [graph.nonzero().t() for graph in graphs]
        data = [Data(x=each, edge_index=edge) for each in x for edge in edges]
        merged = Batch.from_data_list(data)
        outputs = conv(merged.x, merged.edge_index).reshape(BATCH, M, -1)
        error = (outputs - y.flatten(1)[:, None]).norm(dim=-1)  # (B, M)
        apart = outputs[:, :, None] - outputs[:, None]  # (B, M, M, N D)
        distance = (apart.square().sum(-1) + 1e-12).sqrt()
        score = (error.mean(1) - distance.sum((1, 2)) / (2 * M * (M - 1))).mean()
        log_prob = q.log_prob(graphs).sum((1, 2))
        e, d = error.detach().mean(0), distance.detach().mean(0)
        r = d.sum(1)
        weight = e - (e.sum() - e) / (M - 1) - r / (M - 1)
        weight = (weight + (d.sum() - 2 * r) / ((M - 1) * (M - 2))) / M
        return score + (weight * log_prob).sum()

    return step_of(model, loss)


def seconds(step: Callable[[], None], repeats: int) -> float:
    for _ in range(2):
        step()
    began = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - began) / repeats


def growth(args: argparse.Namespace) -> None:
    """Time and peak memory of a step by the number of nodes, each in a process of its own."""
    print("\nA step by the number of nodes N: batch 64, M = 32, theta from U(0, 0.1)")
    print(f"{'estimator':20}{'N':>6}{'ms/step':>10}{'growth':>8}{'peak MB':>9}{'growth':>8}")
    for estimator in ESTIMATORS:
        before = None
        for nodes in (24, 96, 384):
            command = [sys.executable, __file__, "--measure", f"{estimator},{nodes}"]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            ms, megabytes = map(float, out.split()[-2:])
            grown = [" " * 8] * 2
            if before is not None:
                grown = [f"{ms / before[0]:7.1f}x", f"{megabytes / before[1]:7.1f}x"]
            print(f"{estimator:20}{nodes:6}{ms:10.1f}{grown[0]}{megabytes:9.1f}{grown[1]}")
            before = (ms, megabytes)


def measure(estimator: Any, nodes: int) -> None:
    """Print milliseconds of a step, and megabytes that it needs beyond those of the model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = GraphStructureLearner(num_nodes=nodes, estimator=estimator), a_batch(nodes)
    step = step_of(model, lambda: model.step_loss(batch))
    spent = seconds(step, {24: 50, 96: 10}.get(nodes, 3))
    ctypes.CDLL(None).malloc_trim(0)  # give free memory back to the system
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = memory("VmRSS")
    step()
    print(spent * 1e3, memory("VmHWM") - before)


def memory(field: str) -> float:
    """Megabytes of this process, now (VmRSS) or at most (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    """Print milliseconds per step and ratios."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--head", default="natural")
    parser.add_argument("--steps", type=int, help="steps of a run (CPU 400, CUDA 4000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path, default=Path("runs/bench"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        estimator, nodes = args.measure.split(",")
        return measure(estimator, int(nodes))
    args.steps = args.steps or (400 if args.device == "cpu" else 4000)
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], float]] = {}
    if args.device == "cpu":
        runs["sparse batches, pairwise differences"] = lambda: seconds(sparse_batches_step(args), 5)
        runs["our step, no Lightning"] = lambda: seconds(plain_step(args), 100)
    for estimator in ESTIMATORS:
        for capture in (False, True) if args.device == "cuda" else (False,):
            how = {False: "eager", True: "replayed"}[capture] if args.device == "cuda" else "run"
            runs[f"{how}, {estimator}"] = lambda c=capture, e=estimator: lightning(  # type: ignore[misc]
                args, c, estimator=e
            )
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(run())
            print(f"  {name}: {times[name][-1] * 1e3:.3f} ms", flush=True)
    show(args, times)
    if args.device == "cpu":
        growth(args)


def show(args: argparse.Namespace, times: dict[str, list[float]]) -> None:
    base = next(iter(times.values()))
    where = "one CPU thread" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"\nGraphStructureLearner, {args.head}, N = 24, batch 64, M = 32, {where}")
    print("runs are Lightning's, with FisherMonitor at every step and TensorBoard")
    print(f"{'':38}{'ms/step':>9}{'ratio':>8}{'5,000 steps, s':>16}")
    for name, values in times.items():
        ratio = statistics.median(b / v for b, v in zip(base, values, strict=True))
        spent = statistics.median(values)
        print(f"{name:38}{spent * 1e3:9.3f}{ratio:8.2f}{spent * STEPS_OF_A_RUN:16.1f}")


if __name__ == "__main__":
    main()
