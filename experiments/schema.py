"""The keys of a plan as typed dataclasses, and errors of one line for files that do not fit them.

A plan is a YAML file with these keys:

    base         another plan, over which this one is laid as a scale is (see below): the name of
                 one in experiments/plans, or a file beside this one
    title        one line
    model        the --model of train.py
    program      instead of a model: a script, or "-m module", and its first words. It takes the
                 options and --default_root_dir, and writes metrics.json there. A script is looked
                 for beside the plan, then in the checkout
    import       modules that train.py imports first, for heads and models of one's own. They are
                 found where the sweep is started, or installed
    options      options of every run
    grid         option: values. Every combination is a cell of the table. Options that go together
                 share a key: "num_latents num_categories: [[10, 8], [20, 16]]"
    names        option: short name, for folders and columns
    seeds        one run each, with the settings selected for the cell; [null] for what has none
    search       how these settings are selected; null if there are none
        metric, better   the number of metrics.json to select by, no test metric; "lower" or
                         "higher"
        seed             of the runs of the search
        options          options of the search alone, such as fewer steps
        option, coarse, factors   first stage: the option and its values; second stage: the best
                         of them times these factors, by which the grid is refined
        space, trials, top   instead of these: option: {low, high, step, log}, drawn by TPE; the
                         number of trials; how many of the best go on to all seeds
        fixed            instead of searching: option: value, or option: {head: value}
        confirm          true: a value of the option whose runs with all seeds end worse on average
                         than its run of the search gives way to the next best, and if all do, the
                         one whose runs end best is taken. For searches with fewer steps, which
                         do not see that a learning rate diverges later
        early_stop       asha: Ray stops runs of the search that are worse than most at their step
    metrics      key of metrics.json: {label, better, digits, paper}, where paper is the key in
                 the paper's row ("" for the row itself), or "<key> - optimal" for a difference;
                 without better it is only shown
    columns      options across in the paper's layout, if it has one; the others go down
    curves       tags of the event files worth keeping
    paper        {table: key of paper.json, keys: {option: name, or {name, values}}}
    differences  sentences: how this is not what the paper did
    scales       smoke, small and paper, or names of one's own: any of the above. Mappings are
                 merged, and everything else replaced, except for differences, which are added; a
                 null takes away (first in a list of differences: those of the base). A plan
                 without scales has one, called full
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from catnat.checks import did_you_mean

Options = dict[str, Any]
Better = Literal["lower", "higher"]
T = TypeVar("T")


class PlanError(ValueError):
    """A plan is wrong; the message is one line."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))


@dataclass(frozen=True, kw_only=True)
class Space:
    """The values TPE may draw for an option."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether whole numbers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def size(self) -> float:
        """How many different values there are."""
        step = self.step or (1 if self.whole else 0)
        return (self.high - self.low) // step + 1 if step else float("inf")


@dataclass(frozen=True, kw_only=True)
class Search:
    """How settings are selected."""

    metric: str = ""
    better: Better | None = None
    seed: int | None = None
    options: Options = field(default_factory=dict)
    option: str = ""
    coarse: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    space: dict[str, Space] = field(default_factory=dict)
    trials: int = 0
    top: int = 1
    fixed: Options = field(default_factory=dict)
    confirm: bool = False
    early_stop: Literal["asha"] | None = None


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number of metrics.json as a column; without a label its name stands there."""

    label: str = ""
    better: Better | None = None
    digits: int = 3
    paper: str | None = None


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where the paper's numbers are."""

    table: str
    keys: Options = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The content of a file at one scale."""

    title: str
    seeds: list[int | None]
    grid: dict[str, list[Any]] = field(default_factory=dict)
    model: str = ""
    program: str = ""
    imports: list[str] = field(default_factory=list, metadata={"key": "import"})
    options: Options = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    search: Search | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    curves: list[str] = field(default_factory=list)
    paper: Paper | None = None
    differences: list[str] = field(default_factory=list)


def build(kind: type[T], content: Any, where: str = "") -> T:
    """A dataclass from a mapping; unknown keys, missing ones and wrong values raise PlanError."""
    if not isinstance(content, Mapping):
        raise PlanError(f"{where or 'the file'}: expected keys and values, got {content!r}")
    hints = get_type_hints(kind)
    names = {each.metadata.get("key", each.name): each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in names:
            raise PlanError(f"{_join(where, key)}: unknown key; {choices(str(key), names)}")
        if value is not None:
            name = names[key].name
            values[name] = _read(hints[name], value, _join(where, key))
    for key, each in names.items():
        no_default = each.default is each.default_factory is dataclasses.MISSING
        if no_default and each.name not in values:
            raise PlanError(f"{_join(where, key)}: missing")
    return kind(**values)


def choices(value: str, known: Collection[str]) -> str:
    """What there is to choose from, and the nearest."""
    listed = [str(each) for each in known]
    return f"choose from {', '.join(listed) or 'nothing'}{did_you_mean(value, listed)}"


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of a kind, or PlanError."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (rest,) = [each for each in inner if each is not type(None)]
        return _read(rest, value, where)
    if origin is Literal:
        if value not in inner:
            raise PlanError(f"{where}: {value!r}; {choices(str(value), inner)}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise PlanError(f"{where}: expected a list, got {value!r}")
        return [_read(inner[0], each, f"{where}[{i}]") for i, each in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise PlanError(f"{where}: expected keys and values, got {value!r}")
        return {str(k): _read(inner[1], each, _join(where, k)) for k, each in value.items()}
    if dataclasses.is_dataclass(kind):
        return build(kind, value, where)  # type: ignore[arg-type]
    return _scalar(kind, value, where)


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, str):  # YAML takes 1e-4 for text
        try:
            return float(value)
        except ValueError:
            pass
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise PlanError(f"{where}: expected {_WORDS[kind]}, got {value!r}")
    return value
