"""Model-steps per second of the VAE sweep: k processes side by side on one device.

Each process is a run of the VAE table as ``train.py`` composes it. All are started and warm up;
then k of them go on while the others pause, and the steps of those k within the same seconds are
counted. With CUDA also under MPS, where there is one: then the processes share the device at the
same time instead of by turns. The last column is what one such device needs for the whole table at
the paper's protocol, from the YAML, without the seconds that each run takes to start, to validate
and to test.

    python benchmarks/bench_sweep.py --processes 1 4 8 16 --root DATA
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from experiments import plan, stages
from experiments.engines import mps

FOREVER = 10**8


def table_steps() -> tuple[int, int]:
    """Runs and optimizer steps of the VAE table at the paper's protocol."""
    table = plan.load("vae_adam", "paper", Path("none"))  # as before its first run
    runs = sum(stages.planned(table, cell) for cell in table.cells())
    return runs, runs * int(table.options["max_steps"])


def command(number: int, args: argparse.Namespace, folder: Path) -> list[str]:
    """The options of the n-th process: all heads in turn, at the size asked for."""
    only = {"num_latents": [str(args.size[0])], "num_categories": [str(args.size[1])]}
    table = plan.load("vae_adam", "paper", folder, only=only)
    cells = table.cells()
    run = stages.coarse(table, cells[number % len(cells)])[1]
    more = [f"--data.root={args.root}", f"--max_steps={FOREVER}", f"--save_every={FOREVER}"]
    never = [f"--val_check_interval={FOREVER}", "--num_sanity_val_steps=0"]
    place = [f"--default_root_dir={folder / str(number)}", f"--seed={number}"]
    return [*run.command[2:], *more, *never, *place]


def work(number: int, options: list[str], folder: Path, warm_up: int) -> None:
    """Train until told to stop, pause when told to, and write the time of every step."""
    from lightning.pytorch import Callback, Trainer

    from catnat.training.command import configure
    from catnat.training.errors import silence
    from catnat.training.names import read_names

    class Pace(Callback):
        """Remembers times and steps."""

        def __init__(self) -> None:
            self.points: list[tuple[float, int]] = []

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.points.append((time.time(), trainer.global_step))
            if trainer.global_step < warm_up or len(self.points) % 5:
                return
            ready.touch()
            while 0 < (wanted := needed(folder)) <= number:
                time.sleep(0.02)
                self.points.append((time.time(), trainer.global_step))
            trainer.should_stop = not wanted

    ready = folder / f"ready{number}"
    silence()
    program, parser, config = configure(*read_names(options))
    program.complete(config)
    run: Any = program.compose(parser, config, parser.dump(config))
    pace = Pace()
    run.trainer.callbacks.append(pace)
    run.trainer.fit(run.model, datamodule=run.data)
    (folder / f"points{number}.json").write_text(json.dumps(pace.points))


def needed(folder: Path) -> int:
    """The number of processes that may train now; 0 to end all."""
    return int((folder / "needed").read_text())


def need(folder: Path, number: int) -> None:
    """Tell all processes."""
    (folder / ".needed").write_text(str(number))
    (folder / ".needed").replace(folder / "needed")


def rates(args: argparse.Namespace, environment: dict[str, str]) -> list[float]:
    """Model-steps per second of k processes together, for each k asked for."""
    most = max(args.processes)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        need(folder, most)
        base = [sys.executable, __file__, "--work", place, "--warm_up", str(args.warm_up)]
        processes = [
            subprocess.Popen(
                [*base, "--number", str(i), "--", *command(i, args, folder)],
                env={"OMP_NUM_THREADS": "1"} | os.environ | environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if not args.verbose else None,
            )
            for i in range(most)
        ]
        try:
            while len(list(folder.glob("ready*"))) < most:
                if any(process.poll() is not None for process in processes):
                    raise SystemExit("a process ended before its time; see --verbose")
                time.sleep(0.2)
            spans = []
            for number in args.processes:
                need(folder, number)
                time.sleep(2)  # until the others pause
                spans.append((number, time.time(), time.time() + args.seconds))
                time.sleep(args.seconds)
            need(folder, 0)
            for process in processes:
                process.wait(120)
        finally:
            for process in processes:
                process.kill()
        found = [json.loads((folder / f"points{i}.json").read_text()) for i in range(most)]
    return [
        sum(_step_at(ended, each) - _step_at(began, each) for each in found[:number])
        / (ended - began)
        for number, began, ended in spans
    ]


def _step_at(moment: float, points: list[list[float]]) -> float:
    """The step that a process had reached at a time, interpolated."""
    import numpy as np

    times, steps = zip(*points, strict=True)
    return float(np.interp(moment, times, steps))


def main() -> None:
    """Print the table, and write it as CSV where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--root", default="data", help="folder of the MNIST files")
    parser.add_argument("--size", nargs=2, type=int, default=[20, 32], metavar=("N", "K"))
    parser.add_argument("--seconds", type=float, default=15.0, help="to count (default 15)")
    parser.add_argument("--warm_up", type=int, default=500, help="steps before (default 500)")
    parser.add_argument("--no_mps", action="store_true")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument(
        "--verbose", action="store_true", help="show what the processes complain of"
    )
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:split])
    if args.work:
        work(args.number, sys.argv[split + 1 :], args.work, args.warm_up)
        return
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    modes = ["by turns"]
    if torch.cuda.is_available() and mps.available() and not args.no_mps:
        modes.append("MPS")
    elif torch.cuda.is_available():
        print("without MPS alone")
    runs, steps = table_steps()
    print(f"DiscreteVAE, N = {args.size[0]}, K = {args.size[1]}, batch 100, {device}")
    print(f"the table at the paper's protocol: {runs:,} runs, {steps:,} steps")
    print(f"{'sharing':10}{'processes':>10}{'model-steps/s':>15}{'ms per step':>13}{'hours':>8}")
    lines = []
    for mode in modes:
        with mps.server() if mode == "MPS" else nullcontext({}) as environment:
            if mode == "MPS" and not environment:
                raise SystemExit("MPS does not start here; see --no_mps")
            found = rates(args, environment)
        for number, speed in zip(args.processes, found, strict=True):
            hours = steps / speed / 3600
            print(f"{mode:10}{number:10}{speed:15,.0f}{1e3 / speed:13.3f}{hours:8.1f}", flush=True)
            values = (device, mode, number, round(speed, 1), round(hours, 2))
            names = ("device", "sharing", "processes", "model_steps_per_second", "hours")
            lines.append(dict(zip(names, values, strict=True)))
            if args.csv:  # row by row: the time on a device may end before the last one
                with args.csv.open("w", newline="") as file:
                    writer = csv.DictWriter(file, fieldnames=names)
                    writer.writeheader()
                    writer.writerows(lines)


if __name__ == "__main__":
    main()
