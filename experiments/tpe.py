"""Draws of settings by TPE (Optuna), from the trials on disk: the same for every engine."""

from __future__ import annotations

import math
from typing import Any

from experiments import runs, stages
from experiments.plan import Experiment, Run
from experiments.schema import Options, Search, Space

_REDRAWS = 1000


def draw(experiment: Experiment, cell: Options) -> Run:
    """Draw settings for a cell that were not yet tried, and write them down.

    Trials that still run count as bad ones, so that those beside them look elsewhere.
    """
    optuna = _optuna()
    search = experiment.search
    assert search is not None
    before = stages.trials(experiment, cell)
    space = {name: _distribution(each) for name, each in search.space.items()}
    past = [_trial(run, search, space) for run in before]
    tried = [run.settings for run in before]
    for redraw in range(_REDRAWS):
        seed = len(before) + redraw * 1000  # after an interruption draws must not begin again
        sampler: Any = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        if redraw:  # TPE insists on a point it knows
            sampler = optuna.samplers.RandomSampler(seed=seed)
        direction = "maximize" if search.better == "higher" else "minimize"
        study = optuna.create_study(sampler=sampler, direction=direction)
        study.add_trials(past)
        settings = dict(study.ask(space).params)
        if settings not in tried:
            return stages.open_trial(experiment, cell, settings)
    raise ValueError(f"{experiment.name}: {_REDRAWS} draws gave no settings that are new")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ValueError(
            f"a search by TPE needs Optuna ({error}): pip install 'catnat[sweep]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(space: Space) -> Any:
    kinds = _optuna().distributions
    if space.whole:
        step = int(space.step or 1)
        return kinds.IntDistribution(space.low, space.high, log=space.log, step=step)
    return kinds.FloatDistribution(space.low, space.high, log=space.log, step=space.step)


def _trial(run: Run, search: Search, space: Options) -> Any:
    """A trial of the past, as Optuna knows it."""
    optuna = _optuna()
    states = optuna.trial.TrialState
    if not runs.done(run):
        state, value = states.RUNNING, None
    else:
        numbers = runs.metrics(run) or runs.stopped(run) or {}
        state, value = states.COMPLETE, _worth(numbers.get(search.metric), search)
    return optuna.trial.create_trial(
        state=state, value=value, params=run.settings, distributions=space
    )


def _worth(value: Any, search: Search) -> float:
    """A number for TPE, which goes by the order alone; the worst for one that is not finite."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return -1e30 if search.better == "higher" else 1e30
