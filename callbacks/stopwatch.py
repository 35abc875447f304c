"""Seconds of the parts of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from catnat.callbacks.terminal import duration


class Stopwatch:
    """Adds up the seconds of parts that have names.

    ``seconds`` has them by name. ``first`` is when the first of them began.

    Args:
        *names: of the parts, in the order in which they are shown.
        clock: gives the present time in seconds.
    """

    def __init__(self, *names: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.first: float | None = None
        self.seconds = dict.fromkeys(names, 0.0)
        self._clock = clock
        self._began: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """A part begins."""
        self._began[name] = self._clock()
        if self.first is None:
            self.first = self._began[name]

    def end(self, name: str) -> None:
        """A part has ended; nothing is added if it had not begun."""
        now = self._clock()
        self.seconds[name] += now - self._began.pop(name, now)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is inside is a part."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def line(self, began: float, imported: float) -> str:
        """A line of text with the time of each part.

        Args:
            began: when the run began, by the clock.
            imported: when all libraries were there; what follows up to ``first`` is the start.
        """
        start = (self.first or imported) - imported
        parts = {"imports": imported - began, "start": start, **self.seconds}
        said = (f"{name} {duration(each)}" for name, each in parts.items() if each > 0)
        return "time: " + ", ".join(said)
