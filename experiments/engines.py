"""Running commands on this machine: one after the other or side by side, each until it is done."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Literal, TextIO

from experiments import runs
from experiments.plan import ROOT, Run

Outcome = Literal["finished", "failed", "interrupted"]
_WRONG_USAGE = 2
_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}


# Looked up here: a process that was just forked must not.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_SET_SIGNAL_OF_PARENTS_DEATH = 1


def _stop_with_parent() -> None:
    """In a command about to begin: be told to save and stop, should the sweep be killed."""
    if _PRCTL is not None:
        _PRCTL(_SET_SIGNAL_OF_PARENTS_DEATH, signal.SIGTERM)


class Children:
    """The commands that run now, so that they can be asked to stop."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.stopping = False

    def call(self, command: list[str], log: TextIO, lock: int) -> int:
        """Run a command; its exit status."""
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONUNBUFFERED": "1"}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self._lock:
            if self.stopping:
                return 128 + signal.SIGTERM
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment | {"PYTHONPATH": path},
                cwd=ROOT,
                pass_fds=[lock],  # held until the command itself is gone, whatever happens to us
                preexec_fn=_stop_with_parent,
            )
            self._processes.add(process)
        status = process.wait()
        with self._lock:
            self._processes.discard(process)
        return status

    def stop(self) -> None:
        """Ask all to stop; they save what they have first."""
        with self._lock:
            self.stopping = True
            for process in self._processes:
                process.terminate()


def execute(run: Run, retries: int = 1, children: Children | None = None) -> Outcome:
    """Run a command until it is finished or has failed too often.

    It goes on from its last checkpoint where there is one; after a failure of that, from the
    beginning. What it says goes to ``log.txt``.
    """
    children = children or Children()
    run.home.mkdir(parents=True, exist_ok=True)
    log, resumed = run.home / "log.txt", False
    with _claimed(run, children) as lock:
        if lock is None:
            return "interrupted"
        for attempt in range(retries + 1):
            if runs.metrics(run) is not None:
                return "finished"
            command = [*run.command]
            resumed = runs.interrupted(run) and not resumed
            command += ["--ckpt_path=last"] if resumed else []
            with log.open("a") as file:
                status = children.call(command, file, lock)
            if status in _STOPPED:
                return "interrupted"
            if status == 0 and runs.metrics(run) is not None:
                return "finished"
            print(f"attempt {attempt + 1}: {run.name}: {runs.last_line(log)}", file=sys.stderr)
            if status == _WRONG_USAGE and not resumed:  # it will not get better
                break
        runs.record_failure(run, attempt + 1, runs.last_line(log))
    return "failed"


def run_local(pending: list[Run], jobs: int, retries: int, progress: Progress) -> None:
    """Run commands, so many at a time; stops them and itself on SIGINT and SIGTERM."""
    children = Children()
    with sigterm_interrupts(), ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(execute, run, retries, children): run for run in pending}
        try:
            for future in as_completed(futures):
                progress.tell(futures[future], future.result())
        except BaseException:
            children.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class Progress:
    """One line for each run that ends: how many are done, how long the rest may take."""

    def __init__(self, total: int, jobs: int, shown: list[str]) -> None:
        self.total, self.shown = total, shown
        self.jobs = max(1, min(jobs, total))
        self.counts = {"finished": 0, "failed": 0, "interrupted": 0}
        self._began = time.monotonic()

    def tell(self, run: Run, outcome: Outcome) -> None:
        """Print the line."""
        self.counts[outcome] += 1
        ended = sum(self.counts.values())
        spent = time.monotonic() - self._began
        left = spent / ended * (self.total - ended)
        numbers = runs.metrics(run) or {}
        values = "  ".join(f"{k} {numbers[k]:.4g}" for k in self.shown if k in numbers)
        said = values if outcome == "finished" else outcome.upper()
        if outcome == "failed":
            said += f": {runs.failure(run)}"
        clock = f"{_clock(spent)}, about {_clock(left)} left"
        print(f"[{ended}/{self.total}] {clock}  {run.name}  {said}", flush=True)


@contextmanager
def _claimed(run: Run, children: Children) -> Iterator[int | None]:
    """Hold the run against others at work on the same folder; wait for them to end.

    The command inherits the lock: one that outlives a killed sweep is waited for, not doubled.
    None if we are to stop before that.
    """
    with (run.home / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if children.stopping:
                    yield None
                    return
                time.sleep(0.2)
            else:
                yield file.fileno()
                return


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM does what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
