"""Runs of one shape as one batched model, on one device: the fastest way for many small models."""

from __future__ import annotations

import fcntl
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import runs
from experiments.plan import Run
from experiments.progress import Progress
from experiments.schedule import Schedule
from experiments.together import states

if TYPE_CHECKING:
    from experiments.together.members import Member

MOST = 128  # models at once
_CLAIMED = 512  # runs at once: each is an open file, of which a process may often have 1024


@dataclass(frozen=True)
class Together:
    """One process that trains many runs at once.

    Runs of ``vae``, ``mlp-vae`` and ``gsl`` begin with the weights of their seeds and see the
    batches that ``train.py`` would show them; their noise is another, drawn for all at once. There
    is no FisherMonitor. A group that is interrupted goes on from its last validation.

    Args:
        most: models at once.
    """

    most: int = MOST

    def run(self, schedule: Schedule, progress: Progress) -> None:
        """Train what is left of a table, one group after the other; leave what others hold."""
        held: list[Run] = []
        while True:
            with ExitStack() as locks:
                mine: list[Run] = []
                again, held = held, []
                while len(mine) < _CLAIMED and (run := again.pop() if again else schedule.take()):
                    if not _claim(run, locks):
                        held.append(run)
                    elif runs.done(run):  # by another sweep, since the schedule has looked
                        self._tell(run, progress)
                    else:
                        mine.append(run)
                held += again
                if not mine:
                    break
                self._train(mine, schedule.experiment.folder, progress)
        for run in held:
            progress.ended(run, "held")

    def _train(self, mine: list[Run], folder: Path, progress: Progress) -> None:
        from experiments.together.training import train_group

        for group in self._groups(mine, folder):
            own = [each.run for each in group if each.run in mine]
            for run in own:
                progress.started(run)
            train_group(group, folder, lambda line: print(line, flush=True))
            for run in own:
                self._tell(run, progress)

    def _tell(self, run: Run, progress: Progress) -> None:
        progress.ended(run, "failed" if runs.failure(run) else "finished")

    def _groups(self, mine: list[Run], folder: Path) -> list[list[Member]]:
        """Groups that were interrupted, with all their runs; then groups of the runs left."""
        from experiments.together.members import groups, member

        left = {run.home: run for run in mine}
        found = []
        for path, before in states.interrupted(folder).items():
            every = [left.get(run.home, run) for run in before]
            others = [run for run in every if run.home not in left]
            if len(others) == len(every) or not all(map(runs.done, others)):
                continue  # not of the runs that were asked for, or not of them alone
            if any(run.command != was.command for run, was in zip(every, before, strict=True)):
                states.forget(path)  # their options have changed
                continue
            found.append([member(run) for run in every])
            left = {home: run for home, run in left.items() if run not in every}
        return found + groups(map(member, left.values()), self.most)


def _claim(run: Run, locks: ExitStack) -> bool:
    """Hold a run against other sweeps; False if one of them holds it.

    Tried twice: a process that looks whether the run is held has the lock for a moment.
    """
    run.home.mkdir(parents=True, exist_ok=True)
    file = (run.home / ".lock").open("w")
    for pause in (0.01, 0.0):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause)
        else:
            locks.enter_context(file)
            return True
    file.close()
    return False
