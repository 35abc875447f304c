"""A plan: which runs a table consists of. Any YAML file.

A plan is read into :class:`Plan`, whose attributes are its keys. ``base`` names the file of a plan
that it changes, at the same scale (null takes a key away), ``scales`` has versions of it by name.
Files and folders in a plan are relative to the plan's own folder.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, get_loader

from catnat.checks import did_you_mean
from catnat.sweeps.runs import Rows, Run

Options = dict[str, Any]
Value = str | Any  # Any alone would read quoted text as YAML once more
Better = Literal["lower", "higher"] | None


@dataclass
class Metric:
    """A column of a table.

    Attributes:
        label: how the table calls it.
        better: which values are better; None for a column without a best.
        digits: behind the point.
        paper: the paper's key, "" for a table of one metric; None: the paper does not have it.
            "a - optimal" is a minus that of the row with head "optimal".
    """

    label: str = ""
    better: Better = None
    digits: int = 3
    paper: str | None = None


@dataclass
class Space:
    """Values from which a random search draws: uniform, in the logarithm, or by steps."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        """Refuse what nothing can be drawn from."""
        step = 1 if self.step is None else self.step
        if not self.low <= self.high < math.inf or (self.log and self.low <= 0) or step <= 0:
            raise ValueError(f"{self}: give low <= high, with log low > 0, and step > 0")

    def draw(self, noise: random.Random) -> float:
        """One of them; a whole number where low and step are."""
        if self.log:
            return float(f"{self.low * (self.high / self.low) ** noise.random():.4g}")
        if self.step is None:
            return float(f"{noise.uniform(self.low, self.high):.4g}")
        value = self.low + self.step * noise.randint(0, round((self.high - self.low) / self.step))
        return int(value) if float(value).is_integer() else float(f"{value:.6g}")


@dataclass
class Search:
    """How the settings of a cell are found: in a grid, at random, or given.

    Attributes:
        grid: as the plan's, with values for all heads or by head; all combinations are tried.
        factors: with a grid of one option, the best value is then multiplied by each of them.
        space: of a random search.
        trials: how many settings a random search tries.
        fixed: settings for all heads, or by head; nothing is searched then.
        metric: of the last validation; the mean over the seeds of the search decides.
        better: which values are better.
        seeds: of the search.
        options: that differ from those of the plan, such as fewer steps.
        top: how many settings go on to the final runs; of several, the one whose final runs have
            the best metric is in the table.
    """

    grid: dict[str, list[Value] | dict[str, list[Value]]] = field(default_factory=dict)
    factors: list[float] = field(default_factory=list)
    space: dict[str, Space] = field(default_factory=dict)
    trials: int = 0
    fixed: dict[str, Value] = field(default_factory=dict)
    metric: str = "val/loss"
    better: Literal["lower", "higher"] = "lower"
    seeds: list[int] = field(default_factory=lambda: [0])
    options: dict[str, Value] = field(default_factory=dict)
    top: int = 1


@dataclass
class Paper:
    """Published numbers, which are shown beside ours.

    Attributes:
        file: a JSON file of tables.
        table: its table for this plan.
        keys: its names for our options.
    """

    file: str
    table: str
    keys: dict[str, Any] = field(default_factory=dict)


@dataclass
class Plan:
    """What a table consists of.

    Attributes:
        title: of the table.
        study: the rows are in <results>/<study>/runs.csv.
        results: the folder of all studies; "" is the folder results in the working directory.
        path: folders of modules that ``model`` and the option ``import`` name. The plan's folder
            and the working directory are searched in any case.
        model: what ``train.py --model`` takes.
        program: instead of a model, a program that takes the options as ``--name=value`` and writes
            its numbers to metrics.json in the folder ``--default_root_dir``: a script, or "-m
            module".
        options: of all runs.
        grid: values of options; a cell is one combination of them. A key of several options has
            lists as values.
        search: of settings for each cell; None: a run has none but the cell's.
        seeds: of the final runs.
        metrics: columns of the table.
        columns: options of the grid that stand across in the first table.
        names: short names of options.
        paper: the paper's numbers.
        differences: from the paper, in words.
        formerly: names that the plan had when some of its rows were made.
        name: of the file.
        scale: of ``scales``.
    """

    title: str
    study: str
    metrics: dict[str, Metric]
    grid: dict[str, list[Value]]
    model: str = ""
    program: str = ""
    results: str = ""
    path: list[str] = field(default_factory=list)
    options: dict[str, Value] = field(default_factory=dict)
    search: Search | None = None
    seeds: list[int] = field(default_factory=lambda: [1])
    columns: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    paper: Paper | None = None
    differences: list[str] = field(default_factory=list)
    formerly: list[str] = field(default_factory=list)
    name: str = ""
    scale: str = ""

    def cells(self, only: Mapping[str, Iterable[str]] | None = None) -> list[Options]:
        """The combinations of the grid, or those with some values alone."""
        found = combinations(self.grid)
        wanted = {self.long(name): set(values) for name, values in (only or {}).items()}
        for name, values in wanted.items():
            seeds = self.seeds if name == "seed" else []
            known = {str(cell[name]) for cell in found if name in cell} | set(map(str, seeds))
            if not known or not values <= known:
                wrong = ", ".join(sorted(values - known)) if known else name
                text = choices(wrong, known or found[0])
                raise ValueError(f"--only {name}: unknown {wrong}; {text}")
        return [
            cell
            for cell in found
            if all(str(cell[name]) in values for name, values in wanted.items() if name in cell)
        ]

    @property
    def searched(self) -> list[str]:
        """The options that the search decides on."""
        search = self.search or Search()
        return list(search.fixed or search.space or " ".join(search.grid).split())

    def short(self, option: str) -> str:
        """The name of an option in tables."""
        return self.names.get(option, option)

    def long(self, name: str) -> str:
        """The option with a short name."""
        return next((option for option, short in self.names.items() if short == name), name)

    def run(self, cell: Options, settings: Options, seed: int, stage: str) -> Run:
        """A run of a cell with settings; the search has options of its own."""
        own = self.search.options if self.search and stage == "search" else {}
        what = {"program": self.program} if self.program else {"model": self.model}
        options = {**what, **self.options, **cell, **settings, **own, "seed": seed}
        return Run(options, self.name, stage, tuple(self.path))

    # -- the stages of a cell ------------------------------------------------------------------

    def tried(self, cell: Options, rows: Rows) -> list[Options]:
        """All settings of a cell's search that are known now; a refined grid follows the first."""
        search = self.search
        if search is None or search.fixed:
            return []
        found = self._first_settings(cell)
        if search.factors and (best := self._ranked(cell, found, rows)):
            ((option, center),) = best[0].items()
            found += [{option: float(f"{center * factor:.3g}")} for factor in search.factors]
        return [each for number, each in enumerate(found) if each not in found[:number]]

    def selected(self, cell: Options, rows: Rows) -> list[Options]:
        """The settings of a cell's final runs; none while its search is not done."""
        if self.search is None:
            return [{}]
        if self.search.fixed:
            return [self._of_head(cell, self.search.fixed)]
        return self._ranked(cell, self.tried(cell, rows), rows)[: self.search.top]

    def search_runs(self, cell: Options, rows: Rows) -> list[Run]:
        """The runs of a cell's search that are known now."""
        seeds = self.search.seeds if self.search else []
        tried = self.tried(cell, rows)
        return [self.run(cell, each, seed, "search") for each in tried for seed in seeds]

    def final_runs(self, cell: Options, rows: Rows) -> list[Run]:
        """The runs of all seeds with the settings selected."""
        return [
            self.run(cell, settings, seed, "final")
            for settings in self.selected(cell, rows)
            for seed in self.seeds
        ]

    def table_settings(self, cell: Options, rows: Rows) -> Options | None:
        """The settings in the table: of several selected ones, those whose final runs are best."""
        chosen = self.selected(cell, rows)
        if len(chosen) < 2:
            return chosen[0] if chosen else None
        complete = self._ranked(cell, chosen, rows, "final")
        return complete[0] if complete else chosen[0]

    def final_seeds(self, only: Mapping[str, Iterable[str]] | None = None) -> list[int]:
        """The seeds of final runs, or those asked for; settings are selected by all."""
        wanted = (only or {}).get("seed")
        return [seed for seed in self.seeds if wanted is None or str(seed) in wanted]

    def runs(self, rows: Rows, only: Mapping[str, Iterable[str]] | None = None) -> list[Run]:
        """All runs that are known now: searches first, low seeds before high ones."""
        cells = self.cells(only)
        searches = [run for cell in cells for run in self.search_runs(cell, rows)]
        finals = [run for cell in cells for run in self.final_runs(cell, rows)]
        finals = [run for run in finals if run.options["seed"] in self.final_seeds(only)]
        return searches + sorted(finals, key=lambda run: run.options["seed"])

    def _first_settings(self, cell: Options) -> list[Options]:
        assert self.search is not None
        if self.search.space:  # the same draws each time
            noise = random.Random(f"{self.study} {sorted(cell.items())}")
            return [
                {name: space.draw(noise) for name, space in self.search.space.items()}
                for _ in range(self.search.trials)
            ]
        return combinations(self._of_head(cell, self.search.grid))

    def _of_head(self, cell: Options, settings: Options) -> Options:
        """Settings that may be given by head, for the head of a cell."""
        head = (self.options | cell).get("head")
        return {name: x[head] if isinstance(x, dict) else x for name, x in settings.items()}

    def _ranked(
        self, cell: Options, tried: list[Options], rows: Rows, stage: str = "search"
    ) -> list[Options]:
        """Settings by the mean of the search's metric, best first; none while runs are missing.

        Settings with a run that failed, or whose metric is not finite, come last or not at all.
        In the final stage settings with missing runs are left out instead.
        """
        assert self.search is not None
        sign = -1 if self.search.better == "higher" else 1
        seeds = self.search.seeds if stage == "search" else self.seeds
        means: list[tuple[float, int]] = []
        for number, settings in enumerate(tried):
            found = [rows.find(self.run(cell, settings, seed, stage)) for seed in seeds]
            done = [each for each in found if each is not None]
            if len(done) < len(found):
                if stage == "search":
                    return []
                continue
            values = [each.metrics.get(self.search.metric, float("nan")) for each in done]
            mean = sign * statistics.fmean(values)
            if not math.isnan(mean):
                means.append((mean, number))
        return [tried[number] for _, number in sorted(means)]


