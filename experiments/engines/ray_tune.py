"""Runs as trials of Ray Tune, on this machine or a cluster: one Tune experiment for each table.

The schedule is Tune's searcher: it says which run comes next, in every cell as far as that cell has
come. Tune places runs, starts those of a lost machine elsewhere from their checkpoints in its
storage, and stops bad ones early where the plan says so. Which runs are finished is read from their
folders, as with every engine; where machines do not share these, reports bring the numbers.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # it would wait for the runs to end
os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "5")

try:
    import ray
    from ray import tune
    from ray.tune.search import Searcher
except ImportError as error:
    raise ValueError(
        f"--engine ray needs Ray Tune ({error}): pip install 'catnat[sweep]'"
    ) from error

from experiments import runs, stages
from experiments.engines import devices, mps
from experiments.engines.execute import sigterm_interrupts
from experiments.engines.local import JOBS
from experiments.engines.ray_early_stop import AshaPerCell
from experiments.engines.ray_trial import RunTrial, config_of, run_of
from experiments.plan import Run
from experiments.progress import Progress
from experiments.schedule import Schedule
from experiments.train_interface import ROOT

_LOSSES = 3  # of machines that a run survives, besides its retries
_LINKS: dict[str, _Link] = {}  # by the folder of the table: Tune keeps copies of what it is given


@dataclass(frozen=True)
class RayTune:
    """A Ray cluster.

    Args:
        address: of a running cluster, "auto" for the one this machine belongs to; None starts Ray
            here.
        jobs: runs side by side; None for as many as there is room for.
        gpus_per_run: share of a GPU a run takes; None for what jobs_per_gpu says, if there are any.
        jobs_per_gpu: runs that share a GPU.
        cpus_per_run: processors a run takes.
        retries: of a run that fails.
        storage: folder or address of Tune's checkpoints; None for one beside the runs.
        share: start NVIDIA's MPS where Ray is started here and runs share a GPU.
    """

    address: str | None = None
    jobs: int | None = None
    gpus_per_run: float | None = None
    jobs_per_gpu: int | None = None
    cpus_per_run: float = 1.0
    retries: int = 1
    storage: str | None = None
    share: bool = True

    def run(self, schedule: Schedule, progress: Progress) -> None:
        """Run Tune until nothing is left of a table."""
        self._start()
        resources = self._resources()
        folder, experiment = schedule.experiment.folder, schedule.experiment
        with ExitStack() as stack:
            shared = self.share and self.address is None and 0 < resources["gpu"] < 1
            found = devices.visible() if shared else []
            environments = stack.enter_context(mps.environments(found, shared))
            link = _Link(schedule, progress, self.retries, environments)
            _LINKS[str(folder)] = link
            stack.callback(_LINKS.pop, str(folder))
            stack.enter_context(sigterm_interrupts())
            trainable = tune.with_resources(RunTrial, resources)
            storage = self.storage or str(folder / ".ray")
            name = f"{experiment.name}-{experiment.scale}"
            tuner = self._restored(trainable, f"{storage}/{name}", link)
            (tuner or self._new(trainable, storage, name, link)).fit()
        if link.error is not None:
            raise link.error

    def _start(self) -> None:
        """Connect, or start."""
        logging.getLogger("ray.tune").setLevel(logging.ERROR)  # misses files we do not need
        warnings.filterwarnings("ignore", module="ray")
        if ray.is_initialized():
            return
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        here: dict[str, Any] = {"include_dashboard": False}
        if self.jobs:
            here["num_cpus"] = math.ceil(self.jobs * self.cpus_per_run)
        try:
            ray.init(
                address=self.address,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if self.address else here),
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ValueError(why_no_connection(self.address, error)) from error

    def _resources(self) -> dict[str, float]:
        """What a run takes; raises if no machine of the cluster has as much."""
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        machines = [node["Resources"] for node in nodes if node["Alive"]]
        most = {kind: max(each.get(kind, 0.0) for each in machines) for kind in ("CPU", "GPU")}
        gpus = self.gpus_per_run
        if gpus is None:
            gpus = 1 / (self.jobs_per_gpu or JOBS) if most["GPU"] else 0.0
        for option, asked, there in (
            ("--gpus_per_run", gpus, most["GPU"]),
            ("--cpus_per_run", self.cpus_per_run, most["CPU"]),
        ):
            if asked > there:
                raise ValueError(
                    f"{option} {asked:g}: no machine of the cluster has over {there:g}"
                )
        return {"cpu": self.cpus_per_run, "gpu": gpus}

    def _new(self, trainable: Any, storage: str, name: str, link: _Link) -> tune.Tuner:
        schedule = link.schedule
        config = tune.TuneConfig(
            search_alg=ScheduleSearcher(str(schedule.experiment.folder)),
            scheduler=link.scheduler(),
            num_samples=-1,  # until the schedule says that it is finished
            max_concurrent_trials=self.jobs,
            reuse_actors=True,
            trial_dirname_creator=_folder_name,
        )
        if "://" not in storage:  # run folders say what is finished, not an old experiment
            shutil.rmtree(Path(storage, name), ignore_errors=True)
        return tune.Tuner(
            trainable,
            tune_config=config,
            run_config=tune.RunConfig(
                name=name,
                storage_path=storage,
                callbacks=[Reports(str(schedule.experiment.folder))],
                verbose=0,
                # Lost machines. Failures of a run itself are dealt with in execute().
                failure_config=tune.FailureConfig(max_failures=self.retries + _LOSSES),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
            ),
        )

    def _restored(self, trainable: Any, path: str, link: _Link) -> tune.Tuner | None:
        """Tune's own state of an interrupted sweep, if it has runs that are not done."""
        try:
            if not tune.Tuner.can_restore(path):
                return None
            tuner = tune.Tuner.restore(path, trainable, resume_errored=True)
            every = [run_of(each.config) for each in tune.ExperimentAnalysis(path).trials or []]
        except Exception:  # a state that was cut short: the run folders have all that matters
            return None
        wanted = {str(run.home) for run in stages.known(link.schedule.experiment)}
        left = [run for run in every if not runs.done(run)]
        if not left or not {str(run.home) for run in left} <= wanted:
            return None
        for run in left:
            link.schedule.hold(run)
        return tuner


