"""Searches of settings by Optuna's samplers: TPE, random draws, or a grid.

Every cell of a plan has an Optuna study. The studies of a plan share a journal file beside its
rows, so several processes and machines can search together. Rows hold the parameters of each trial:
without the journal, a study is made again from them.
"""

import ast
import json
import math
import operator
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import optuna
from filelock import FileLock
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

Options = dict[str, Any]  # values by names
Sampler = Literal["grid", "tpe", "random"]
_MOST_DUPLICATES = 1000  # draws in a row that a study already has


@dataclass
class Parameter:
    """A parameter of a search space: a range, or choices.

    Attributes:
        low: lower end of the range; an integer makes all values integers.
        high: upper end of the range, inclusive.
        step: distance between values.
        log: whether the logarithm of the value is drawn uniformly.
        choices: values, in place of a range.
        when: values of options or earlier parameters for which this one is drawn; a list has
            several values.
    """

    # A union of int and float may be read in either order, and 1 would become 1.0.
    low: Any = None
    high: Any = None
    step: Any = None
    log: bool = False
    choices: list[Any] = field(default_factory=list)
    when: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that this is a range or a list of choices, as Optuna takes it."""
        for name in ("low", "high", "step"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not is_number:
                raise ValueError(f"{name} must be a number, got {value!r}")
        has_range = self.low is not None and self.high is not None
        if has_range == bool(self.choices):
            raise ValueError(f"a parameter has either low and high or choices, got {self}")
        self.distribution()

    def distribution(self) -> BaseDistribution:
        """The parameter as Optuna's distribution."""
        if self.choices:
            return CategoricalDistribution(self.choices)
        low, high, step = self.low, self.high, self.step
        with warnings.catch_warnings(action="ignore"):  # the last step may end below high
            if isinstance(low, int) and isinstance(high, int) and isinstance(step or 1, int):
                return IntDistribution(low, high, self.log, int(step or 1))
            return FloatDistribution(low, high, self.log, step)

    def values(self) -> list[Any] | None:
        """All values; None for a range without steps."""
        distribution: Any = self.distribution()
        if self.choices:
            return self.choices
        if distribution.step is None:
            return None
        count = round((distribution.high - distribution.low) / distribution.step) + 1
        return [distribution.low + number * distribution.step for number in range(count)]

    def applies(self, options: Options) -> bool:
        """Whether the parameter is drawn beside these options."""
        for name, wanted in self.when.items():
            values = wanted if isinstance(wanted, list) else [wanted]
            if options.get(name) not in values:
                return False
        return True


@dataclass
class Space:
    """The parameters of a search, and the options that follow from them.

    Parameters whose names begin with _ are no options: only ``derived`` uses them.
    """

    parameters: Mapping[str, Parameter]
    derived: Mapping[str, str]

    @property
    def options(self) -> list[str]:
        """The options that a trial sets."""
        drawn = [name for name in self.parameters if not name.startswith("_")]
        return [*drawn, *self.derived]

    @property
    def size(self) -> float:
        """The number of settings, if no parameter depends on another."""
        sizes = [parameter.values() for parameter in self.parameters.values()]
        return math.prod(math.inf if values is None else len(values) for values in sizes)

    def draw(self, trial: optuna.trial.BaseTrial, options: Options) -> Options:
        """The parameters of a trial, beside the options of a cell."""
        drawn: Options = {}
        for name, parameter in self.parameters.items():
            if not parameter.applies(options | drawn):
                continue
            distribution = parameter.distribution()
            if isinstance(distribution, CategoricalDistribution):
                drawn[name] = trial.suggest_categorical(name, distribution.choices)
            elif isinstance(distribution, IntDistribution):
                drawn[name] = trial.suggest_int(
                    name,
                    distribution.low,
                    distribution.high,
                    step=distribution.step,
                    log=distribution.log,
                )
            elif isinstance(distribution, FloatDistribution):
                drawn[name] = trial.suggest_float(
                    name,
                    distribution.low,
                    distribution.high,
                    step=distribution.step,
                    log=distribution.log,
                )
        return drawn

    def example(self, options: Options, end: Literal["low", "high"]) -> Options:
        """The parameters at one end of their ranges."""
        drawn: Options = {}
        for name, parameter in self.parameters.items():
            if parameter.applies(options | drawn):
                ends = parameter.choices or [parameter.low, parameter.high]
                drawn[name] = ends[0 if end == "low" else -1]
        return drawn

    def settings(self, drawn: Options, options: Options) -> Options:
        """The options that the parameters of a trial set, beside the options of a cell."""
        settings = {}
        for name, value in drawn.items():
            if not name.startswith("_"):
                settings[name] = float(f"{value:.6g}") if isinstance(value, float) else value
        for name, formula in self.derived.items():
            try:
                settings[name] = evaluate(formula, {**options, **drawn, **settings})
            except (ArithmeticError, ValueError, SyntaxError, TypeError) as error:
                raise ValueError(f"search: derived {name}: {formula}: {error}") from None
        return settings


