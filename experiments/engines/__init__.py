"""Where runs are made: on this machine, on Ray, as SLURM jobs, or by hand.

An engine takes runs from a schedule, does each with ``execute`` and tells how it ended. What is
finished is read from the run folders, so a sweep can go on with another engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from experiments.progress import Progress
    from experiments.schedule import Schedule


class Engine(Protocol):
    """Does the runs of a table."""

    def run(self, schedule: Schedule, progress: Progress) -> None:
        """Take runs from the schedule until it has no more, and tell progress how they end."""
