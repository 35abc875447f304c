"""How far a table is: done, running, failed and why, to do, and when it will be done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from experiments import runs, stages
from experiments.plan import Experiment, Run

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.schedule import Schedule

STARTED = "commands.txt"  # a sweep that has runs to do writes to this file when it begins


@dataclass(frozen=True)
class Status:
    """The state of all runs of a table.

    Attributes:
        experiment: the table.
        finished: runs with numbers.
        stopped: runs of a search that were stopped early.
        failed: runs that were given up, with the reason.
        running: runs that a process works on now.
        todo: how many others are left, as far as that is known.
        per_hour: runs that ended in an hour, since the sweep was last started; None if none has.
    """

    experiment: Experiment
    finished: list[Run]
    stopped: list[Run]
    failed: list[tuple[Run, str]]
    running: list[Run]
    todo: int
    per_hour: float | None

    @property
    def done(self) -> int:
        """How many runs have ended for good."""
        return len(self.finished) + len(self.stopped) + len(self.failed)

    @property
    def left(self) -> int:
        """How many runs are still to end."""
        return len(self.running) + self.todo

    @property
    def seconds_left(self) -> float | None:
        """Until all is done at the present rate; None if nothing runs or has ended yet."""
        if not self.left:
            return 0.0
        if not self.running or not self.per_hour:
            return None
        return self.left / self.per_hour * 3600


def survey(experiment: Experiment, now: float | None = None) -> Status:
    """Read the state of a table from its folders."""
    now = time.time() if now is None else now
    every = stages.known(experiment)
    finished = [run for run in every if runs.metrics(run) is not None]
    failed = [(run, why) for run in every if (why := runs.failure(run)) is not None]
    stopped = [run for run in every if runs.stopped(run) is not None]
    running = [run for run in every if not runs.done(run) and runs.running(run)]
    planned = sum(stages.planned(experiment, cell) for cell in experiment.cells())
    todo = max(0, planned - len(finished) - len(failed) - len(stopped) - len(running))
    rate = _per_hour(experiment, [*finished, *stopped, *(run for run, _ in failed)], now)
    return Status(experiment, finished, stopped, failed, running, todo, rate)


def _per_hour(experiment: Experiment, ended: list[Run], now: float) -> float | None:
    path = experiment.folder / STARTED
    if not path.is_file():
        return None
    started = path.stat().st_mtime
    since = sum((runs.ended_at(run) or 0.0) >= started for run in ended)
    return since / (now - started) * 3600 if since and now > started else None


def lines(status: Status) -> Iterator[str]:
    """The state of a table as text."""
    experiment = status.experiment
    yield f"{experiment.name}, {experiment.scale}: {_counts(status)}; {_when(status)}"
    for run in status.running:
        yield f"  running: {run.name}"
    for run, why in status.failed:
        yield f"  failed: {run.name}: {why} (see {run.home}/log.txt)"


def table(statuses: list[Status]) -> Table:
    """The state of tables as a table, for a terminal."""
    from rich.table import Table

    drawn = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("table", "scale", "done", "running", "failed", "to do", ""):
        drawn.add_column(column, justify="left" if column in ("table", "scale", "") else "right")
    for status in statuses:
        ended = len(status.finished) + len(status.stopped)
        counts = (ended, len(status.running), len(status.failed), status.todo)
        experiment = status.experiment
        drawn.add_row(experiment.name, experiment.scale, *map(str, counts), _when(status))
        for run in status.running:
            drawn.add_row("", "", "", "", "", "", f"running: {run.name}")
        for run, why in status.failed:
            drawn.add_row("", "", "", "", "", "", f"failed: {run.name}: {why}")
    return drawn


def _counts(status: Status) -> str:
    parts = [f"{len(status.finished)} finished", f"{len(status.failed)} failed"]
    if status.stopped:
        parts.append(f"{len(status.stopped)} stopped early")
    total = status.done + status.left
    counts = f"{status.done} of {total} runs done ({', '.join(parts)})"
    return f"{counts}, {len(status.running)} running, {status.todo} to do"


def _when(status: Status) -> str:
    seconds = status.seconds_left
    if not status.left and status.failed:
        return "nothing else is left to do; --retry_failed tries the failed ones again"
    if not status.left:
        return "all is done"
    if not status.running:
        return "nothing runs now"
    if seconds is None:
        return "no run has ended since the start"
    moment = datetime.now() + timedelta(seconds=seconds)
    rate = f"{status.per_hour:,.0f}" if (status.per_hour or 0) >= 10 else f"{status.per_hour:.2g}"
    return f"at {rate} runs an hour done in {clock(seconds)}, {moment:%a %H:%M}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def note_commands(experiment: Experiment, lines: list[str]) -> None:
    """Keep commands beside the runs that they make, for whoever makes a table of them."""
    experiment.folder.mkdir(parents=True, exist_ok=True)
    path = experiment.folder / STARTED
    before = path.read_text().splitlines() if path.is_file() else []
    path.write_text("\n".join(dict.fromkeys([*before, *lines])) + "\n")


@contextmanager
def noted(experiment: Experiment, command: str, schedule: Schedule) -> Iterator[None]:
    """Keep the command of a sweep, unless it is refused before any of its runs has ended."""
    path = experiment.folder / STARTED
    before = path.read_text() if path.is_file() else None
    note_commands(experiment, [command])
    try:
        yield
    except ValueError:
        if not any(schedule.counts.values()):
            path.write_text(before) if before else path.unlink()
        raise
