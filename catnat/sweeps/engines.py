"""Engines execute the runs of a sweep: processes of this machine, a Ray cluster, SLURM jobs.

All engines share :func:`execute`, which does one run: its command in a process of its own, from the
last checkpoint in the run's folder if there is one. The method ``execute`` of an engine waits for
the end of a run; ``jobs`` threads of the sweep call it.
"""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import torch
from filelock import FileLock

from catnat.cli.names import Options
from catnat.cli.request import newest
from catnat.sweeps import watch
from catnat.sweeps.runs import Row, Run, read_metrics

JOBS_PER_GPU = 2
MOST_JOBS = 1000  # submitted to a cluster at a time
_ATTEMPTS = 2  # to do a run that fails


@dataclass(frozen=True)
class Job:
    """A run, and the folder for its files."""

    run: Run
    folder: Path


def execute(job: Job, environment: Mapping[str, str] = {}, stopping: Event | None = None) -> Row:
    """Do a run to its end; once more if it fails, unless its options are wrong.

    Args:
        job: the run; ``log.txt`` in its folder gets what the run prints.
        environment: variables of the process, besides those of this one and of the run.
        stopping: ends the run when it is set.

    Returns:
        Metrics, or a note why there are none, and the device. Empty if the run was stopped.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    log_path = job.folder / "log.txt"
    lock_path = job.folder / ".run.lock"
    stopping = stopping or Event()
    for _ in range(_ATTEMPTS):
        with FileLock(lock_path):  # the process of a killed sweep may still save its checkpoint
            command = _command(job)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", watch.__file__, str(lock_path), *command],
                stdin=subprocess.PIPE,  # it is closed when this process ends, and the run with it
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_python_path(job.run), **environment},
                start_new_session=True,  # Ctrl-C is for the sweep, which ends its runs
            )
        try:
            while process.poll() is None:
                if stopping.wait(0.05):
                    raise KeyboardInterrupt
        except KeyboardInterrupt:  # Ray interrupts a task that it cancels
            process.terminate()
            process.wait()
            return {}
        finally:
            process.stdin.close()  # type: ignore[union-attr]
        metrics_path = newest(job.folder, "**/metrics.json")
        if process.returncode == 0 and metrics_path:
            try:
                return {**read_metrics(metrics_path), "device": device_name()}
            except ValueError as error:
                return {"note": str(error), "device": device_name()}
        if process.returncode == 2:  # wrong options stay wrong
            break
    lines = log_path.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    note = f"exit code {process.returncode}: {lines[-1][:200]}"
    return {"note": note, "device": device_name()}


def _command(job: Job) -> list[str]:
    program = job.run.options.get("program", "-m catnat").split()
    command = [sys.executable, *program, *job.run.arguments(job.folder)]
    if checkpoint := newest(job.folder, "**/last.ckpt"):
        command.append(f"--ckpt_path={checkpoint}")
    return command


def _python_path(run: Run) -> dict[str, str]:
    folders = [os.environ.get("PYTHONPATH"), *run.path]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def device_name() -> str:
    """The GPU of this machine, otherwise the kind of processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU"


class Local:
    """Processes of this machine, dealt out to its GPUs.

    Args:
        jobs: the number of runs side by side; None: two on each GPU, one without a GPU.
    """

    def __init__(self, jobs: int | None) -> None:
        numbers = map(str, range(torch.cuda.device_count()))
        listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(numbers))
        gpus = [gpu for gpu in listed.split(",") if gpu]
        self.jobs = jobs or max(1, JOBS_PER_GPU * len(gpus))
        self._gpus = SimpleQueue[str]()
        for gpu in islice(cycle(gpus or [""]), self.jobs):
            self._gpus.put(gpu)
        self._stopping = Event()

    def execute(self, job: Job) -> Row:
        """Do a run."""
        gpu = self._gpus.get()
        threads = max(1, torch.get_num_threads() // self.jobs)
        environment = {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": str(threads)}
        try:
            return execute(job, environment, self._stopping)
        finally:
            self._gpus.put(gpu)

    def stop(self) -> None:
        """Tell all processes to save and end."""
        self._stopping.set()


def _outcome_of(wait: Callable[[], Row]) -> Row:
    """Return the row from a cluster, or a note if the cluster lost the run."""
    try:
        return wait()
    except Exception as error:  # those of Ray and submitit have no common base
        return {"note": (str(error).strip() or repr(error)).splitlines()[-1][:200]}


class Ray:
    """A Ray cluster; a run whose machine is lost restarts elsewhere.

    The cluster is that of the variable RAY_ADDRESS or of this machine, otherwise a new one. Its
    machines have catnat and the study's modules in the same places. Metrics come back through
    Ray; with a folder that all machines share, a lost run resumes from its checkpoint.

    Args:
        resources: options of ray.remote, such as num_cpus or num_gpus of each run (default: one
            core, and half a GPU where the cluster has some).
    """

    jobs = MOST_JOBS

    def __init__(self, resources: Options) -> None:
        import ray

        ray.init(log_to_driver=False, ignore_reinit_error=True)  # another plan may have started it
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # not the one of ray.init
        gpus = 1 / JOBS_PER_GPU if ray.cluster_resources().get("GPU") else 0
        options: Options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 3} | resources
        self._execute = ray.remote(**options)(execute)
        self._references: list[Any] = []

    def execute(self, job: Job) -> Row:
        """Let the cluster do a run."""
        import ray

        reference = self._execute.remote(job)
        self._references.append(reference)
        return _outcome_of(lambda: ray.get(reference))

    def stop(self) -> None:
        """Cancel what has not ended; runs save a checkpoint."""
        import ray

        for reference in self._references:
            ray.cancel(reference)


class Slurm:
    """SLURM jobs by submitit, which submits a job again when its time is up.

    The machines share the folder of the runs.

    Args:
        folder: folder of submitit's own files.
        jobs: how many jobs are submitted at a time.
        resources: parameters of submitit's executor, such as slurm_partition=gpu, gpus_per_node=1
            or timeout_min=120.
    """

    def __init__(self, folder: Path, jobs: int | None, resources: Options) -> None:
        import submitit

        class Task(submitit.helpers.Checkpointable):
            """The submitted function; submitit submits it again after a time-out."""

            __call__ = staticmethod(execute)

        self._task = Task()  # type: ignore[no-untyped-call]
        self._executor = submitit.AutoExecutor(folder=str(folder))
        self._executor.update_parameters(**resources)
        self.jobs = jobs or MOST_JOBS
        self._jobs: list[Any] = []

    def execute(self, job: Job) -> Row:
        """Submit a job, and wait for its end."""
        submitted = self._executor.submit(self._task, job)
        self._jobs.append(submitted)
        return _outcome_of(submitted.result)

    def stop(self) -> None:
        """Cancel the jobs."""
        for job in self._jobs:
            job.cancel()


Engine = Local | Ray | Slurm


def make_engine(name: str, jobs: int | None, resources: Options, folder: Path) -> Engine:
    """An engine by its name: local, ray or slurm."""
    if name == "ray":
        return Ray(resources)
    if name == "slurm":
        return Slurm(folder / "slurm", jobs, resources)
    return Local(jobs)