def why_no_connection(address: str | None, error: Exception) -> str:
    """Why Ray could not be reached or started, in one line."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    said = " ".join(str(error).split())
    tokens = [
        each
        for each in chain
        if isinstance(each, ray.exceptions.AuthenticationError) or "token" in str(each).lower()
    ]
    if tokens:
        text = " ".join(str(tokens[0]).split())[:160]
        return (
            f"--address {address}: the Ray cluster wants a token: set RAY_AUTH_MODE=token and "
            f"RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH ({text})"
        )
    if isinstance(error, ConnectionError) and address:
        token = "a cluster with token authentication needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        there = "something answers there, but refuses us" if _answers(address) else "no Ray cluster"
        return f"--address {address}: {there}; {token} ({said[:160]})"
    return f"Ray does not start: {said[:240]}"


def _answers(address: str) -> bool:
    """Whether a server listens at host:port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            return True
    except (OSError, ValueError):
        return False


def _folder_name(trial: Any) -> str:
    """The folder of a trial in Tune's storage: that of its run, and the head."""
    return f"{run_of(trial.config).name.replace(' ', '-')}-{trial.trial_id}"


class _Link:
    """What Tune's copies of the searcher and the callback stand for in this process."""

    def __init__(
        self,
        schedule: Schedule,
        progress: Progress,
        retries: int,
        environments: dict[str, dict[str, str]],
    ) -> None:
        self.schedule, self.progress = schedule, progress
        self.retries, self.environments = retries, environments
        self.error: ValueError | None = None

    def suggest(self) -> Any:
        """The next trial; None if there is none at present."""
        if self.error is not None:
            return Searcher.FINISHED
        try:
            run = self.schedule.take()
        except ValueError as error:
            self.error = error
            return Searcher.FINISHED
        if run is None:
            return Searcher.FINISHED if self.schedule.finished else None
        self.progress.started(run)
        experiment = self.schedule.experiment
        search = experiment.search
        return config_of(
            run,
            metric=search.metric if search else next(iter(experiment.curves), ""),
            retries=self.retries,
            environments=self.environments,
            searches=stages.is_search(experiment, run),
        )

    def ended(self, run: Run, result: dict[str, Any]) -> None:
        """A trial has ended: with its run, or because ASHA stopped it."""
        outcome = result.get("outcome", "stopped")
        if not runs.done(run):  # the folder is on another machine
            self._bring(run, outcome, result)
        try:
            self.progress.ended(run, outcome)
        except ValueError as error:
            self.error = error

    def _bring(self, run: Run, outcome: str, result: dict[str, Any]) -> None:
        search = self.schedule.experiment.search
        if outcome == "finished":
            path = run.home / "version_0" / "metrics.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result["numbers"], indent=1) + "\n")
        elif outcome == "stopped" and search is not None:
            value = float(result.get(search.metric, math.nan))
            runs.record_stop(run, "asha", **{search.metric: value})
        else:
            runs.record_failure(run, 1, str(result.get("line", "no reason given")))

    def lost(self, run: Run, reason: str) -> None:
        """A trial could not be brought to its end by Ray."""
        runs.record_failure(run, self.retries + 1 + _LOSSES, reason)
        self.progress.ended(run, "failed")

    def scheduler(self) -> AshaPerCell | None:
        """ASHA in the search where the plan says so; None for a scheduler that stops nothing."""
        search = self.schedule.experiment.search
        if (
            search is None
            or search.early_stop is None
            or not stages.searched(self.schedule.experiment)
        ):
            return None
        return AshaPerCell(search.metric, "max" if search.better == "higher" else "min")


class ScheduleSearcher(Searcher):
    """Tune's name for the schedule of a table; its state is in the run folders."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def suggest(self, trial_id: str) -> Any:
        """The next run."""
        return _LINKS[self.folder].suggest()

    def set_search_properties(self, *_: Any, **__: Any) -> bool:
        """The plan has said all."""
        return True

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """The callback tells it."""

    def save(self, checkpoint_path: str) -> None:
        """Write a file, because Tune moves it."""
        Path(checkpoint_path).write_text("")

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to do."""


class Reports(tune.Callback):
    """Tells how trials end."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Let the live table be drawn."""
        _LINKS[self.folder].progress.look()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has ended."""
        _LINKS[self.folder].ended(run_of(trial.config), trial.last_result)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial was given up by Tune."""
        reason = f"Ray gave it up after {trial.num_failures} losses"
        _LINKS[self.folder].lost(run_of(trial.config), reason)
