"""Runs on this machine, one after the other or side by side, dealt out to its GPUs."""

from __future__ import annotations

import math
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass

from experiments.engines import devices, mps
from experiments.engines.execute import execute
from experiments.engines.processes import Children
from experiments.plan import Run
from experiments.progress import Progress
from experiments.schedule import Outcome, Schedule

JOBS = 2  # side by side on a GPU, or on a machine without one, unless told otherwise


@dataclass(frozen=True)
class Local:
    """This machine.

    Args:
        jobs: runs side by side; None for so many on each GPU.
        jobs_per_gpu: runs side by side on one GPU.
        gpus_per_run: GPUs that a run takes, or its share of one; wins over jobs_per_gpu.
        retries: of a run that fails.
        share: start NVIDIA's MPS where runs share a GPU.
    """

    jobs: int | None = None
    jobs_per_gpu: int | None = None
    gpus_per_run: float | None = None
    retries: int = 1
    share: bool = True

    def run(self, schedule: Schedule, progress: Progress) -> None:
        """Run what is left of a table; stops all runs when interrupted."""
        found, jobs = self.jobs_here(devices.visible())
        shared = self.share and jobs > len(found)
        with (
            mps.environments(found, shared) as environments,
            closing(Children(forked=True)) as children,
            ThreadPoolExecutor(jobs) as pool,
        ):
            free = [environments[name] if name else {} for name in devices.dealt(found, jobs)]
            try:
                self._fill(schedule, progress, children, pool, free)
            except BaseException:
                children.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def jobs_here(self, found: list[str]) -> tuple[list[str], int]:
        """The devices that runs are dealt out to, and how many runs go side by side."""
        each = self.jobs_per_gpu or JOBS
        if self.gpus_per_run:
            found = devices.grouped(found, max(1, math.floor(self.gpus_per_run)))
            each = max(1, math.floor(1 / self.gpus_per_run))
        return found, self.jobs or each * max(1, len(found))

    def _fill(
        self,
        schedule: Schedule,
        progress: Progress,
        children: Children,
        pool: ThreadPoolExecutor,
        free: list[dict[str, str]],
    ) -> None:
        """Start a run wherever there is room, until none is left."""
        futures: dict[Future[Outcome], tuple[Run, dict[str, str]]] = {}
        while True:
            while free and (run := schedule.take()) is not None:
                place = free.pop(0)
                future: Future[Outcome] = pool.submit(execute, run, self.retries, children, place)
                futures[future] = run, place
                progress.started(run)
            if not futures:
                return
            ended, _ = wait(futures, timeout=progress.refresh, return_when=FIRST_COMPLETED)
            for each in ended:
                run, place = futures.pop(each)
                free.append(place)
                progress.ended(run, each.result())
            progress.look()
