"""Running commands on Ray Tune: this machine, or a cluster whose machines share the run folders.

Which runs are finished is read from their folders, as with every other engine, so nothing of Ray's
own state is needed to go on after an interruption.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments import runs
from experiments.engines.local import Progress, execute, sigterm_interrupts
from experiments.plan import ROOT, Experiment, Options, Run
from experiments.stages import open_trial, trial_run, trials

os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # it would wait for the runs to end

try:
    import optuna
    import ray
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch
except ImportError as error:
    raise ValueError(
        f"--engine ray needs Ray Tune and Optuna ({error}): pip install 'catnat[sweep]'"
    ) from error


@dataclass(frozen=True)
class Cluster:
    """Where to run, and with how much.

    Args:
        address: of a running cluster, "auto" for the one this machine belongs to; None starts Ray
            here.
        jobs: runs side by side; 0 for as many as there is room for.
        gpus_per_run: share of a GPU a run takes.
        retries: of a run that fails.
    """

    address: str | None = None
    jobs: int = 0
    gpus_per_run: float = 0.0
    retries: int = 1

    def start(self) -> None:
        """Connect, or start."""
        logging.getLogger("ray.tune").setLevel(logging.ERROR)  # misses files we do not need
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if ray.is_initialized():
            return
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        here: dict[str, Any] = {"num_cpus": self.jobs or None, "include_dashboard": False}
        try:
            ray.init(
                address=self.address,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if self.address else here),
            )
        except ConnectionError as error:
            raise ValueError(f"--address {self.address}: there is no Ray cluster") from error

    def tune(self, trainable: Any, folder: Any, name: str, progress: Any, **options: Any) -> None:
        """Run Tune until every sample has ended."""
        resources = {"cpu": 1, "gpu": self.gpus_per_run}
        config = tune.TuneConfig(
            max_concurrent_trials=self.jobs or None, reuse_actors=True, **options.pop("config")
        )
        tuner = tune.Tuner(
            tune.with_resources(trainable, resources),
            tune_config=config,
            run_config=tune.RunConfig(
                name=name,
                storage_path=str(folder / ".ray"),
                callbacks=[progress],
                verbose=0,
                # A machine that is lost; failures of the run itself are dealt with in execute().
                failure_config=tune.FailureConfig(max_failures=self.retries),
            ),
            **options,
        )
        with sigterm_interrupts():
            tuner.fit()


def run_ray(experiment: Experiment, pending: list[Run], cluster: Cluster, told: Progress) -> None:
    """Run commands that do not depend on each other."""
    cluster.start()
    cluster.tune(
        partial(_try_run, pending=pending, retries=cluster.retries),
        experiment.folder,
        "runs",
        _Lines(told, pending),
        param_space={"index": tune.grid_search(list(range(len(pending))))},
        config={},
    )


def search_ray(
    experiment: Experiment, cell: Options, number: int, cluster: Cluster, told: Progress
) -> None:
    """Draw so many settings of a cell with TPE, each from what is known by then, and try them."""
    cluster.start()
    search = experiment.search or {}
    metric, better = search["metric"], search["better"]
    known = [(run.settings, runs.metrics(run)) for run in trials(experiment, cell)]
    scored = [(settings, _value(search, found)) for settings, found in known if found]
    searcher = OptunaSearch(
        space={name: _distribution(**limits) for name, limits in search["space"].items()},
        metric=metric,
        mode="max" if better == "higher" else "min",
        points_to_evaluate=[settings for settings, _ in scored] or None,
        evaluated_rewards=[value for _, value in scored] or None,
        # After an interruption the draws must not begin again with the first.
        sampler=optuna.samplers.TPESampler(seed=len(known), constant_liar=True),
    )
    cluster.tune(
        partial(_try_settings, experiment=experiment, cell=cell, retries=cluster.retries),
        experiment.folder,
        "search",
        _Lines(told, [], experiment, cell),
        config={"search_alg": searcher, "num_samples": number},
    )


def _distribution(
    low: float, high: float, step: float | None = None, log: bool = False
) -> optuna.distributions.BaseDistribution:
    if isinstance(low, int) and isinstance(high, int):
        return optuna.distributions.IntDistribution(low, high, log=log, step=int(step or 1))
    return optuna.distributions.FloatDistribution(low, high, log=log, step=step)


def _try_run(config: Options, pending: list[Run], retries: int) -> None:
    run = pending[config["index"]]
    tune.report({"outcome": execute(run, retries)})


def _try_settings(config: Options, experiment: Experiment, cell: Options, retries: int) -> None:
    run = open_trial(experiment, cell, dict(config))
    outcome = execute(run, retries)
    search = experiment.search or {}
    tune.report({"outcome": outcome, search["metric"]: _value(search, runs.metrics(run) or {})})


def _value(search: Options, found: dict[str, float]) -> float:
    """What a trial is worth; the worst if it has no such number: TPE goes by the order alone."""
    value = float(found.get(search["metric"], math.nan))
    if math.isfinite(value):
        return value
    return -1e30 if search["better"] == "higher" else 1e30


class _Lines(tune.Callback):
    """Tells the progress line of each run that ends."""

    def __init__(
        self,
        told: Progress,
        pending: list[Run],
        experiment: Experiment | None = None,
        cell: Options | None = None,
    ) -> None:
        self.told, self.pending, self.experiment, self.cell = told, pending, experiment, cell

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if self.experiment is None or self.cell is None:
            run = self.pending[trial.config["index"]]
        else:
            run = trial_run(self.experiment, self.cell, dict(trial.config))
        self.told.tell(run, result["outcome"])
