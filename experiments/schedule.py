"""Which run of a table comes next: engines take runs from a schedule and tell it how they ended."""

from __future__ import annotations

from typing import Literal, get_args

from experiments import runs, stages, tpe
from experiments.plan import Experiment, Run
from experiments.schema import Options

Outcome = Literal["finished", "failed", "stopped", "interrupted", "held"]  # by another process


class Schedule:
    """The runs of a table that are not done.

    No cell waits for another: seeds of a cell whose search is done come before the searches of
    others, and low seeds before high ones. Runs that another process holds come last.

    Args:
        experiment: the table.
        draws: how many trials of a cell may run at the same time; later ones know more.
    """

    def __init__(self, experiment: Experiment, draws: int | None = None) -> None:
        self.experiment, self.draws = experiment, draws
        self.cells = experiment.cells()
        self.running: dict[str, Run] = {}
        self.counts: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)
        self._set_aside: set[str] = set()
        self._waiting: list[list[Run]] = [[] for _ in self.cells]
        self._drawn: list[int] = [0 for _ in self.cells]  # trials that can still be drawn
        self._left: list[int] = [0 for _ in self.cells]
        for index in range(len(self.cells)):
            self._look(index)

    @property
    def left(self) -> int:
        """How many runs are still to end, as far as that is known."""
        return sum(self._left)

    @property
    def finished(self) -> bool:
        """Whether no run is left that could be taken, now or later."""
        return not self.running and not self._able()

    def take(self) -> Run | None:
        """The next run that can start now, None if there is none at present."""
        held: list[Run] = []
        for index in sorted(self._able(), key=self._rank):
            free = (run for run in self._waiting[index] if not runs.running(run))
            if (run := next(free, None)) is not None:
                return self._taken(run)
            if self._can_draw(index):
                self._drawn[index] -= 1
                return self._taken(tpe.draw(self.experiment, self.cells[index]))
            held += self._waiting[index]
        return self._taken(held[0]) if held else None

    def hold(self, run: Run) -> None:
        """Count a run as taken that somebody else has started."""
        self.running[str(run.home)] = run
        self._look(self.cells.index(run.cell))

    def ended(self, run: Run, outcome: Outcome) -> None:
        """Note the end of a run; its cell may have come to its next stage."""
        self.running.pop(str(run.home), None)
        self.counts[outcome] += 1
        if outcome in ("interrupted", "held"):
            self._set_aside.add(str(run.home))
        elif not runs.done(run):
            raise ValueError(
                f"{self.experiment.name}: nothing has come to {run.home}: do all machines share it?"
            )
        search, numbers = self.experiment.search, runs.metrics(run)
        if search and numbers is not None and stages.is_search(self.experiment, run):
            runs.check_metric(run, numbers, search.metric)
        self._look(self.cells.index(run.cell))

    def _able(self) -> list[int]:
        """The cells that have a run to take."""
        return [i for i in range(len(self.cells)) if self._waiting[i] or self._can_draw(i)]

    def _taken(self, run: Run) -> Run:
        index = self.cells.index(run.cell)
        self._waiting[index] = [each for each in self._waiting[index] if each != run]
        self.running[str(run.home)] = run
        return run

    def _rank(self, index: int) -> tuple[bool, int]:
        if not self._waiting[index]:
            return True, 0
        run = self._waiting[index][0]
        return stages.is_search(self.experiment, run), run.seed or 0

    def _can_draw(self, index: int) -> bool:
        cell = self.cells[index]
        now = sum(run.cell == cell for run in self.running.values())
        return self._drawn[index] > 0 and (self.draws is None or now < self.draws)

    def _look(self, index: int) -> None:
        """Read the state of a cell from its folders."""
        cell: Options = self.cells[index]
        stage = stages.present(self.experiment, cell)
        pending = stage.pending if stage else []
        free = [r for r in pending if str(r.home) not in self._set_aside | set(self.running)]
        self._waiting[index] = sorted(free, key=lambda run: run.seed or 0)
        self._drawn[index] = max(0, stage.missing) if stage else 0
        every = [run for each in stages.stages(self.experiment, cell) for run in each.runs]
        done = sum(runs.done(run) and str(run.home) not in self.running for run in every)
        self._left[index] = stages.planned(self.experiment, cell) - done
