"""Runs of one shape as one batched model, on one device: the fastest way for many small models."""

from __future__ import annotations

import fcntl
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import runs
from experiments.plan import Run
from experiments.progress import Progress
from experiments.schedule import Schedule

if TYPE_CHECKING:
    from experiments.together.members import Member

MOST = 128  # models at once


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
                while (run := again.pop() if again else schedule.take()) is not None:
                    if not _claim(run, locks):
                        held.append(run)
                    elif runs.done(run):  # by another sweep, since the schedule has looked
                        self._tell(run, progress)
                    else:
                        mine.append(run)
                if not mine:
                    break
                self._train(mine, schedule.experiment.folder, progress)
        for run in held:
            progress.ended(run, "held")

    def _train(self, mine: list[Run], folder: Path, progress: Progress) -> None:
        from experiments.together.training import GroupTraining

        for group in self._groups(mine, folder):
            own = [each.run for each in group if each.run in mine]
            for run in own:
                progress.started(run)
            GroupTraining(group, folder, lambda line: print(line, flush=True)).run()
            for run in own:
                self._tell(run, progress)

    def _tell(self, run: Run, progress: Progress) -> None:
        progress.ended(run, "failed" if runs.failure(run) else "finished")

    def _groups(self, mine: list[Run], folder: Path) -> list[list[Member]]:
        """Groups that were interrupted, with all their runs; then groups of the runs left."""
        from experiments.together.members import groups, member
        from experiments.together.training import forget, interrupted

        left = {run.home: run for run in mine}
        found = []
        for path, record in interrupted(folder).items():
            every = [left.get(home, Run({}, {}, None, home, home, words)) for home, words in record]
            others = [run for run in every if run.home not in left]
            if len(others) == len(every) or not all(map(runs.done, others)):
                if all(map(runs.done, every)):
                    forget(path)
                continue  # not of the runs that were asked for, or not of them alone
            if any(run.command != words for run, (_, words) in zip(every, record, strict=True)):
                forget(path)  # their options have changed
                continue
            found.append([member(run) for run in every])
            left = {home: run for home, run in left.items() if run not in every}
        return found + groups(map(member, left.values()), self.most)


def _claim(run: Run, locks: ExitStack) -> bool:
    """Hold a run against other sweeps; False if one of them holds it."""
    run.home.mkdir(parents=True, exist_ok=True)
    file = locks.enter_context((run.home / ".lock").open("w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
