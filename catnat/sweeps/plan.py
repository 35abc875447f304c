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
import re
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
Only = Mapping[str, list[str]]  # wanted values of options, and of "seed"
Value = str | Any  # Any alone would read quoted text as YAML once more
Better = Literal["lower", "higher"] | None


@dataclass
class Metric:
    """A column of a table.

    Attributes:
        label: its name in the table.
        better: which values are better; None for a column without a best.
        digits: after the decimal point.
        paper: the paper's key, "" for a table of one metric; None: the paper does not have it.
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
        """Refuse a space that is empty."""
        step = 1 if self.step is None else self.step
        if not self.low <= self.high < math.inf or (self.log and self.low <= 0) or step <= 0:
            raise ValueError(f"{self}: give low <= high, with log low > 0, and step > 0")

    def draw(self, rng: random.Random) -> float:
        """A random value; a whole number where low and step are."""
        if self.log:
            return float(f"{self.low * (self.high / self.low) ** rng.random():.4g}")
        if self.step is None:
            return float(f"{rng.uniform(self.low, self.high):.4g}")
        value = self.low + self.step * rng.randint(0, round((self.high - self.low) / self.step))
        return int(value) if float(value).is_integer() else float(f"{value:.6g}")


@dataclass
class Search:
    """How the settings of a cell are found: in a grid, at random, or fixed.

    Attributes:
        grid: as the plan's, with values for all heads or by head; all combinations are tried.
        factors: with a grid of one option, the best value is then multiplied by each of them.
        space: of a random search, by option.
        trials: the number of settings that a random search tries.
        fixed: settings for all heads, or by head; nothing is searched then.
        metric: of the last validation; the mean over the seeds of the search decides.
        better: which values are better.
        seeds: of the search.
        options: of the search that differ from those of the plan, such as fewer steps.
        top: the number of settings that get final runs; the table has the one whose final runs are
            best.
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
        model: what ``catnat --model`` takes.
        program: instead of a model, a program that takes the options as ``--name=value`` and writes
            its numbers to metrics.json in the folder ``--default_root_dir``: a script, or "-m
            module".
        path: folders of modules that ``model`` and the option ``import`` name. The plan's folder
            and the working directory are searched in any case.
        options: of all runs.
        grid: values of options; a cell is one combination of them. A key of several options has
            lists as values.
        search: of settings for each cell; None: a run has none but the cell's.
        seeds: of the final runs.
        metrics: columns of the table.
        columns: options of the grid whose values are columns of the first table.
        names: short names of options.
        paper: published numbers.
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

    def cells(self, only: Only | None = None) -> list[Options]:
        """The combinations of the grid, or those with some values alone."""
        cells = combinations(self.grid)
        for short, wanted in (only or {}).items():
            name = self.long(short)
            values = self.seeds if name == "seed" else [cell.get(name) for cell in cells]
            if name not in cells[0] and name != "seed":
                raise ValueError(f"--only: unknown {name}; {choices(name, cells[0])}")
            for value in wanted:
                if value not in map(str, values):
                    raise ValueError(f"--only {name}: unknown {value}; {choices(value, values)}")
            cells = [cell for cell in cells if name == "seed" or str(cell[name]) in wanted]
        return cells

    def final_seeds(self, only: Only | None = None) -> list[int]:
        """The seeds of final runs, or those asked for; settings are selected by all."""
        wanted = (only or {}).get("seed")
        return [seed for seed in self.seeds if wanted is None or str(seed) in wanted]

    @property
    def label(self) -> str:
        """The name, with the scale if there are several."""
        return f"{self.name}, scale {self.scale}" if self.scale else self.name

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
        """A run of a cell with settings."""
        program = {"program": self.program} if self.program else {"model": self.model}
        options = {**program, **self.options, **cell, **settings}
        if self.search and stage == "search":
            options |= self.search.options
        return Run({**options, "seed": seed}, self.name, stage, self.path)

    # -- the stages of a cell ------------------------------------------------------------------

    def tried(self, cell: Options, rows: Rows) -> list[Options]:
        """All settings of a cell's search so far; a refined grid follows the first."""
        search = self.search
        if search is None or search.fixed:
            return []
        if search.space:
            rng = random.Random(f"{self.study} {sorted(cell.items())}")  # the same draws each time
            tried = [
                {name: space.draw(rng) for name, space in search.space.items()}
                for _ in range(search.trials)
            ]
        else:
            tried = combinations(self._of_head(cell, search.grid))
        if search.factors and (ranked := self._ranked(cell, tried, rows)):
            ((option, center),) = ranked[0].items()
            tried += [{option: float(f"{center * factor:.3g}")} for factor in search.factors]
        return [settings for i, settings in enumerate(tried) if settings not in tried[:i]]

    def selected(self, cell: Options, rows: Rows) -> list[Options]:
        """The settings of a cell's final runs; none while its search is not done."""
        if self.search is None:
            return [{}]
        if self.search.fixed:
            return [self._of_head(cell, self.search.fixed)]
        return self._ranked(cell, self.tried(cell, rows), rows)[: self.search.top]

    def table_settings(self, cell: Options, rows: Rows) -> Options | None:
        """The settings in the table: of several selected ones, those whose final runs are best."""
        selected = self.selected(cell, rows)
        if len(selected) > 1:
            selected = self._ranked(cell, selected, rows, "final") or selected
        return selected[0] if selected else None

    def search_runs(self, cell: Options, rows: Rows) -> list[Run]:
        """The runs of a cell's search so far."""
        seeds = self.search.seeds if self.search else []
        tried = self.tried(cell, rows)
        return [self.run(cell, settings, seed, "search") for settings in tried for seed in seeds]

    def final_runs(self, cell: Options, rows: Rows, only: Only | None = None) -> list[Run]:
        """The runs of all seeds, or those asked for, with the settings selected."""
        selected, seeds = self.selected(cell, rows), self.final_seeds(only)
        return [self.run(cell, settings, seed, "final") for settings in selected for seed in seeds]

    def runs(self, rows: Rows, only: Only | None = None) -> list[Run]:
        """All runs so far: searches first, low seeds before high ones."""
        cells = self.cells(only)
        searches = [run for cell in cells for run in self.search_runs(cell, rows)]
        finals = [run for cell in cells for run in self.final_runs(cell, rows, only)]
        return searches + sorted(finals, key=lambda run: run.options["seed"])

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
            done = [rows.find(self.run(cell, settings, seed, stage)) for seed in seeds]
            values = [row.metrics.get(self.search.metric, math.nan) for row in done if row]
            if len(values) == len(seeds):
                means.append((sign * statistics.fmean(values), number))
            elif stage == "search":
                return []
        return [tried[number] for mean, number in sorted(means) if not math.isnan(mean)]


