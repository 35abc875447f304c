"""Stopping a run on a signal, after its work is saved."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
_STOPPING = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Stopped(Exception):  # noqa: N818 - like KeyboardInterrupt, not an error
    """Raised after a signal, once everything is saved."""

    def __init__(self, signum: int, step: int, path: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}")
        self.signum = signum
        self.path = path


class StopSignals:
    """Remembers that SIGINT, SIGTERM or SIGHUP arrived; a second SIGINT raises at once.

    Args:
        on_signal: called when the first signal arrives.
    """

    def __init__(self, on_signal: Callable[[], object] = int) -> None:
        self.signum = 0
        self._on_signal = on_signal
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """Start to handle signals if this is the main thread: Python allows it nowhere else."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in _STOPPING:
            self._handlers.setdefault(signum, signal.signal(signum, self._ask_to_stop))

    def give_back(self) -> None:
        """Put back the earlier handlers."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}
        self.signum = 0

    def _ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        if self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signum:
            self._on_signal()
        self.signum = signum
