"""Run the benchmarks, and keep what they print in one file for this release and machine.

    python benchmarks/record.py --root DATA                  # benchmarks/releases/VERSION_cpu.txt
    python benchmarks/record.py --root DATA --device cuda

Compare releases by ``diff``: the tables have ratios of things that were timed side by side, which
depend less on the machine than times do. The command takes about a quarter of an hour on a CPU. A
benchmark that fails is recorded with its error, and the others still run.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

import torch

import catnat

FOLDER = Path(__file__).resolve().parent
LAYERS = ("linear + cross_entropy", "adaptive softmax", "tree sigmoid", "hybrid, F = 1024")


def commands(device: str, root: str) -> list[list[str]]:
    """The benchmarks of a device, each with its options."""
    if device == "cpu":
        shape = ["--shape", "1024", "256", "8192", "--rounds", "15", "--layers", *LAYERS]
        return [
            ["bench_import.py"],
            ["bench_heads.py"],
            ["bench_heads.py", "--paths"],
            ["bench_output_layer.py", *shape],
            ["bench_vae.py", "--root", root],
            ["bench_gsl.py"],
            ["bench_binary.py"],
        ]
    on_device = ["--device", device]
    return [
        ["bench_heads.py", *on_device],
        ["bench_heads.py", "--paths", *on_device],
        ["bench_output_layer.py", "--quick", *on_device],
        ["bench_vae.py", "--root", root, *on_device],
        ["bench_gsl.py", *on_device],
        ["bench_many_models.py", "--root", root],
    ]


def machine(device: str) -> str:
    """What the benchmarks run on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name or platform.machine()}, {versions}"


def main() -> int:
    """Write the file; the exit code is the number of benchmarks that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", default="data", help="folder of the MNIST files")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, default=FOLDER / "releases")
    args = parser.parse_args()
    path = args.folder / f"{catnat.__version__}_{args.device}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    described = ["git", "describe", "--always", "--dirty=+", "--abbrev=7"]
    commit = subprocess.run(described, cwd=FOLDER, capture_output=True, text=True, check=False)
    failed = 0
    with path.open("w") as file:
        print(f"catnat {catnat.__version__}, commit {commit.stdout.strip()}", file=file)
        print(machine(args.device), file=file)
        for program, *options in commands(args.device, args.root):
            shown = " ".join(f'"{word}"' if " " in word else word for word in [program, *options])
            print(shown, flush=True)
            words = [sys.executable, "-W", "ignore", str(FOLDER / program), *options]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            failed += done.returncode != 0
            error = f"exit code {done.returncode}: {done.stderr[-500:]}" if done.returncode else ""
            print(f"\n== {shown}\n{done.stdout}{error}", file=file, flush=True)
    print(path)
    return failed


if __name__ == "__main__":
    sys.exit(main())
