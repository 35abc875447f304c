"""Training steps of the VAE per second, as ratios within one run.

CPU: ``DiscreteVAE`` in Lightning with ``FisherMonitor`` at every step, against the loop one would
write by hand: a torchvision dataset, a ``DataLoader``, and the same network, with torch's layers
and with ours.
CUDA: steps replayed as graphs against eager ones, with and without the monitor.
The cost of the monitor is estimated twice: from runs with and without it, and from one run in which
it is turned on and off. The first counts one or two pictures of the Fisher matrix (a run draws them
at steps 0, 10, 100, 1000 and so on), the second none.

    python benchmarks/bench_vae.py --root DATA
    python benchmarks/bench_vae.py --root DATA --device cuda
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from catnat.callbacks import FisherMonitor
from catnat.callbacks.tensorboard import RunLogger
from catnat.datamodules import MNISTDataModule
from catnat.lit_modules import DiscreteVAE

N, K = 20, 32
ON_AND_OFF = "the monitor on and off in one run"


class Clock(pl.Callback):
    """Seconds between two steps; the device has finished its work at both times."""

    sees_blocks = True  # of replayed steps

    def __init__(self, first: int, timer: Callable[[], float] | None = None) -> None:
        self.first, self.began, self.timer = first, (0, 0.0), timer or now
        self.seconds_per_step = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Start the clock at the first step."""
        if not self.began[0] and trainer.global_step >= self.first:
            self.began = (trainer.global_step, self.timer())

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Stop the clock at the last step."""
        step, began = self.began
        self.seconds_per_step = (self.timer() - began) / (trainer.global_step - step)


class Toggle(pl.Callback):
    """Turns a monitor on and off in turns, and keeps the seconds per step of each turn.

    A turn is as long as some of the monitor's blocks and begins in the middle of one: a monitor
    writes at the end of a block, which then lies inside a turn, with steps on both sides. On a GPU
    what a block has found is written when the next block ends, so every turn but the first writes
    as many blocks as it observes, and the device can work while the host writes.

    Args:
        monitor: the monitor.
        blocks: length of a turn.
    """

    sees_blocks = True  # of replayed steps

    def __init__(self, monitor: FisherMonitor, blocks: int) -> None:
        self.monitor, self.blocks = monitor, blocks
        self.turn = -1
        self.marks: list[tuple[int, float]] = []  # the step and the time at which a turn began

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Begin a turn; the turns of even number have the monitor."""
        block, probe = self.monitor._steps_per_block, self.monitor._probe
        turn = max(0, trainer.global_step - block // 2) // (self.blocks * block)
        if turn == self.turn or probe is None:
            return
        self.turn = turn
        self.marks.append((trainer.global_step, now()))
        self.monitor.every_n_steps = 10**9 if turn % 2 else 1
        if turn % 2:
            probe.detach()
        else:
            probe.attach()

    def cost(self) -> float:
        """Median of the extra time of turns with the monitor over the turns beside them."""
        seconds = [(t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairwise(self.marks)]
        around = zip(seconds[1::2], seconds[2::2], seconds[3::2], strict=False)
        return statistics.median(on / ((before + after) / 2) for before, on, after in around) - 1


def monitor_cost(args: argparse.Namespace) -> float:
    """What the monitor adds to a step, as a share of the step, on and off in one run.

    That leaves out what it may do to the whole run, such as to the layout of memory.
    """
    monitor = FisherMonitor()
    blocks, block = (1, 50) if args.device == "cpu" else (5, 200)
    toggle = Toggle(monitor, blocks)
    turns = 5.5 * blocks * block  # one comparison takes five turns, the first not counted
    train(args, max(4 * args.steps, int(turns)), True, toggle, monitor)
    return toggle.cost()


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def lightning(args: argparse.Namespace, capture: bool, monitor: bool) -> float:
    """Seconds per step in a Lightning Trainer with TensorBoard."""
    steps = args.steps
    if args.device == "cuda" and capture is False:
        steps //= 4  # steps are slow here, and fewer of them are enough
    clock = Clock(steps // 4)
    train(args, steps, capture, clock, *([FisherMonitor()] if monitor else []))
    return clock.seconds_per_step


def train(args: argparse.Namespace, steps: int, capture: bool, *callbacks: pl.Callback) -> None:
    """Train in Lightning, with TensorBoard and these callbacks."""
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1,
        logger=RunLogger(args.logs, name="bench"),  # that of train.py
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    model = DiscreteVAE(args.head, N, K, capture=capture)
    trainer.fit(model, datamodule=MNISTDataModule(args.root, download=False))


def by_hand(args: argparse.Namespace, stock: bool) -> float:
    """Seconds per step of a plain loop over a torchvision dataset, without any monitor.

    With torch's own layers (``stock``), or with ours, which are faster on ARM processors.
    """
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    torch.manual_seed(0)
    try:
        data = MNIST(args.torchvision_root, transform=ToTensor())
    except RuntimeError:
        root = args.torchvision_root
        raise SystemExit(f"--torchvision-root {root}: no unpacked MNIST files there") from None
    loader = torch.utils.data.DataLoader(data, batch_size=100, shuffle=True)
    model = DiscreteVAE(args.head, N, K)
    if stock:
        for name, layer in list(model.decoder.named_children()):
            if isinstance(layer, torch.nn.ConvTranspose2d):
                setattr(model.decoder, name, stock_layer(layer))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        q = model.head(model.scores(x))
        model.loss(x, q).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    began = 0.0
    for done, (x, _) in zip(range(args.steps), loader, strict=False):
        if done == args.steps // 4:
            began = now()
        step(x)
    return (now() - began) / (args.steps - args.steps // 4)


def stock_layer(layer: torch.nn.ConvTranspose2d) -> torch.nn.ConvTranspose2d:
    """The same transposed convolution, as torch does it."""
    padding = int(layer.padding[0])
    return torch.nn.ConvTranspose2d(
        layer.in_channels, layer.out_channels, 3, 2, padding, output_padding=padding
    )


def main() -> None:
    """Print milliseconds per step and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", default="data", help="folder of the MNIST files")
    parser.add_argument("--torchvision-root", help="folder with MNIST/raw; default: root")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--head", default="natural")
    parser.add_argument("--steps", type=int, help="steps of a run (CPU 120, CUDA 4000)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--logs", type=Path, default=Path("runs/bench"))
    parser.add_argument(
        "--here", action="store_true", help="all runs in this process: fewer starts"
    )
    parser.add_argument("--run", help="only this one; prints seconds per step")
    args = parser.parse_args()
    args.torchvision_root = args.torchvision_root or args.root
    args.steps = args.steps or (120 if args.device == "cpu" else 4000)
    runs: dict[str, Callable[[], float]]
    if args.device == "cpu":
        runs = {
            "a plain loop, torch's layers": lambda: by_hand(args, True),
            "a plain loop, our layers": lambda: by_hand(args, False),
            "Lightning, FisherMonitor every step": lambda: lightning(args, True, True),
            "Lightning, no monitor": lambda: lightning(args, True, False),
        }
    else:
        runs = {
            "eager, FisherMonitor every step": lambda: lightning(args, False, True),
            "replayed, FisherMonitor every step": lambda: lightning(args, True, True),
            "replayed, no monitor": lambda: lightning(args, True, False),
        }
    known = runs | {ON_AND_OFF: lambda: monitor_cost(args)}
    if args.run:
        print(known[args.run]())
        return
    times: dict[str, list[float]] = {name: [] for name in runs}
    toggled: list[float] = []
    for _ in range(args.rounds):
        for name in runs:
            times[name].append(known[name]() if args.here else in_its_process(name))
            print(f"  {name}: {times[name][-1] * 1e3:.3f} ms", flush=True)
        toggled.append(known[ON_AND_OFF]() if args.here else in_its_process(ON_AND_OFF))
        print(f"  {ON_AND_OFF}: {toggled[-1]:.1%}", flush=True)
    base = next(iter(times.values()))
    print(f"\nDiscreteVAE, {args.head}, N = {N}, K = {K}, batch 100, {args.device}")
    print(f"{'':38}{'ms/step':>9}{'steps/s ratio':>15}")
    for name, values in times.items():
        ratio = statistics.median(b / v for b, v in zip(base, values, strict=True))
        print(f"{name:38}{statistics.median(values) * 1e3:9.3f}{ratio:15.2f}")
    with_it, without = list(times.values())[-2:]
    costs = [a / b - 1 for a, b in zip(with_it, without, strict=True)]
    print(f"the monitor adds to a step, median (least to most) of {args.rounds} rounds:")
    for how, shares in (("a run with and a run without it", costs), (ON_AND_OFF, toggled)):
        spread = f"({min(shares):.1%} to {max(shares):.1%})"
        print(f"  {how}: {statistics.median(shares):.1%} {spread}")


def in_its_process(name: str) -> float:
    """What a run gives in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--run", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
