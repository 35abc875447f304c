"""What a sweep shows while it runs: a live table in a terminal, else one line for each run."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from experiments import runs, stages, status
from experiments.plan import Run
from experiments.schedule import Outcome, Schedule


class Progress:
    """Tells the schedule, and whoever looks on, how runs end.

    Args:
        schedule: of the table that is swept.
        live: draw the table of ``sweep.py status`` again and again below the lines.
    """

    refresh = 2.0  # seconds

    def __init__(self, schedule: Schedule, live: bool | None = None) -> None:
        self.schedule = schedule
        search, metrics = schedule.experiment.search, schedule.experiment.metrics
        self._shown = list(dict.fromkeys([search.metric if search else "", *metrics]))[:3]
        self._began = time.monotonic()
        self._next = 0.0
        self._ended = 0
        self._live: Any = None
        if sys.stdout.isatty() if live is None else live:
            from rich.live import Live

            self._live = Live(auto_refresh=False)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
            self.look()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._next = 0.0
            self.look()
            self._live.stop()

    def started(self, run: Run) -> None:
        """A run has begun."""
        self.look()

    def ended(self, run: Run, outcome: Outcome) -> None:
        """A run has ended: print its line. One that another process holds will end there."""
        self._ended += outcome != "held"
        try:
            self.schedule.ended(run, outcome)
        finally:
            self._print(run, outcome)

    def look(self) -> None:
        """Draw the live table again, if it is time."""
        began = time.monotonic()
        if self._live is not None and began > self._next:
            self._live.update(status.table([status.survey(self.schedule.experiment)]), refresh=True)
            took = time.monotonic() - began  # longer for a large table, which is drawn less often
            self._next = time.monotonic() + max(self.refresh, 20 * took)

    def _print(self, run: Run, outcome: Outcome) -> None:
        spent = time.monotonic() - self._began
        left = self.schedule.left
        later = spent / max(1, self._ended) * left
        clocks = f"{status.clock(spent)}, about {status.clock(later)} left"
        numbers = runs.metrics(run) or {}
        values = "  ".join(f"{k} {numbers[k]:.4g}" for k in self._shown if k in numbers)
        said = values if outcome == "finished" else outcome.upper()
        if outcome == "failed":
            said += f": {runs.failure(run)}"
        if outcome == "held":
            said += " by another process"
        kind = "search " if stages.is_search(self.schedule.experiment, run) else ""
        text = f"[{self._ended}/{self._ended + left}] {clocks}  {kind}{run.name}  {said}"
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