def combinations(grid: Mapping[str, list[Any]]) -> list[Options]:
    """All of them; a key of several options has lists as values, with null for one not given."""
    result = []
    for values in itertools.product(*grid.values()):
        options: Options = {}
        for key, value in zip(grid, values, strict=True):
            names = key.split()
            if len(names) == 1:
                options[key] = value
            elif isinstance(value, list) and len(value) == len(names):
                options |= zip(names, value, strict=True)
            else:
                raise ValueError(f"{key}: {value} is not a list of {len(names)} values")
        result.append(options)
    return result


# -- reading ---------------------------------------------------------------------------------------


def scales(name: str) -> list[str]:
    """The scales of a plan."""
    return list(_read(find_file(name)).get("scales") or {"": {}})


def load(name: str, scale: str | None = None) -> Plan:
    """A plan by its file, at a scale (default: small, else its first).

    A ValueError says in one line what is wrong.
    """
    path = find_file(name)
    scale_names = scales(name)
    scale = scale or ("small" if "small" in scale_names else scale_names[0])
    if scale not in scale_names:
        raise ValueError(f"{path.name} has no scale {scale!r}; {choices(scale, scale_names)}")
    content = _read(path, scale)
    content.pop("scales", None)
    try:
        _check_keys(Plan, content)
        _check_keys(Search, content.get("search"))
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(Plan, "plan")
        plan: Plan = parser.instantiate(parser.parse_object({"plan": content})).plan
        plan.name, plan.scale = path.stem, scale
        plan.path.append(str(path.parent.resolve()))
        _check(plan)
    except (ValueError, ArgumentError) as error:
        raise ValueError(f"{path.name}, scale {scale}: {_one_line(error)}") from error
    return plan


