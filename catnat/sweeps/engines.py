"""Who does the runs of a sweep: processes of this machine, a Ray cluster, SLURM jobs.

Every engine does the same with a run, :func:`execute`: its command in a process of its own, from
the last checkpoint in the run's folder if there is one. Engines give back futures.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from catnat.sweeps.runs import Run

JOBS_PER_GPU = 2


@dataclass(frozen=True)
class Outcome:
    """How a run has ended.

    Attributes:
        metrics: none of a run that has not finished.
        note: why it has not.
        device: where it ran.
        stopped: whether the run is left for later: this sweep has ended it, or another one does it.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    device: str = ""
    stopped: bool = False


class Engine(Protocol):
    """Takes runs."""

    def submit(self, run: Run, folder: Path) -> Future[Outcome]:
        """Begin a run, now or later, in its folder."""

    def stop(self) -> None:
        """End the runs that have begun; they save a checkpoint."""


class SweepStopped(Exception):  # noqa: N818 - reads as what it says
    """The sweep has been interrupted."""


def execute(
    command: list[str],
    folder: Path,
    retries: int = 1,
    environment: dict[str, str] | None = None,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Outcome:
    """Do a run to its end; once more if it fails, but not if its options are wrong.

    Args:
        command: the words.
        folder: of the run; ``log.txt`` in it has what the run prints.
        retries: how often a run that fails is tried again.
        environment: variables of the process, besides those of this one.
        started: is told of each process; may raise :class:`SweepStopped`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, code = folder / "log.txt", 1
    with (folder / "lock").open("w") as lock:  # held by the run, too: this process may be killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Outcome(note="another sweep does it", stopped=True)
        for _ in range(retries + 1):
            checkpoint = newest(folder, "last.ckpt")
            resume = [] if checkpoint is None else [f"--ckpt_path={checkpoint}"]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*command, *resume],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | (environment or {}),
                    pass_fds=[lock.fileno()],
                    start_new_session=True,  # Ctrl-C is for the sweep, which ends its runs
                )
                try:
                    started(process)
                    code = process.wait(timeout=1e9)  # polls, so that it can be interrupted
                    started(process)
                except (SweepStopped, KeyboardInterrupt):  # Ray interrupts a task that it cancels
                    process.terminate()
                    process.wait()
                    return Outcome(stopped=True)
            metrics = newest(folder, "metrics.json")
            if code == 0 and metrics is not None:
                return Outcome(json.loads(metrics.read_text()), device=device_name(environment))
            if code == 2:  # wrong options stay wrong
                break
    said = log.read_text(errors="replace").strip().splitlines()
    line = said[-1] if said else "it printed nothing"
    return Outcome(note=f"exit code {code}: {line[:200]}", device=device_name(environment))


def newest(folder: Path, name: str) -> Path | None:
    """The newest file of a name in the folder of a run."""
    found = list(folder.glob(f"**/{name}"))
    return max(found, key=lambda path: path.stat().st_mtime) if found else None


def device_name(environment: dict[str, str] | None = None) -> str:
    """The GPU that a run gets, otherwise the kind of processor."""
    import torch

    if torch.cuda.is_available() and (environment or {}).get("CUDA_VISIBLE_DEVICES") != "":
        return torch.cuda.get_device_name()
    import platform

    return f"{platform.machine()} CPU"


class Local:
    """Processes of this machine, dealt out to its GPUs.

    Args:
        jobs: runs side by side; None: two on each GPU, or one on a machine without any.
        retries: of a run that fails.
    """

    def __init__(self, jobs: int | None, retries: int) -> None:
        import torch

        gpus = visible_gpus()
        jobs = jobs or max(1, JOBS_PER_GPU * len(gpus))
        self.retries, self.pool = retries, ThreadPoolExecutor(jobs)
        self._slots: queue.Queue[dict[str, str]] = queue.Queue()
        threads = str(max(1, torch.get_num_threads() // jobs))
        for job in range(jobs):
            own = {"CUDA_VISIBLE_DEVICES": gpus[job % len(gpus)]} if gpus else {}
            self._slots.put({"OMP_NUM_THREADS": threads} | own)
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopping = False

    def submit(self, run: Run, folder: Path) -> Future[Outcome]:
        """Begin a run as soon as a slot is free."""
        return self.pool.submit(self._execute, run, folder)

    def _execute(self, run: Run, folder: Path) -> Outcome:
        if self._stopping:
            return Outcome(stopped=True)
        slot = self._slots.get()
        try:
            environment = run.environment | slot
            return execute(run.command(folder), folder, self.retries, environment, self._started)
        finally:
            self._slots.put(slot)

    def _started(self, process: subprocess.Popen[bytes]) -> None:
        """Keep a process that is running; forget one that has ended."""
        (self._processes.add if process.poll() is None else self._processes.discard)(process)
        if self._stopping:
            raise SweepStopped

    def stop(self) -> None:
        """Tell all processes to save and end, and wait for them."""
        self._stopping = True
        for process in list(self._processes):
            process.terminate()
        self.pool.shutdown(cancel_futures=True)


def visible_gpus() -> list[str]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES names them."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [each for each in given.split(",") if each]
    return [str(number) for number in range(torch.cuda.device_count())]


class Ray:
    """A Ray cluster; a run whose machine is lost begins again elsewhere.

    The machines have the checkout in the same place. Metrics come back through Ray; with a folder
    that all machines share, a lost run resumes from its checkpoint.

    Args:
        address: of the cluster, "auto" for one that this machine belongs to; None starts one here.
        gpus: of each run; None: half a GPU where the cluster has some.
        cpus: of each run.
        retries: of a run that fails.
    """

    def __init__(self, address: str | None, gpus: float | None, cpus: float, retries: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError('ray is missing: pip install "catnat[sweep]"') from error
        try:
            ray.init(address=address, log_to_driver=False)
        except ConnectionError as error:
            raise ValueError(f"--address {address}: {str(error).splitlines()[0]}") from error
        if gpus is None:
            gpus = 1 / JOBS_PER_GPU if ray.cluster_resources().get("GPU") else 0
        self.retries, self._ray = retries, ray
        self._remote: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=3)(execute)
        self._waiting: list[Any] = []

    def submit(self, run: Run, folder: Path) -> Future[Outcome]:
        """Give a run to the cluster."""
        command = run.command(folder)
        reference = self._remote.remote(command, folder, self.retries, run.environment)
        self._waiting.append(reference)
        future: Future[Outcome] = reference.future()
        return future

    def stop(self) -> None:
        """Take back what has not ended; runs save a checkpoint."""
        for reference in self._waiting:
            self._ray.cancel(reference)
        self._ray.wait(self._waiting, num_returns=len(self._waiting), timeout=60)
        self._ray.shutdown()


class Slurm:
    """SLURM jobs by submitit; the machines share the folder of the runs.

    Args:
        folder: of submitit's own files.
        jobs: how many jobs are submitted at a time.
        parameters: of submitit's executor, such as slurm_partition=gpu, gpus_per_node=1 or
            timeout_min=120.
        retries: of a run that fails.
    """

    def __init__(
        self, folder: Path, jobs: int | None, parameters: dict[str, Any], retries: int
    ) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ValueError('submitit is missing: pip install "catnat[sweep]"') from error

        class Task(submitit.helpers.Checkpointable):  # type: ignore[misc]
            """Submitted again when its time is up, a run resumes from its checkpoint."""

            def __call__(self, *arguments: Any) -> Outcome:
                return execute(*arguments)

        self._task, self._executor = Task(), submitit.AutoExecutor(folder=str(folder))
        self._executor.update_parameters(**parameters)
        self.retries, self.pool = retries, ThreadPoolExecutor(jobs or 1000)
        self._jobs: list[Any] = []

    def submit(self, run: Run, folder: Path) -> Future[Outcome]:
        """Submit a job as soon as there are fewer than ``jobs``."""
        return self.pool.submit(self._wait, run, folder)

    def _wait(self, run: Run, folder: Path) -> Outcome:
        command = run.command(folder)
        job = self._executor.submit(self._task, command, folder, self.retries, run.environment)
        self._jobs.append(job)
        try:
            outcome: Outcome = job.result()
        except Exception as error:  # the job was lost: submitit's errors have no common base
            return Outcome(note=str(error).strip().splitlines()[-1][:200])
        return outcome

    def stop(self) -> None:
        """Cancel the jobs."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for job in self._jobs:
            job.cancel()
