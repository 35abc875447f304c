"""Print the seconds that `import catnat` adds to `import torch`.

Each repeat is a fresh interpreter, which times the second import after the first.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = """
from time import perf_counter
start = perf_counter()
import torch
middle = perf_counter()
import catnat
print(middle - start, perf_counter() - middle)
"""


def measure() -> tuple[float, float]:
    command = [sys.executable, "-c", CODE]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    torch_s, catnat_s = map(float, out.split())
    return torch_s, catnat_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = max(1, parser.parse_args().repeats)
    measure()  # fills the file cache
    torch_s, catnat_s = zip(*(measure() for _ in range(repeats)), strict=True)
    print(f"median of {repeats} fresh interpreters, seconds")
    print(f"import torch   {statistics.median(torch_s):7.3f}")
    print(f"import catnat  {statistics.median(catnat_s):7.3f}  (min {min(catnat_s):.3f})")


if __name__ == "__main__":
    main()
