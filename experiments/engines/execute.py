"""One run from its start to its end, for every engine: lock, log, resume, failure record."""

from __future__ import annotations

import fcntl
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from experiments import runs
from experiments.engines.processes import Children
from experiments.plan import Run
from experiments.schedule import Outcome

_WRONG_USAGE = 2
_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}


def execute(
    run: Run,
    retries: int = 1,
    children: Children | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command until it is finished or has failed too often.

    A run goes on from its last checkpoint as long as that can be read; a checkpoint that train.py
    refuses, as one of another model, is left for a new beginning. Output goes to ``log.txt``.
    """
    children = children or Children()
    run.home.mkdir(parents=True, exist_ok=True)
    log, refused, line = run.home / "log.txt", False, ""
    with _claimed(run, children) as lock:
        if lock is None:
            return "interrupted"
        for attempt in range(retries + 1):
            if runs.metrics(run) is not None:
                return "finished"
            resumed = runs.interrupted(run) and not refused
            command = [*run.command, *(["--ckpt_path=last"] if resumed else [])]
            with log.open("a") as file:
                status = children.call(command, file, lock, run.cwd, environment)
            if status in _STOPPED:
                return "interrupted"
            if status == 0 and runs.metrics(run) is not None:
                return "finished"
            line = reason(status, log)
            print(f"attempt {attempt + 1}: {run.name}: {line}", file=sys.stderr)
            refused = status == _WRONG_USAGE and resumed
            if status == _WRONG_USAGE and not resumed:  # it will not get better
                break
        runs.record_failure(run, attempt + 1, line)
    return "failed"


def reason(status: int, log: Path) -> str:
    """Why a run has ended, in one line."""
    line = runs.last_line(log)
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return f"killed by {signal.Signals(number).name}; its last line: {line}"
    if status == 0:
        return f"ended without a metrics.json; its last line: {line}"
    return line


@contextmanager
def _claimed(run: Run, children: Children) -> Iterator[int | None]:
    """Hold the run against others at work on the same folder; wait for them to end, and say so.

    The command inherits the lock: one that outlives a killed sweep is waited for, not doubled.
    None if we are to stop before that.
    """
    with (run.home / ".lock").open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if children.stopping:
                    yield None
                    return
                if not told:
                    print(f"{run.name}: another process is at work on it: waiting", file=sys.stderr)
                told = True
                time.sleep(0.2)
            else:
                yield file.fileno()
                return


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM does what Ctrl-C does, and so does SIGHUP."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = [(each, signal.signal(each, interrupt)) for each in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)
