"""Runs as SLURM array jobs: each task takes the run of its index and does it as any sweep does."""

from __future__ import annotations

import shlex
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from experiments import runs
from experiments.engines.commands import line
from experiments.plan import Experiment, Run
from experiments.progress import Progress
from experiments.schedule import Schedule

_LARGEST = 1000  # tasks of an array: SLURM's default limit is 1001
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}{at_once}
#SBATCH --output={folder}/%A_%a.txt
#SBATCH --signal=B:TERM@60
# A task is told to stop a minute before its time is up: it saves, and is submitted again.
exec bash -c "exec $(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {lines})"
"""


@dataclass
class Array:
    """A submitted array job; its process ends when all its tasks have."""

    process: subprocess.Popen[str]
    runs: list[Run]


@dataclass
class Slurm:
    """The cluster that sbatch submits to; its machines share the run folders.

    Jobs go on when the sweep is interrupted; the same command watches them again.

    Args:
        jobs: tasks of an array that run at the same time; None for as many as there is room for.
        retries: of a run that fails, or whose job ends without a new checkpoint.
        options: words for sbatch, such as --partition=gpu.
        dry_run: print the script, submit nothing.
    """

    jobs: int | None = None
    retries: int = 1
    options: tuple[str, ...] = ()
    dry_run: bool = False
    poll: ClassVar[float] = 2.0  # seconds between looks at the run folders
    _arrays: list[Array] = field(default_factory=list)
    _elsewhere: list[Run] = field(default_factory=list)
    _lost: dict[Path, tuple[float, int]] = field(default_factory=dict)

    def run(self, schedule: Schedule, progress: Progress) -> None:
        """Submit what can start, watch it, and go on until nothing is left."""
        again: list[Run] = []
        while True:
            batch = again
            while (run := schedule.take()) is not None:
                progress.started(run)
                if not self.dry_run and runs.running(run):  # a job of an earlier sweep
                    self._elsewhere.append(run)
                else:
                    batch.append(run)
            for first in range(0, len(batch), _LARGEST):
                self._submit(schedule.experiment, batch[first : first + _LARGEST])
            if self.dry_run or not (self._arrays or self._elsewhere):
                return
            again = self._watch(progress)
            if not again:
                time.sleep(self.poll)
            progress.look()

    def _submit(self, experiment: Experiment, batch: list[Run]) -> None:
        folder = experiment.folder / "slurm"
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("array*.sh")))
        lines, script = folder / f"array{number}.txt", folder / f"array{number}.sh"
        lines.write_text("".join(line(run, self.retries) + "\n" for run in batch))
        text = _SCRIPT.format(
            name=f"{experiment.name}-{experiment.scale}",
            last=len(batch) - 1,
            at_once=f"%{self.jobs}" if self.jobs else "",
            folder=folder,
            lines=shlex.quote(str(lines)),
        )
        script.write_text(text)
        command = ["sbatch", "--wait", "--parsable", *self.options, str(script)]
        if self.dry_run:
            print(f"# {shlex.join(command)}\n{text}", end="")
            return
        try:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the sweep
            )
        except FileNotFoundError as error:
            raise ValueError("--engine slurm: there is no sbatch here; see --dry_run") from error
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.readline().strip():  # the number of the job
            said = " ".join(process.stderr.read().split())
            raise ValueError(f"sbatch refused the job: {said or 'no reason given'}")
        self._arrays.append(Array(process, batch))

    def _watch(self, progress: Progress) -> list[Run]:
        """Tell what has ended; the runs that must be submitted again."""
        again = []
        for array in [*self._arrays]:
            over = array.process.poll() is not None
            for run in [*array.runs]:
                if runs.done(run):
                    array.runs.remove(run)
                    self._tell(run, progress)
                elif over:
                    again += self._after_loss(run, progress)
            if over:
                self._arrays.remove(array)
        for run in [*self._elsewhere]:
            if runs.done(run):
                self._elsewhere.remove(run)
                self._tell(run, progress)
            elif not runs.running(run):
                self._elsewhere.remove(run)
                again.append(run)
        return again

    def _tell(self, run: Run, progress: Progress) -> None:
        progress.ended(run, "failed" if runs.failure(run) else "finished")

    def _after_loss(self, run: Run, progress: Progress) -> list[Run]:
        """A job ended and its run is not done: once more, unless it does not get on at all."""
        saved = runs.checkpoint(run)
        moment = saved.stat().st_mtime if saved else 0.0
        before, times = self._lost.get(run.home, (moment, 0))
        times = times + 1 if moment <= before else 1
        self._lost[run.home] = moment, times
        if times <= self.retries + 1:
            return [run]
        text = f"its job ended {times} times without a result or a new checkpoint"
        runs.record_failure(run, times, text)
        progress.ended(run, "failed")
        return []
