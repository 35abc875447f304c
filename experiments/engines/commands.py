"""Command lines of runs, for whoever wants to start them in another way."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from experiments import runs
from experiments.plan import Run
from experiments.progress import Progress
from experiments.schedule import Schedule

RUN_ONE = Path(__file__).resolve().parent.parent / "run_one.py"
DRAWS = 10  # trials at a time: Optuna draws as many at random before it learns from them


def line(run: Run, retries: int) -> str:
    """The command line that does a run with its lock, its log and its records."""
    words = [sys.executable, str(RUN_ONE), str(run.home), f"--retries={retries}", "--"]
    return shlex.join([*words, *run.command])


@dataclass(frozen=True)
class Print:
    """Prints the command lines of all runs that can start now."""

    retries: int = 1

    def run(self, schedule: Schedule, progress: Progress) -> None:
        """Print, and do nothing."""
        count = 0
        while (run := schedule.take()) is not None:
            print(line(run, self.retries))
            count += 1
        experiment = schedule.experiment
        later = schedule.left - count
        rest = f", then again, for {later} more" if later else ", the last"
        text = f"{runs.counted(count)}{rest}" if count else "all is done"
        print(f"{experiment.name}, {experiment.scale}: {text}", file=sys.stderr)
