"""Engines execute the runs of a sweep: processes of this machine, a Ray cluster, SLURM jobs.

All engines share :func:`execute`, which does one run: its command in a process of its own, from the
last checkpoint in the run's folder if there is one. ``jobs`` threads of a sweep call an engine. The
engine "batched" is in batched.py.
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

from filelock import FileLock

from catnat.cli.names import Options
from catnat.cli.request import newest
from catnat.sweeps import watch
from catnat.sweeps.runs import Row, Run, read_metrics

JOBS_PER_GPU = 2
MOST_JOBS = 1000  # submitted to a cluster at a time
_ATTEMPTS = 2  # to do a run that fails


def execute(
    run: Run, folder: Path, environment: Mapping[str, str] = {}, stopping: Event | None = None
) -> Row:
    """Do a run to its end; once more if it fails, unless its options are wrong.

    Args:
        run: the run.
        folder: folder of its files; ``log.txt`` gets what the run prints.
        environment: variables of the process, besides those of this one and of the run.
        stopping: ends the run when it is set.

    Returns:
        Metrics, or a note why there are none, and the device. Empty if the run was stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stopping = stopping or Event()
    outcome: Row = {}
    for _ in range(_ATTEMPTS):
        code = _run_process(run, folder, environment, stopping)
        if code is None:
            return {}
        outcome = _outcome_of(folder, code) | {"device": device_name()}
        if code in (0, 2):  # wrong options stay wrong
            break
    return outcome


def _run_process(
    run: Run, folder: Path, environment: Mapping[str, str], stopping: Event
) -> int | None:
    """Do a run in a process until it ends; the exit code, or None if it was stopped."""
    lock_path = folder / ".run.lock"
    program = run.options.get("program", "-m catnat").split()
    command = [sys.executable, *program, *run.arguments(folder)]
    with FileLock(lock_path):  # the process of a killed sweep may still save its checkpoint
        if checkpoint := newest(folder, "**/last.ckpt"):
            command.append(f"--ckpt_path={checkpoint}")
    python_path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *run.path]))
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", watch.__file__, str(lock_path), *command],
            stdin=subprocess.PIPE,  # it is closed when this process ends, and the run with it
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": python_path, **environment},
            start_new_session=True,  # Ctrl-C is for the sweep, which ends its runs
        )
    with process:  # which closes the pipe, and waits
        try:
            while process.poll() is None and not stopping.wait(0.05):
                pass
        except KeyboardInterrupt:  # Ray interrupts a task that it cancels
            return None
    return None if stopping.is_set() else process.returncode


def _outcome_of(folder: Path, code: int) -> Row:
    """The metrics of a run that has ended with an exit code, or a note why there are none."""
    metrics_path = newest(folder, "**/metrics.json")
    if code == 0 and metrics_path:
        try:
            return read_metrics(metrics_path)
        except ValueError as error:
            return {"note": str(error)}
    lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
    return {"note": f"exit code {code}: {lines[-1][:200] if lines else 'it printed nothing'}"}


def device_name() -> str:
    """The GPU of this machine, otherwise the kind of processor."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU"


@dataclass(frozen=True)
class Engine:
    """An engine, which executes runs.

    Attributes:
        jobs: number of runs at a time.
        execute: does a run with its files in a folder, and returns the outcome when it has ended.
        stop: ends what is running; runs save a checkpoint.
    """

    jobs: int
    execute: Callable[[Run, Path], Row]
    stop: Callable[[], None]


def make_engine(name: str, jobs: int | None, resources: Options, folder: Path) -> Engine:
    """An engine by its name: local, ray or slurm."""
    if name == "ray":
        return ray_engine(resources)
    if name == "slurm":
        return slurm_engine(folder / "slurm", jobs, resources)
    return local_engine(jobs)


def local_engine(jobs: int | None) -> Engine:
    """Processes of this machine, dealt out to its GPUs.

    Args:
        jobs: number of runs side by side; None: two on each GPU, one without a GPU.
    """
    import torch

    numbers = map(str, range(torch.cuda.device_count()))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(numbers))
    gpus = [gpu for gpu in listed.split(",") if gpu]
    jobs = jobs or max(1, JOBS_PER_GPU * len(gpus))
    threads = max(1, torch.get_num_threads() // jobs)
    free_gpus = SimpleQueue[str]()
    for gpu in islice(cycle(gpus or [""]), jobs):
        free_gpus.put(gpu)
    stopping = Event()

    def do(run: Run, folder: Path) -> Row:
        gpu = free_gpus.get()
        environment = {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": str(threads)}
        try:
            return execute(run, folder, environment, stopping)
        finally:
            free_gpus.put(gpu)

    return Engine(jobs, do, stopping.set)


def ray_engine(resources: Options) -> Engine:
    """A Ray cluster; a run whose machine is lost restarts elsewhere.

    The cluster is that of the variable RAY_ADDRESS or of this machine, otherwise a new one. Its
    machines have catnat and the study's modules in the same places. Metrics come back through
    Ray; with a folder that all machines share, a lost run resumes from its checkpoint.

    Args:
        resources: options of ray.remote, such as num_cpus or num_gpus of each run (default: one
            core, and half a GPU where the cluster has some).
    """
    import ray

    ray.init(log_to_driver=False, ignore_reinit_error=True)  # another plan may have started it
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # not the one of ray.init
    gpus = 1 / JOBS_PER_GPU if ray.cluster_resources().get("GPU") else 0
    options: Options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 3} | resources
    task = ray.remote(**options)(execute)
    references: list[Any] = []

    def do(run: Run, folder: Path) -> Row:
        reference = task.remote(run, folder)
        references.append(reference)
        return _unless_lost(lambda: ray.get(reference))

    def stop() -> None:
        for reference in references:
            ray.cancel(reference)

    return Engine(MOST_JOBS, do, stop)


def slurm_engine(folder: Path, jobs: int | None, resources: Options) -> Engine:
    """SLURM jobs by submitit, which submits a job again when its time is up.

    The machines share the folder of the runs.

    Args:
        folder: folder of submitit's own files.
        jobs: how many jobs are submitted at a time.
        resources: parameters of submitit's executor, such as slurm_partition=gpu, gpus_per_node=1
            or timeout_min=120.
    """
    import submitit

    class Task(submitit.helpers.Checkpointable):
        """The submitted function; submitit submits it again after a time-out."""

        __call__ = staticmethod(execute)

    executor = submitit.AutoExecutor(folder=str(folder))
    executor.update_parameters(**resources)
    submitted: list[Any] = []

    def do(run: Run, folder: Path) -> Row:
        job = executor.submit(Task(), run, folder)  # type: ignore[no-untyped-call]
        submitted.append(job)
        return _unless_lost(job.result)

    def stop() -> None:
        for job in submitted:
            job.cancel()

    return Engine(jobs or MOST_JOBS, do, stop)


def _unless_lost(wait: Callable[[], Row]) -> Row:
    """The outcome of a run on a cluster, or a note if the cluster lost the run."""
    try:
        return wait()
    except Exception as error:  # those of Ray and submitit have no common base
        return {"note": (str(error).strip() or repr(error)).splitlines()[-1][:200]}
