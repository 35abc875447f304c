"""What a table consists of: ``experiments/<name>.yaml``, read and turned into runs.

A file has these keys:

    base         another file, over which this one is laid as a scale is (see below)
    title        one line
    model        the --model of train.py; a figure has instead:
    program      a script and its first words, which takes the options and --default_root_dir
    options      options of every run
    grid         option: values. Every combination is a cell of the table. Options that go together
                 share a key: "num_latents num_categories: [[10, 8], [20, 16]]"
    names        option: short name, for folders and columns
    seeds        one run each, with the settings selected for the cell; [null] for what has none
    search       how these settings are selected; null if there are none
        metric, better   what of metrics.json to select by, "lower" or "higher"; no test metric
        seed             of the runs of the search
        options          options of the search alone, such as fewer steps
        option, coarse, factors   first stage: the option and its values; second stage: the best
                         of them times these factors, by which the grid is refined
        space, trials, top   instead of these: option: {low, high, step, log}, drawn by TPE; so
                         many trials; so many of the best go on to all seeds
        fixed            instead of searching: option: value, or option: {head: value}
    metrics      key of metrics.json: {label, better, digits, paper}, where paper is the key in
                 the paper's row ("" for the row itself), or "<key> - optimal" for a difference;
                 without better it is only shown
    columns      options across in the paper's layout, if it has one; the others go down
    curves       tags of the event files worth keeping
    paper        {table: key of paper.json, keys: {option: name, or {name, values}}}
    differences  sentences: how this is not what the paper did
    scales       smoke, small and paper: any of the above. Mappings are merged, and everything else
                 replaced, except for differences, which are added; a null takes away (first in
                 a list of differences: those of the base)
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PLANS = HERE / "plans"
SCALES = ("smoke", "small", "paper")
Options = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One command.

    Attributes:
        cell: the values of the grid.
        settings: what was searched for, such as the learning rate.
        seed: of weights and noise, if there are any.
        folder: the run's --default_root_dir.
        home: where its version_<k> will lie.
        command: the words, without --ckpt_path.
    """

    cell: Options
    settings: Options
    seed: int | None
    folder: Path
    home: Path
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """What one calls it in a line of text."""
        return " ".join([self.folder.name, *self.home.relative_to(self.folder).parts[1:]])


@dataclass(frozen=True)
class Experiment:
    """A table at one scale, and where its runs lie."""

    name: str
    scale: str
    title: str
    grid: dict[str, list[Any]]
    seeds: list[int | None]
    model: str = ""
    program: str = ""
    options: Options = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    search: Options | None = None
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    curves: list[str] = field(default_factory=list)
    paper: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    runs: Path = Path("runs")
    only: dict[str, list[str]] = field(default_factory=dict)
    extra: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the runs of this table at this scale lie."""
        return self.runs / self.name / self.scale

    def cells(self) -> list[Options]:
        """All combinations of the grid that were asked for."""
        return [cell for cell in _combinations(self.grid) if self._wanted(cell)]

    def short(self, option: str) -> str:
        """The name of an option in folders and columns."""
        return self.names.get(option, option)

    def run(
        self, cell: Options, settings: Options, seed: int | None, name: str = "", **options: Any
    ) -> Run:
        """The run of a cell with these settings; options win over the table's."""
        seeded = {} if seed is None else {"seed": seed}
        named = cell if name.startswith("trial") else cell | settings  # such a name says them
        parts = [*self._parts(named), name, *self._parts(seeded)]
        folder = self.folder / "-".join(filter(None, parts))
        places = [self.model, str(cell["head"])] if self.model else []
        every = self.options | cell | settings | options | seeded
        return Run(
            cell, settings, seed, folder, folder.joinpath(*places), self._command(every, folder)
        )

    def _parts(self, options: Options) -> Iterator[str]:
        for option, value in options.items():
            if option != "head" or not self.model:  # train.py makes a folder of the head
                yield value if isinstance(value, str) else f"{self.short(option)}{value:.6g}"

    def _command(self, options: Options, folder: Path) -> tuple[str, ...]:
        script, *words = (self.program or "train.py").split()
        first = {"model": self.model} if self.model else {}
        every = first | options | {"default_root_dir": folder}
        pairs = [f"--{option}={_text(value)}" for option, value in every.items()]
        return (sys.executable, str(ROOT / script), *words, *pairs, *self.extra)

    def _wanted(self, cell: Options) -> bool:
        return all(str(cell[option]) in values for option, values in self.only.items())


def names() -> list[str]:
    """All experiments there are."""
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


def load(name: str, scale: str, runs: Path = Path("runs"), **options: Any) -> Experiment:
    """An experiment at a scale; a ``ValueError`` of one line says what is wrong with it."""
    path = Path(name) if name.endswith(".yaml") else PLANS / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"there is no experiment {name!r}; choose from {', '.join(names())}")
    content = _read(path)
    scales = content.pop("scales", {})
    if scale not in scales:
        raise ValueError(f"{path.name} has no scale {scale!r}; choose from {', '.join(scales)}")
    content = _laid_over(content, scales[scale])
    runs = runs.resolve()  # processes elsewhere work in folders of their own
    try:
        found = Experiment(name=path.stem, scale=scale, runs=runs, **content, **options)
    except TypeError as error:
        raise ValueError(f"{path.name}, scale {scale}: {error}") from error
    return _checked(found, path.name)


def _read(path: Path) -> dict[str, Any]:
    content = dict(yaml.safe_load(path.read_text()))
    base = content.pop("base", None)
    if base is None:
        return content
    below = _read(path.with_name(f"{base}.yaml"))
    scales, above = below.get("scales", {}), content.get("scales", {})
    both = {name: _laid_over(each, above.get(name, {})) for name, each in scales.items()}
    return _laid_over(below, content) | {"scales": both}


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merged, with the differences of both, or of the upper one alone if it begins with null."""
    differences = [*below.get("differences", []), *above.get("differences", [])]
    if None in differences:
        differences = differences[differences.index(None) + 1 :]
    return merged(below, above) | {"differences": differences}


def _checked(experiment: Experiment, file: str) -> Experiment:
    search = experiment.search or {}
    if not (experiment.model or experiment.program):
        raise ValueError(f"{file} names neither a model nor a program")
    if search and not search.get("fixed"):
        if str(search.get("metric", "test/")).startswith("test/"):
            raise ValueError(f"{file}: search.metric must be there, and no test metric")
        if ("coarse" in search) == ("space" in search):
            raise ValueError(f"{file}: search needs either coarse, space or fixed")
        if search["seed"] in experiment.seeds:  # the winner of a search is no fair sample
            raise ValueError(f"{file}: search.seed {search['seed']} must not be one of the seeds")
    known = {option for key in experiment.grid for option in key.split()}
    if unknown := set(experiment.only) - known:
        listed = ", ".join(sorted(known))
        raise ValueError(f"{file} has no {', '.join(unknown)} in its grid; choose from {listed}")
    if not experiment.cells():
        raise ValueError(f"{file}: no cell of scale {experiment.scale} has {experiment.only}")
    return experiment


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings laid over each other, at every depth; None takes away."""
    result = dict(copy.deepcopy(below))
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


def _combinations(grid: dict[str, list[Any]]) -> Iterator[Options]:
    keys = [key.split() for key in grid]
    for values in itertools.product(*grid.values()):
        cell: Options = {}
        for names_, value in zip(keys, values, strict=True):
            cell |= zip(names_, value if len(names_) > 1 else [value], strict=True)
        yield cell


def _text(value: Any) -> str:
    """A value as train.py reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
