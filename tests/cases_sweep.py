"""Sweeps of a program that stands in for train.py, and what they leave."""

import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

from catnat.cli.main import main
from catnat.sweeps import sweep

ROOT = Path(__file__).resolve().parent.parent
PLANS = sorted((ROOT / "paper" / "plans").glob("*.yaml"))

# A run leaves a checkpoint, waits for the gate to open if it has one, then writes its numbers.
PROGRAM = """\
import json, os, sys, time
from pathlib import Path

options = dict(word[2:].split("=", 1) for word in sys.argv[1:])
home, x = Path(options["default_root_dir"]), float(options["x"])
with (home / "calls.txt").open("a") as calls:
    calls.write(options.get("ckpt_path", "new") + "\\n")
(home / "last.ckpt").write_text("")
(home / "gpu.txt").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
if x < 0:
    print("the number is below zero")
    sys.exit(2 if x < -5 else 3)
gate = Path(options.get("gate", home))
while not gate.exists():
    time.sleep(0.02)
loss = (x - float(options.get("rate", 1))) ** 2 + int(options["seed"]) / 1000
(home / "metrics.json").write_text(json.dumps({"val/loss": loss, "test/nll": loss + 1}))
"""


class AtOnce:
    """An engine that computes the numbers of the program, without processes."""

    jobs = 1

    def execute(self, run, folder):
        x, rate = float(run.options["x"]), float(run.options.get("rate", 1))
        loss = (x - rate) ** 2 + int(run.options["seed"]) / 1000
        return {"val/loss": loss, "test/nll": loss + 1, "device": "none"}

    def stop(self):
        pass


def do_at_once(monkeypatch):
    """Let sweeps use this engine."""
    monkeypatch.setattr(sweep, "make_engine", lambda *_: AtOnce())


def write_plan(folder, **keys):
    """A plan of the program, with these keys instead of its own."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    plan = {
        "title": "A tiny table",
        "study": "tiny",
        "program": str(program),
        "grid": {"x": [1.0, 2.0]},
        "metrics": {"test/nll": {"better": "lower"}},
        "seeds": [1, 2],
    }
    path = folder / "tiny.yaml"
    path.write_text(
        yaml.safe_dump({k: v for k, v in (plan | keys).items() if v is not None}, sort_keys=False)
    )
    return path


def arguments(path, *more):
    """Words for the commands sweep, status and tables."""
    folder = path.parent
    return [str(path), "--results", str(folder / "results"), "--runs", str(folder / "runs"), *more]


def run_command(command, words):
    """The exit code of a command in this process."""
    return main([command, *words])


def run_sweep(path, *more):
    """The exit code of a sweep in this process."""
    return run_command("sweep", arguments(path, *more))


def start_sweep(path, *more):
    """A sweep in a process of its own."""
    words = [sys.executable, "-m", "catnat", "sweep", *arguments(path, *more)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, env=environment, start_new_session=True)


def wait_for(condition, process=None, seconds=600.0):
    """Wait until a condition holds; a process that should bring it about must not end before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, "the process ended too early"
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.02)
