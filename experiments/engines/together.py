"""Runs of one shape as one batched model, on one device: the fastest way for many small models."""

from __future__ import annotations

import fcntl
from contextlib import ExitStack
from dataclasses import dataclass

from experiments import runs
from experiments.plan import Run
from experiments.progress import Progress
from experiments.schedule import Schedule

MOST = 128  # models at once


@dataclass(frozen=True)
class Together:
    """One process that trains many runs at once.

    Runs of ``vae``, ``mlp-vae`` and ``gsl`` begin with the weights of their seeds and see the
    batches that ``train.py`` would show them; their noise is another, drawn for all at once. There
    is no FisherMonitor, and a run has no checkpoints before its end: a group that is interrupted
    goes on from its last validation.

    Args:
        most: models at once.
    """

    most: int = MOST

    def run(self, schedule: Schedule, progress: Progress) -> None:
        """Train what is left of a table, one group after the other."""
        from experiments.together.members import groups, member
        from experiments.together.training import GroupTraining

        while True:
            taken = []
            while (run := schedule.take()) is not None:
                taken.append(run)
            if not taken:
                return
            with ExitStack() as locks:
                mine = []
                for run in taken:
                    if _claim(run, locks):
                        mine.append(member(run))
                    else:  # another sweep is at work on it
                        progress.ended(run, "interrupted")
                for group in groups(mine, self.most):
                    for each in group:
                        progress.started(each.run)
                    folder = schedule.experiment.folder
                    GroupTraining(group, folder, lambda line: print(line, flush=True)).run()
                    for each in group:
                        gone = runs.failure(each.run) is not None
                        progress.ended(each.run, "failed" if gone else "finished")


def _claim(run: Run, locks: ExitStack) -> bool:
    """Hold a run against other sweeps; False if one of them holds it."""
    run.home.mkdir(parents=True, exist_ok=True)
    file = locks.enter_context((run.home / ".lock").open("w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
