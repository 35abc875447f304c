"""The key ``search`` of a plan: which settings are tried, as a grid, by a sampler, or fixed."""

import ast
import itertools
import json
import math
import operator
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jsonargparse.typing import PositiveFloat, PositiveInt
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from catnat.cli.names import Options

Value = str | Any  # Any alone would read quoted text as YAML once more
Better = Literal["lower", "higher"]
Sampler = Literal["grid", "tpe", "random"]


@dataclass
class Search:
    """How the settings of a cell are found: in a grid, by a sampler of Optuna, or fixed.

    Attributes:
        grid: values of options for all heads, or by head; all combinations are tried.
        factors: with a grid of one option, the best value is then multiplied by each of them.
        space: parameters by name: a range such as ``{low: 1.0e-4, high: 0.1, log: true}`` or
            ``{low: 32, high: 512, step: 32}``, of integers if its ends are, or
            ``{choices: [8, 16]}``. One with ``when: {head: natural}`` is drawn only beside this
            value, or the values in a list, of an option or an earlier parameter. One whose name
            begins with _ is not an option; ``derived`` uses it.
        sampler: "tpe" or "random": how Optuna draws settings from ``space``; "grid": all settings.
        trials: number of settings that are drawn; a grid has all of its settings by default.
        derived: options that follow from others by a formula, such as
            ``batch_size: n_steps * num_envs // _minibatches``.
        parallel: largest number of trials of a cell that run at the same time.
        fixed: settings for all heads, or by head; nothing is searched then.
        metric: metric of the last validation; its mean over the seeds of the search decides.
        better: "lower" or "higher".
        seeds: seeds of the search.
        options: options of the search that differ from those of the plan, such as fewer steps.
        top: number of settings that get final runs; the table has the one whose final runs are
            best.
    """

    grid: dict[str, list[Value] | dict[str, list[Value]]] = field(default_factory=dict)
    factors: list[PositiveFloat] = field(default_factory=list)
    space: dict[str, dict[str, Value]] = field(default_factory=dict)
    sampler: Sampler = "grid"
    trials: PositiveInt | None = None
    derived: dict[str, str] = field(default_factory=dict)
    parallel: PositiveInt = 8
    fixed: dict[str, Value] = field(default_factory=dict)
    metric: str = "val/loss"
    better: Better = "lower"
    seeds: list[int] = field(default_factory=lambda: [0])
    options: dict[str, Value] = field(default_factory=dict)
    top: PositiveInt = 1

    def __post_init__(self) -> None:
        """Leave out what is not searched, and check the number of trials."""
        if self.fixed:
            self.grid = {}
            self.space = {}
        if not self.space:
            if self.sampler != "grid" or self.trials or self.derived:
                raise ValueError("search: sampler, trials and derived need a space")
            return
        if self.grid or self.factors:
            raise ValueError("search: a space has no grid and no factors beside it")
        size = math.prod(len(values_of(x)) or math.inf for x in self.space.values())
        if self.sampler == "grid":
            if size == math.inf or any("when" in parameter for parameter in self.space.values()):
                raise ValueError("search: a grid needs choices or steps, and no when")
            self.trials = self.trials or int(size)
        if self.trials is None:
            raise ValueError(f"search: sampler {self.sampler} needs a number of trials")
        if self.trials > size:
            raise ValueError(f"search: {self.trials} trials, but the space has {size} settings")

    @property
    def is_search(self) -> bool:
        """Whether settings are searched."""
        return bool(self.grid or self.space)

    @property
    def is_sampled(self) -> bool:
        """Whether Optuna draws the settings."""
        return bool(self.space) and self.sampler != "grid"

    def given(self, options: Options) -> list[Options]:
        """The settings that are tried in a cell whatever the results: fixed ones or a grid.

        Args:
            options: options of the cell and of the plan.
        """
        if self.fixed:
            return [_of_head(self.fixed, options)]
        if not self.space:
            return combinations(_of_head(self.grid, options)) if self.grid else [{}]
        if self.is_sampled:
            return []
        grid = combinations({name: values_of(x) for name, x in self.space.items()})
        drawn = random.Random(0).sample(grid, self.trials or len(grid))
        return [self.settings(each, options) for each in drawn]

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

    def example(self, options: Options, end: Literal["low", "high"]) -> Options:
        """The parameters of the space at one end of their ranges, beside the options of a cell."""
        drawn: Options = {}
        for name, parameter in self.space.items():
            if applies(parameter, options | drawn):
                choices = parameter.get("choices") or [parameter["low"], parameter["high"]]
                drawn[name] = choices[0 if end == "low" else -1]
        return drawn


def distribution_of(parameter: Options) -> BaseDistribution:
    """A parameter as Optuna's distribution."""
    arguments = dict(parameter)
    if not isinstance(arguments.pop("when", {}), dict):
        raise ValueError(f"when needs names and values, got {parameter}")
    numbers = [value for name, value in arguments.items() if name in ("low", "high", "step")]
    kind: Callable[..., BaseDistribution] = FloatDistribution
    if "choices" in arguments:
        kind = CategoricalDistribution
    elif all(isinstance(number, int) for number in numbers):
        kind = IntDistribution
    try:
        with warnings.catch_warnings(action="ignore"):  # the last step may end below high
            return kind(**arguments)
    except TypeError:
        raise ValueError(
            f"a parameter has either low and high or choices, got {parameter}"
        ) from None


def values_of(parameter: Options) -> list[Any]:
    """All values of a parameter; an empty list for a range without steps."""
    distribution: Any = distribution_of(parameter)
    if "choices" in parameter:
        return list(distribution.choices)
    if distribution.step is None:
        return []
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    return [distribution.low + number * distribution.step for number in range(count)]


def applies(parameter: Options, options: Options) -> bool:
    """Whether a parameter is drawn beside these options."""
    return all(
        options.get(name) in (wanted if isinstance(wanted, list) else [wanted])
        for name, wanted in parameter.get("when", {}).items()
    )


def text_of_trial(drawn: Options) -> str:
    """The parameters of a trial as a text, for rows."""
    return json.dumps(drawn, sort_keys=True)


def combinations(grid: Mapping[str, list[Any]]) -> list[Options]:
    """All of them; a key of several options has lists as values, with null for one not given.

    >>> combinations({"a b": [[1, 2], [3, None]], "c": [4]})
    [{'a': 1, 'b': 2, 'c': 4}, {'a': 3, 'b': None, 'c': 4}]
    """
    result = []
    for values in itertools.product(*grid.values()):
        options: Options = {}
        for key, value in zip(grid, values, strict=True):
            names = key.split()
            parts = [value] if len(names) == 1 else value
            if not isinstance(parts, list) or len(parts) != len(names):
                raise ValueError(f"{key}: {value} is not a list of {len(names)} values")
            options |= zip(names, parts, strict=True)
        result.append(options)
    return result


def _of_head(settings: Options, options: Options) -> Options:
    """Settings that may be given by head, for the head of a cell."""
    head = options.get("head")
    of_head = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            if head not in value:
                raise ValueError(f"search: {name} has no value for head {head}")
            value = value[head]
        of_head[name] = value
    return of_head


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