_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


def evaluate(formula: str, options: Options) -> Any:
    """The value of an arithmetic formula of options; nothing else is executed.

    >>> evaluate("n_steps * num_envs // _minibatches", dict(n_steps=64, num_envs=8, _minibatches=6))
    85
    """

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if isinstance(options.get(name), int | float):
                return options[name]
            case ast.Name(id=name):
                raise ValueError(f"{name} is not a number of the cell or the space")
            case ast.UnaryOp(op=op, operand=x) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(x))
            case ast.BinOp(op=op, left=x, right=y) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(x), value(y))
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=args, keywords=[]):
                return {"min": min, "max": max}[name](*map(value, args))
        raise ValueError("only numbers, names, + - * / // %, min and max are allowed")

    return value(ast.parse(formula, mode="eval").body)


# -- studies ---------------------------------------------------------------------------------------


def text_of_trial(drawn: Options) -> str:
    """The parameters of a trial as a text, for rows."""
    return json.dumps(drawn, sort_keys=True)


class SharedStudy:
    """The Optuna study of a cell, which several processes share.

    Args:
        journal: file of the studies of a plan.
        name: name of the cell.
        options: options of the cell.
        space: the search space.
        sampler: "tpe", "random" or "grid".
        trials: number of trials.
        better: whether "lower" or "higher" values of the metric are better.
    """

    def __init__(
        self,
        journal: Path,
        name: str,
        options: Options,
        space: Space,
        sampler: Sampler,
        trials: int,
        better: str,
    ) -> None:
        self.journal = journal
        self.options = options
        self.space = space
        self.sampler = sampler
        self.trials = trials
        self.direction: Literal["minimize", "maximize"] = "minimize"
        if better == "higher":
            self.direction = "maximize"
        self.name = f"{name} {space}"  # a space that was edited is another study
        self.is_done = False
        self._own: set[str] = set()  # trials that this process does

    def open_trials(
        self,
        finished: Iterable[tuple[Options, float]],
        wanted: int,
        is_abandoned: Callable[[Options], bool],
    ) -> list[Options]:
        """The parameters of the trials that this process does now.

        Args:
            finished: parameters and metrics of trials that have rows; NaN for one that failed.
            wanted: number of trials that this process does at a time.
            is_abandoned: whether no process does a trial that has begun.
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
            self.is_done = len(done) >= self.trials
            running = {
                text: trial.params
                for text, trial in begun.items()
                if trial.state == TrialState.RUNNING and text not in done
            }
            opened = [
                drawn for text, drawn in running.items() if text in self._own or is_abandoned(drawn)
            ]
            while len(opened) < wanted and len(done) + len(running) < self.trials:
                drawn = self._ask(study, done | running.keys())
                running[text_of_trial(drawn)] = drawn
                opened.append(drawn)
            self._own |= set(map(text_of_trial, opened))
            return opened

    def _load(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(self.journal)))
        return optuna.create_study(
            storage=storage, study_name=self.name, direction=self.direction, load_if_exists=True
        )

    def _tell(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial | None,
        drawn: Options,
        metric: float,
    ) -> None:
        """Give the study the metric of a trial, once."""
        has_failed = math.isnan(metric)
        state = TrialState.FAIL if has_failed else TrialState.COMPLETE
        value = None if has_failed else metric
        if trial is None:
            distributions = {name: self.space.parameters[name].distribution() for name in drawn}
            study.add_trial(
                optuna.trial.create_trial(
                    params=drawn, distributions=distributions, value=value, state=state
                )
            )
        elif not trial.state.is_finished():
            study.tell(trial.number, value, state=state)

    def _ask(self, study: optuna.Study, known: set[str]) -> Options:
        """A new trial; draws of settings that the study has are repeated at random."""
        for attempt in range(_MOST_DUPLICATES):
            number = len(study.get_trials(False))
            seed = zlib.crc32(f"{self.name} {number}".encode())  # the same history, the same draw
            study.sampler = self._make_sampler(seed, is_random=attempt > 0)
            trial = study.ask()
            drawn = self.space.draw(trial, self.options)
            if text_of_trial(drawn) not in known:
                return drawn
            study.sampler = optuna.samplers.RandomSampler()  # a grid that ends would stop its loop
            study.tell(trial, state=TrialState.FAIL)
        raise ValueError(f"search: the space has fewer settings than {self.trials} trials")

    def _make_sampler(self, seed: int, is_random: bool) -> optuna.samplers.BaseSampler:
        if self.sampler == "grid" and not is_random:
            values: Any = {name: x.values() for name, x in self.space.parameters.items()}
            # The seed orders the grid: it is that of all trials.
            return optuna.samplers.GridSampler(values, seed=zlib.crc32(self.name.encode()))
        if self.sampler == "random" or is_random:
            return optuna.samplers.RandomSampler(seed=seed)
        with warnings.catch_warnings(action="ignore"):  # constant_liar is experimental
            # Trials that run count as bad ones, so that trials side by side differ.
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