def _check_keys(kind: type[Plan | Search], content: Any) -> None:
    for key in content if isinstance(content, dict) else ():
        if key not in kind.__dataclass_fields__:
            raise ValueError(f"there is no key {key}; {choices(key, kind.__dataclass_fields__)}")


def _check(plan: Plan) -> None:
    """Check what types cannot express."""
    if bool(plan.model) == bool(plan.program):
        raise ValueError("give either model or program")
    if not re.fullmatch(r"\w[\w.-]*", plan.study):
        raise ValueError(f"study: {plan.study} is not the name of a folder")
    _check_lists({"metrics": plan.metrics, "seeds": plan.seeds, **plan.grid})
    in_grid = " ".join(plan.grid).split()
    for option in plan.columns:
        if option not in in_grid:
            raise ValueError(f"columns: {option} is not in the grid; {choices(option, in_grid)}")
    options = [*plan.options, *in_grid, *plan.searched]
    for option in options:
        if option in ("seed", "default_root_dir", "ckpt_path"):
            raise ValueError(f"{option}: the sweep sets it; seeds has the seeds")
        if options.count(option) > 1:
            raise ValueError(f"{option} appears twice in options, grid and search")
    cells = plan.cells()
    for cell in cells:
        if cells.count(cell) > 1:
            raise ValueError(f"grid: {cell} appears twice")
    if plan.search:
        _check_search(plan, plan.search)
    for run in plan.runs(Rows([])):
        for option, value in run.options.items():
            if "learning_rate" in option and isinstance(value, int | float) and value < 0:
                raise ValueError(f"{option}: {value} is below 0")


def _check_lists(lists: Mapping[str, Any]) -> None:
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{name}: give at least one")
    for seed in lists["seeds"]:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seeds: {seed} is not between 0 and 4294967295")
        if lists["seeds"].count(seed) > 1:
            raise ValueError(f"seeds: {seed} appears twice")


def _check_search(plan: Plan, search: Search) -> None:
    if not (search.grid or (search.space and search.trials > 0) or search.fixed):
        raise ValueError("search: give a grid, a space with trials, or fixed settings")
    if search.top < 1:
        raise ValueError(f"search: top must be at least 1, got {search.top}")
    _check_lists({"seeds": search.seeds, **search.grid})
    for option in plan.searched:
        if option in search.options:
            raise ValueError(f"{option} appears twice in the search")
    for cell in plan.cells():
        head = (plan.options | cell).get("head")
        for name, value in (search.grid | search.fixed).items():
            if isinstance(value, dict) and head not in value:
                raise ValueError(f"search: {name} has no value for head {head}")
        tried = [value for settings in plan.tried(cell, Rows([])) for value in settings.values()]
        is_number = all(type(value) in (int, float) for value in tried)
        if search.factors and not search.fixed and not (is_number and len(plan.searched) == 1):
            raise ValueError(f"search: factors refine numbers of one option, not {tried}")
    if min(search.factors, default=1) <= 0:
        raise ValueError(f"search: factors must be above 0, got {search.factors}")


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
        _resolve_files(part or {}, path.parent)
    base, layer = content.pop("base", None), layers.get(scale) or {}
    if base is None:
        return merged(content, layer)
    try:
        base_path = find_file(str(base), path.parent).resolve()
    except ValueError as error:
        raise ValueError(f"{path.name}, base: {error}") from error
    above = (*above, path.resolve())
    if base_path in above:
        raise ValueError(f"{path.name}: base {base} leads back to itself")
    return merged(merged(_read(base_path, scale, above), content), layer)


def _resolve_files(content: Options, folder: Path) -> None:
    """Make the files and folders that a plan names absolute."""
    modules, paper = content.get("path"), content.get("paper")
    if modules:
        folders = modules if isinstance(modules, list) else [modules]
        content["path"] = [str((folder / str(name)).resolve()) for name in folders]
    for part, key in ((content, "results"), (paper, "file")):
        if isinstance(part, dict) and part.get(key):
            part[key] = str((folder / str(part[key])).resolve())


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


def choices(value: str, names: Iterable[Any]) -> str:
    """What could have been meant."""
    texts = list(map(str, names))
    return did_you_mean(value, texts)[2:] or f"choices: {', '.join(texts)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
