"""Engines do the runs of a sweep: processes of this machine, a Ray cluster, SLURM jobs.

Every engine does the same with a run, :func:`execute`: its command in a process of its own, from
the last checkpoint in the run's folder if there is one. Engines return futures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from catnat.sweeps.runs import Run, claim

JOBS_PER_GPU = 2


@dataclass(frozen=True)
class Job:
    """A run, the folder for its files, and the file of rows that its row will be added to."""

    run: Run
    folder: Path
    rows_path: Path


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

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
    """Does jobs."""

    def submit(self, job: Job) -> Future[Outcome]:
        """Start a job, now or later."""

    def stop(self) -> None:
        """End the jobs that have started; they save a checkpoint."""


class SweepStopped(Exception):  # noqa: N818 - not an error
    """The sweep has been interrupted."""


def execute(
    job: Job,
    retries: int = 1,
    environment: dict[str, str] | None = None,
    on_process: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Outcome:
    """Do a run to its end; once more if it fails, but not if its options are wrong.

    Args:
        job: the run; ``log.txt`` in its folder has what the run prints.
        retries: the number of further attempts if a run fails.
        environment: variables of the process, besides those of this one and of the run.
        on_process: called when a process starts and ends; may raise :class:`SweepStopped`.
    """
    lock = claim(job.run, job.rows_path)
    if lock is None:
        return Outcome(note="another sweep does it", stopped=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    log_path = job.folder / "log.txt"
    device = device_name(environment)
    exit_code = 1
    with lock:
        for _ in range(retries + 1):
            command = job.run.command(job.folder)
            if checkpoint := newest(job.folder, "last.ckpt"):
                command.append(f"--ckpt_path={checkpoint}")
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | job.run.environment | (environment or {}),
                    pass_fds=[lock.fileno()],  # the run may outlive this process
                    start_new_session=True,  # Ctrl-C is for the sweep, which ends its runs
                )
            try:
                on_process(process)
                exit_code = process.wait(timeout=1e9)  # polls, so that it can be interrupted
                on_process(process)
            except (SweepStopped, KeyboardInterrupt):  # Ray interrupts a task that it cancels
                process.terminate()
                process.wait()
                return Outcome(stopped=True)
            metrics_path = newest(job.folder, "metrics.json")
            if exit_code == 0 and metrics_path:
                return Outcome(json.loads(metrics_path.read_text()), device=device)
            if exit_code == 2:  # wrong options stay wrong
                break
    lines = log_path.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    return Outcome(note=f"exit code {exit_code}: {lines[-1][:200]}", device=device)


def newest(folder: Path, name: str) -> Path | None:
    """The newest file of a name in the folder of a run."""
    return max(folder.glob(f"**/{name}"), key=lambda path: path.stat().st_mtime, default=None)


def device_name(environment: dict[str, str] | None = None) -> str:
    """The GPU that a run gets, otherwise the kind of processor."""
    if torch.cuda.is_available() and (environment or {}).get("CUDA_VISIBLE_DEVICES") != "":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU"


class Local:
    """Processes of this machine, dealt out to its GPUs.

    Args:
        jobs: the number of runs side by side; None: two on each GPU, one without a GPU.
        retries: of a run that fails.
    """

    def __init__(self, jobs: int | None, retries: int) -> None:
        gpus = visible_gpus()
        jobs = jobs or max(1, JOBS_PER_GPU * len(gpus))
        self.retries = retries
        self._thread = threading.local()
        self._devices = iter([gpus[job % len(gpus)] if gpus else "" for job in range(jobs)])
        self._num_threads = str(max(1, torch.get_num_threads() // jobs))
        self._pool = ThreadPoolExecutor(jobs, initializer=self._start_thread)
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_stopping = False

    def _start_thread(self) -> None:
        self._thread.environment = {"OMP_NUM_THREADS": self._num_threads}
        if device := next(self._devices):
            self._thread.environment["CUDA_VISIBLE_DEVICES"] = device

    def submit(self, job: Job) -> Future[Outcome]:
        """Start a job as soon as a thread is free."""
        return self._pool.submit(self._execute, job)

    def _execute(self, job: Job) -> Outcome:
        if self._is_stopping:
            return Outcome(stopped=True)
        return execute(job, self.retries, self._thread.environment, self._on_process)

    def _on_process(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            self._processes.add(process)
        else:
            self._processes.discard(process)
        if self._is_stopping:
            raise SweepStopped

    def stop(self) -> None:
        """Tell all processes to save and end, and wait for them."""
        self._is_stopping = True
        for process in list(self._processes):
            process.terminate()
        self._pool.shutdown(cancel_futures=True)


def visible_gpus() -> list[str]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES names them."""
    numbers = map(str, range(torch.cuda.device_count()))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(numbers))
    return [gpu for gpu in listed.split(",") if gpu]


class Ray:
    """A Ray cluster; a run whose machine is lost restarts elsewhere.

    The machines have catnat and the study's modules in the same places. Metrics come back through
    Ray; with a folder that all machines share, a lost run resumes from its checkpoint.

    Args:
        address: of the cluster, "auto" for one that this machine belongs to; None starts one here.
        gpus: of each run; None: half a GPU where the cluster has some.
        cpus: of each run.
        retries: of a run that fails.
    """

    def __init__(self, address: str | None, gpus: float | None, cpus: float, retries: int) -> None:
        import ray

        try:
            ray.init(address=address, log_to_driver=False)
        except ConnectionError as error:
            raise ValueError(f"--address {address}: {str(error).splitlines()[0]}") from error
        if gpus is None:
            gpus = 1 / JOBS_PER_GPU if ray.cluster_resources().get("GPU") else 0
        self.retries = retries
        self._remote: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=3)(execute)
        self._references: list[Any] = []

    def submit(self, job: Job) -> Future[Outcome]:
        """Give a job to the cluster."""
        reference = self._remote.remote(job, self.retries)
        self._references.append(reference)
        future: Future[Outcome] = reference.future()
        return future

    def stop(self) -> None:
        """Cancel what has not ended; runs save a checkpoint."""
        import ray

        for reference in self._references:
            ray.cancel(reference)
        ray.wait(self._references, num_returns=len(self._references), timeout=60)
        ray.shutdown()


class SlurmTask:
    """A job of submitit, which is submitted again when its time is up, and resumes."""

    def __call__(self, job: Job, retries: int) -> Outcome:
        """Do the job."""
        return execute(job, retries)

    def checkpoint(self, *arguments: Any) -> Any:
        """What submitit submits again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


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
        import submitit

        self._executor = submitit.AutoExecutor(folder=str(folder))
        self._executor.update_parameters(**parameters)
        self.retries = retries
        self._pool = ThreadPoolExecutor(jobs or 1000)
        self._jobs: list[Any] = []

    def submit(self, job: Job) -> Future[Outcome]:
        """Submit a job as soon as there are fewer than ``jobs``."""
        return self._pool.submit(self._wait, job)

    def _wait(self, job: Job) -> Outcome:
        submitted = self._executor.submit(SlurmTask(), job, self.retries)
        self._jobs.append(submitted)
        try:
            outcome: Outcome = submitted.result()
        except Exception as error:  # the job was lost: submitit's errors have no common base
            return Outcome(note=str(error).strip().splitlines()[-1][:200])
        return outcome

    def stop(self) -> None:
        """Cancel the jobs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for job in self._jobs:
            job.cancel()