def combinations(grid: Mapping[str, list[Any]]) -> list[Options]:
    """All of them; a key of several options has lists as values, with null for one not given."""
    found = []
    for values in itertools.product(*grid.values()):
        one: Options = {}
        for names, value in zip(map(str.split, grid), values, strict=True):
            if len(names) > 1 and not (isinstance(value, list) and len(value) == len(names)):
                raise ValueError(f"{' '.join(names)}: {value} is not a list of {len(names)} values")
            one |= zip(names, value if len(names) > 1 else [value], strict=True)
        found.append(one)
    return found


# -- reading ---------------------------------------------------------------------------------------


def scales(name: str) -> list[str]:
    """The scales of a plan."""
    return list(_read(find_file(name)).get("scales") or {"": {}})


def load(name: str, scale: str | None = None) -> Plan:
    """A plan by its file, at a scale (default: small, else its first).

    A ValueError says in one line what is wrong.
    """
    path = find_file(name)
    known = scales(name)
    scale = scale or ("small" if "small" in known else known[0])
    if scale not in known:
        raise ValueError(f"{path.name} has no scale {scale!r}; {choices(scale, known)}")
    content = _read(path, scale)
    content.pop("scales", None)
    try:
        plan = _parsed(content)
        plan.name, plan.scale = path.stem, scale
        plan.path.append(str(path.parent.resolve()))
        _check(plan)
    except (ValueError, ArgumentError) as error:
        raise ValueError(f"{path.name}, scale {scale}: {_one_line(error)}") from error
    return plan


