"""The paper's table of VAEs trained with Adam, at the sizes asked for: runs, table, curves.

Every cell is one ``train.py`` command; as many as asked for run side by side. Finished runs are
kept, so that the same command continues after an interruption.

    python experiments/vae_adam.py --root DATA --sizes 10,8 20,32 --parallel 16
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HEADS = ("sparsemax", "softmax", "sigmoid", "natural")
VARIANTS = {"gray": "mnist", "binary": "binary_mnist"}
Cell = dict[str, Any]


def cells(args: argparse.Namespace) -> list[Cell]:
    """All runs, the largest models first."""
    sizes = sorted((tuple(map(int, size.split(","))) for size in args.sizes), reverse=True)
    return [
        {"N": N, "K": K, "data": variant, "head": head, "seed": seed}
        for N, K in sizes
        for variant in VARIANTS
        for head in HEADS
        for seed in range(args.seeds)
    ]


def folder_of(cell: Cell, args: argparse.Namespace) -> Path:
    """Where train.py puts the first version of a run."""
    base = args.runs / "{data}-N{N}-K{K}-seed{seed}".format(**cell)
    return base / "vae" / cell["head"]


def command(cell: Cell, args: argparse.Namespace) -> list[str]:
    """The train.py command of a cell."""
    options = {
        "--model": "vae",
        "--head": cell["head"],
        "--num_latents": cell["N"],
        "--num_categories": cell["K"],
        "--variant": cell["data"],
        "--seed": cell["seed"],
        "--max_steps": args.steps,
        "--val_check_interval": max(1, args.steps // 12),
        "--save_every": args.steps,
        "--data.root": args.root,
        "--default_root_dir": folder_of(cell, args).parents[1],
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, str(HERE.parent / "train.py"), *words]


def metrics_of(cell: Cell, args: argparse.Namespace) -> dict[str, float] | None:
    """Test metrics of a finished run."""
    found = sorted(folder_of(cell, args).glob("version_*/metrics.json"))
    return dict(json.loads(found[-1].read_text())) if found else None


def run_all(todo: list[Cell], args: argparse.Namespace) -> None:
    """Run the commands, ``args.parallel`` at a time."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    waiting, running, began = list(todo), [], time.time()
    while waiting or running:
        while waiting and len(running) < args.parallel:
            cell = waiting.pop(0)
            log = folder_of(cell, args) / "log.txt"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w") as file:
                process = subprocess.Popen(
                    command(cell, args), stdout=file, stderr=subprocess.STDOUT, env=environment
                )
            running.append((process, cell, log))
        time.sleep(0.5)
        for job in [job for job in running if job[0].poll() is not None]:
            running.remove(job)
            metrics = metrics_of(job[1], args)
            result = f"NLL {metrics['test/nll']:.2f}" if metrics else f"FAILED, see {job[2]}"
            print(f"{time.time() - began:6.0f} s  {job[1]}  {result}", flush=True)


def curves_of(cell: Cell, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Validation ELBO and Fisher mass over training, from the run's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = sorted(folder_of(cell, args).glob("version_*/metrics.json"))
    if not found:
        return []
    events = EventAccumulator(str(found[-1].parent), {"scalars": 200})
    events.Reload()
    tags = ("val/elbo", "fim/off_diagonal_mass_fro", "fim/saturated")
    known = events.Tags()["scalars"]
    return [
        {**cell, "tag": tag, "step": e.step, "value": round(e.value, 5)}
        for tag in tags
        if tag in known
        for e in events.Scalars(tag)
    ]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """A table, with the keys of its first row as header."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Run what is missing, then write the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", default="data", help="folder of the MNIST files")
    parser.add_argument("--sizes", nargs="+", default=["10,8", "20,32"], metavar="N,K")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side")
    parser.add_argument("--runs", type=Path, default=Path("runs/vae_adam"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--collect", action="store_true", help="only write what is finished")
    args = parser.parse_args()
    grid = cells(args)
    if not args.collect:
        run_all([cell for cell in grid if metrics_of(cell, args) is None], args)
    paper = json.loads((HERE / "paper.json").read_text())["vae_nll_adam"]
    rows, curves = [], []
    for cell in grid:
        where = {"dataset": VARIANTS[cell["data"]], **{k: cell[k] for k in ("N", "K", "head")}}
        theirs = next((row for row in paper if all(row[k] == v for k, v in where.items())), {})
        ours = metrics_of(cell, args) or {}
        named = {n: round(ours.get(f"test/{n}", float("nan")), 4) for n in ("nll", "elbo", "kl")}
        named |= {n: ours.get(f"test/{n}", float("nan")) for n in ("saturated", "collapsed")}
        rows.append(
            {**cell, **named, "paper_nll": theirs.get("mean"), "paper_std": theirs.get("std")}
        )
        curves += curves_of(cell, args)
    args.out.mkdir(parents=True, exist_ok=True)
    write_csv(args.out / "vae_adam.csv", rows)
    if curves:
        write_csv(args.out / "vae_adam_curves.csv", curves)
    print(f"written to {args.out}/vae_adam.csv and vae_adam_curves.csv")


if __name__ == "__main__":
    main()
