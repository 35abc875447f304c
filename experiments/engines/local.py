"""Running commands on this machine: one after the other or side by side, each until it is done."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from typing import Literal, TextIO

from experiments import runs
from experiments.engines import forks as warm
from experiments.plan import ROOT, Run

Outcome = Literal["finished", "failed", "interrupted"]
_WRONG_USAGE = 2
_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}


class Children:
    """The commands that run now, so that they can be asked to stop.

    Args:
        forked: let those of train.py share their imports, where that is possible (see warm.py).
    """

    def __init__(self, forked: bool = False) -> None:
        self._processes: set[subprocess.Popen[bytes] | warm.Process] = set()
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._forked = forked
        self._server: warm.Server | None = None
        self.stopping = False

    def call(self, command: list[str], log: TextIO, lock: int) -> int:
        """Run a command; its exit status."""
        with self._starting:  # not the other lock: the first start waits for all the imports
            if self.stopping:
                return 128 + signal.SIGTERM
            process = self._start(command, log, lock)
        with self._lock:
            self._processes.add(process)
            if self.stopping:
                process.terminate()
        status = process.wait()
        with self._lock:
            self._processes.discard(process)
        return status

    def _start(
        self, command: list[str], log: TextIO, lock: int
    ) -> subprocess.Popen[bytes] | warm.Process:
        """The lock is held until the command itself is gone, whatever happens to us."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        if self._forked and warm.can_run(command):
            if self._server is None:
                self._server = warm.Server(environment, warm.modules(command))
            try:
                return self._server.start(command, log, lock)
            except warm.Gone as error:
                print(f"no more forks ({error}): runs import torch themselves", file=sys.stderr)
                self._forked = False
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            pass_fds=[lock],
            preexec_fn=warm.stop_with_parent,
        )

    def stop(self) -> None:
        """Ask all to stop; they save what they have first."""
        with self._lock:
            self.stopping = True
            for process in self._processes:
                process.terminate()

    def close(self) -> None:
        """When all are done."""
        if self._server is not None:
            self._server.close()


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
    """Run commands, so many at a time; stops them when interrupted."""
    with closing(Children(forked=True)) as children, ThreadPoolExecutor(jobs) as pool:
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
    """Inside, SIGTERM does what Ctrl-C does, and so does SIGHUP."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = [(each, signal.signal(each, interrupt)) for each in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
