"""Sweeps of a program that stands in for train.py, and what they leave."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent

# A tenth of a second: a checkpoint, perhaps a wait, then the numbers.
PROGRAM = """\
import json, os, signal, sys, time
from pathlib import Path

options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
if "busy" in options:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
home = Path(options["default_root_dir"])
(home / "gpu.txt").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
(home / "checkpoints").mkdir(exist_ok=True)
(home / "checkpoints" / "last.txt").write_text("")
# Whoever sees the call finds the whole line, and the checkpoint: a test may kill the run then.
calls, written = home / "calls.txt", home / "calls.part"
before = calls.read_text() if calls.exists() else ""
written.write_text(before + options.get("ckpt_path", "new") + "\\n")
written.replace(calls)
x, gate = float(options["x"]), Path(options["gate"])
if x < 0:
    print("the number is below zero")
    if x == -4:
        os.kill(os.getpid(), signal.SIGKILL)
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if x == -3 and "experiments.engines.forks" in parent.read_text():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    sys.exit(2 if x < -5 else 3)
while x >= 3 and not gate.exists():
    time.sleep(0.05)
found = {"val/loss": (x - 2) ** 2, "test/loss": x + int(options.get("seed", 0)) / 100}
(home / "metrics.json").write_text(json.dumps(found))
"""

SEARCH = {"metric": "val/loss", "better": "lower", "seed": 0, "option": "x", "coarse": [1.0, 4.0]}


def write_table(folder, stand_in="program.py", **content):
    """Write a plan whose runs are calls of the program above, and give its file."""
    (folder / stand_in).write_text(PROGRAM)
    content = {
        "title": "x",
        "program": stand_in,
        "options": {"gate": str(folder / "gate")},
        "grid": {"x": [1.0]},
        "seeds": [1],
        "metrics": {"test/loss": {"label": "loss", "better": "lower"}},
        "scales": {"smoke": {}},
    } | content
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def arguments(path, *more):
    return [str(path), "--scale", "smoke", "--runs", str(path.parent / "runs"), *more]


def start(path, *more, **environment):
    command = [sys.executable, str(ROOT / "experiments" / "sweep.py"), *arguments(path, *more)]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)


def calls(folder):
    """What each run was called with, by the run's name."""
    found = (folder / "runs" / "tiny" / "smoke").glob("*/calls.txt")
    return {path.parent.name: path.read_text().split() for path in found}


def wait_for(condition, process=None, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, "the sweep ended too early"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def kill(process):
    """kill -9 for the sweep and everything it has started in its session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