def _parsed(content: Options) -> Plan:
    for kind, part in ((Plan, content), (Search, content.get("search"))):
        given = set(part) if isinstance(part, dict) else set()
        for key in map(str, given.difference(kind.__dataclass_fields__)):
            raise ValueError(f"there is no key {key}; {choices(key, kind.__dataclass_fields__)}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Plan, "plan")
    return parser.instantiate(parser.parse_object({"plan": content})).plan  # type: ignore[no-any-return]


def _check(plan: Plan) -> None:
    """What types cannot express."""
    options = [option for key in plan.grid for option in key.split()]
    search, searched = plan.search, plan.searched
    if bool(plan.model) == bool(plan.program):
        raise ValueError("give either model or program")
    for option in plan.columns:
        if option not in options:
            raise ValueError(f"columns: {option} is not in the grid; {choices(option, options)}")
    some = [("metrics", plan.metrics), ("seeds", plan.seeds), *plan.grid.items()]
    some += [("search: seeds", search.seeds), *search.grid.items()] if search else []
    for name, values in some:
        if not values:
            raise ValueError(f"{name}: give at least one")
    for option in {*plan.options, *options, *searched}:
        if option in ("seed", "default_root_dir", "ckpt_path"):
            raise ValueError(f"{option}: the sweep sets it; seeds has the seeds")
        if options.count(option) + searched.count(option) > 1:
            raise ValueError(f"{option} stands twice in the grid and the search")
    if len(set(plan.seeds)) < len(plan.seeds):
        raise ValueError(f"seeds: {plan.seeds} has one twice")
    if search and not (search.grid or (search.space and search.trials > 0) or search.fixed):
        raise ValueError("search: give a grid, a space with trials, or fixed settings")
    if search and search.factors and not search.fixed and len(searched) != 1:
        raise ValueError("search: factors refine a grid of one option")
    for cell in (cells := plan.cells()):
        if cells.count(cell) > 1:
            raise ValueError(f"grid: {cell} stands twice")
        head = (plan.options | cell).get("head")
        for name, value in ({**search.grid, **search.fixed} if search else {}).items():
            if isinstance(value, dict) and head not in value:
                raise ValueError(f"search: {name} has no value for head {head}")
        tried = [value for each in plan.tried(cell, Rows([])) for value in each.values()]
        if search and search.factors and not all(type(value) in (int, float) for value in tried):
            raise ValueError(f"search: factors refine numbers, not {tried}")


def find_file(name: str, folder: Path = Path()) -> Path:
    """The file of a plan: in a folder or its folder plans, with or without the ending .yaml."""
    places = [folder, folder / "plans"]
    for path in (place / f"{name}{ending}" for place in places for ending in ("", ".yaml")):
        if path.is_file():
            return path
    stems = sorted(path.stem for place in places for path in place.glob("*.yaml"))
    raise ValueError(f"there is no plan {name}; {choices(name, [*stems, 'a YAML file'])}")


def _read(path: Path, scale: str = "", above: tuple[Path, ...] = ()) -> Options:
    """A file at a scale, laid over its base at that scale."""
    try:
        content = get_loader("yaml")(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path.name} cannot be read as YAML: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name}: expected keys and values, got {content!r}")
    layers = content.get("scales") or {}
    if not isinstance(layers, dict) or any(not isinstance(x or {}, dict) for x in layers.values()):
        raise ValueError(f"{path.name}: scales must have names, and keys and values, got {layers}")
    for part in (content, *layers.values()):
        _resolve_files(part or {}, path.parent.resolve())
    base, layer = content.pop("base", None), layers.get(scale) or {}
    if base is None:
        return merged(content, layer)
    try:
        below = find_file(str(base), path.parent).resolve()
    except ValueError as error:
        raise ValueError(f"{path.name}, base: {error}") from error
    chain = (*above, path.resolve())
    if below in chain:
        raise ValueError(f"{path.name}: base {base} leads back to itself")
    return merged(merged(_read(below, scale, chain), content), layer)


def _resolve_files(content: Options, folder: Path) -> None:
    """Make files and folders that a plan names absolute."""
    if isinstance(content.get("path"), str):
        content["path"] = [content["path"]]
    if isinstance(content.get("path"), list):
        content["path"] = [str((folder / str(name)).resolve()) for name in content["path"]]
    paper = content.get("paper")
    for part, key in ((content, "results"), (paper if isinstance(paper, dict) else {}, "file")):
        if isinstance(part.get(key), str):
            part[key] = str((folder / part[key]).resolve())


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Options:
    """Mappings laid over each other at every depth; None takes a key away."""
    result = copy.deepcopy(dict(below))
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


def choices(value: str, known: Iterable[Any]) -> str:
    """What could have been meant."""
    names = [str(each) for each in known]
    return did_you_mean(value, names)[2:] or f"choices: {', '.join(names)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
