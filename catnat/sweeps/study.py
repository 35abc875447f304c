"""Optuna's studies: which settings a cell tries next.

Every cell of a sampled search has a study. The studies of a plan share a journal file beside its
rows, so several processes and machines can search together. Rows hold the parameters of each trial:
without the journal, a study is made again from them.
"""

import math
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from catnat.cli.names import Options
from catnat.sweeps.search import Search, applies, distribution_of, text_of_trial

_MOST_DUPLICATES = 1000  # draws in a row that a study already has


class SharedStudy:
    """The Optuna study of a cell, which several processes share.

    Args:
        journal: file of the studies of a plan.
        cell: name of the cell.
        options: options of the cell and of the plan.
        search: the search of the plan.

    Attributes:
        is_done: whether all trials have rows.
    """

    def __init__(self, journal: Path, cell: str, options: Options, search: Search) -> None:
        self.journal = journal
        self.options = options
        self.search = search
        # A space that was edited is another study.
        self.name = f"{cell} {search.space} {search.derived}"
        self.is_done = False

    def open_trials(
        self,
        finished: Iterable[tuple[Options, float]],
        wanted: int,
        is_free: Callable[[Options], bool],
    ) -> list[Options]:
        """The parameters of the trials that this process does now.

        Args:
            finished: parameters and metrics of trials that have rows; NaN for one that failed.
            wanted: number of trials that this process does at a time.
            is_free: whether no other process does a trial that has begun.
        """
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.journal}.trials"):
            study = self._load()
            begun = {text_of_trial(trial.params): trial for trial in study.get_trials(False)}
            done = set()
            for drawn, metric in finished:
                text = text_of_trial(drawn)
                done.add(text)
                self._tell(study, begun.get(text), drawn, metric)
            self.is_done = len(done) >= self._trials
            running = {
                text: trial.params
                for text, trial in begun.items()
                if trial.state == TrialState.RUNNING and text not in done
            }
            opened = [drawn for drawn in running.values() if is_free(drawn)]
            while len(opened) < wanted and len(done) + len(running) < self._trials:
                drawn = self._ask(study, done | running.keys())
                running[text_of_trial(drawn)] = drawn
                opened.append(drawn)
            return opened

    @property
    def _trials(self) -> int:
        return self.search.trials or 0

    def _load(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(self.journal))),
            study_name=self.name,
            direction="maximize" if self.search.better == "higher" else "minimize",
            load_if_exists=True,
        )

    def _tell(
        self, study: optuna.Study, trial: FrozenTrial | None, drawn: Options, metric: float
    ) -> None:
        """Give the study the metric of a trial, once."""
        has_failed = math.isnan(metric)
        state = TrialState.FAIL if has_failed else TrialState.COMPLETE
        value = None if has_failed else metric
        if trial is None:
            space = {name: distribution_of(self.search.space[name]) for name in drawn}
            study.add_trial(
                optuna.trial.create_trial(
                    params=drawn, distributions=space, value=value, state=state
                )
            )
        elif not trial.state.is_finished():
            study.tell(trial.number, value, state=state)

    def _ask(self, study: optuna.Study, known: set[str]) -> Options:
        """A new trial; draws of settings that the study has are repeated at random."""
        for attempt in range(_MOST_DUPLICATES):
            number = len(study.get_trials(False))
            seed = zlib.crc32(f"{self.name} {number}".encode())  # the same history, the same draw
            if self.search.sampler == "random" or attempt:
                study.sampler = optuna.samplers.RandomSampler(seed=seed)
            else:
                with warnings.catch_warnings(action="ignore"):  # constant_liar is experimental
                    # Trials that run count as bad ones, so that trials side by side differ.
                    study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            trial = study.ask()
            drawn = self._draw(trial)
            if text_of_trial(drawn) not in known:
                return drawn
            study.tell(trial, state=TrialState.FAIL)
        raise ValueError(f"search: the space has fewer settings than {self._trials} trials")

    def _draw(self, trial: optuna.Trial) -> Options:
        drawn: Options = {}
        for name, parameter in self.search.space.items():
            if not applies(parameter, self.options | drawn):
                continue
            distribution: Any = distribution_of(parameter)
            if isinstance(distribution, CategoricalDistribution):
                drawn[name] = trial.suggest_categorical(name, distribution.choices)
            else:
                is_int = isinstance(distribution, IntDistribution)
                suggest = trial.suggest_int if is_int else trial.suggest_float
                low, high = distribution.low, distribution.high
                drawn[name] = suggest(name, low, high, step=distribution.step, log=distribution.log)
        return drawn
