"""Training steps of the VAE in several processes that share one device, and the parts of a step.

``bench_vae.py --processes`` calls this. Every process is a rank of Lightning's DDP, with its share
of a batch of 100; all of them run on the first GPU, where NCCL allows one rank only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from bench_vae import Clock, K, N, now
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE
from catnat.replay import StepInParts

BATCH = 100  # of all processes together
ALONE = "replayed, no DDP"


class Parts(pl.Callback):
    """Measures the captured parts of a step, and the all-reduce between them, after the last step.

    Each part is repeated without the others, so that the parts add up to less than a step in which
    one process waits for another.
    """

    def __init__(self, repeats: int = 200) -> None:
        self.repeats = repeats
        self.seconds: dict[str, float] = {}

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Measure; afterwards the model is of no use."""
        graph = getattr(getattr(module, "_replay", None), "_graph", None)
        if isinstance(graph, StepInParts):
            (batch,) = graph.first._input or [None]
            first = self._measure(graph.first, batch)
            second = self._measure(graph.second, ())
            between = self._measure(lambda _: graph.between(), ())  # last: the sums overflow
            self.seconds = {
                "first graph: loss, gradients": first,
                "all-reduce": between,
                "second graph: clip, update": second,
            }

    def _measure(self, part: Callable[[Any], Any], given: Any) -> float:
        began = now()
        for _ in range(self.repeats):
            part(given)
        return (now() - began) / self.repeats


def compare(args: argparse.Namespace) -> None:
    """Print milliseconds per step, eager and replayed, and of the parts of a replayed step."""
    runs = ["eager", "replayed"] if args.processes > 1 else ["eager", ALONE, "replayed"]
    if args.run:
        found = train(args, args.run)
        if found:  # rank 0
            print(json.dumps(found))
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name in runs:  # each in processes of its own
            command = [sys.executable, *sys.argv, "--run", name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            rounds[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"  {name}: {rounds[name][-1]['step'] * 1e3:.3f} ms", flush=True)
    report(args, rounds)


def report(args: argparse.Namespace, rounds: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians over rounds."""
    print(
        f"\nDiscreteVAE, {args.head}, N = {N}, K = {K}, {args.processes} process(es) of batch "
        f"{BATCH // args.processes} on one device ({args.device}), {args.backend}"
    )
    print(f"{'':38}{'ms/step':>9}{'of eager':>10}")
    for name, found in rounds.items():
        pairs = zip(found, rounds["eager"], strict=True)
        share = statistics.median(one["step"] / eager["step"] for one, eager in pairs)
        for part in found[0]:
            title = name if part == "step" else f"  {part}"
            milliseconds = statistics.median(each[part] for each in found) * 1e3
            print(f"{title:38}{milliseconds:9.3f}" + (f"{share:10.2f}" if part == "step" else ""))
    if ALONE in rounds:
        pairs = zip(rounds["replayed"], rounds[ALONE], strict=True)
        cost = statistics.median(one["step"] / alone["step"] for one, alone in pairs) - 1
        print(f"averaging the gradients of one rank adds {cost:.1%} to a replayed step")


def train(args: argparse.Namespace, name: str) -> dict[str, float]:
    """Seconds per step and of the parts of a step; nothing on other ranks than the first.

    Lightning starts the other ranks with the command line of this process.
    """
    pl.seed_everything(0, verbose=False)
    steps = args.steps // 4 if name == "eager" and args.device == "cuda" else args.steps
    clock, parts = Clock(steps // 4), Parts()
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1 if name == ALONE else "auto",
        strategy="auto" if name == ALONE else on_one_device(args),
        logger=False,
        callbacks=[clock, parts],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    model = DiscreteVAE(args.head, N, K, capture=False if name == "eager" else None)
    batch_size = BATCH // args.processes
    trainer.fit(model, MNISTDataModule(args.root, batch_size=batch_size, download=False))
    return {"step": clock.seconds_per_step} | parts.seconds if trainer.is_global_zero else {}


def on_one_device(args: argparse.Namespace) -> Strategy:
    """DDP with all ranks on the first device."""
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    return DDPStrategy(
        parallel_devices=[device] * args.processes,
        cluster_environment=LightningEnvironment(),
        process_group_backend=args.backend,
    )
