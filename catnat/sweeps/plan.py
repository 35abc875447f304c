"""A plan: which runs a table consists of. Any YAML file.

A plan is read into :class:`Plan`, whose attributes are its keys. ``base`` names the file of a plan
that it changes, at the same scale (null takes a key away), ``scales`` has versions of it by name.
Files and folders in a plan are relative to the plan's own folder.
"""

import itertools
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, get_loader
from jsonargparse.typing import PositiveFloat, PositiveInt

from catnat.checks import require_choice
from catnat.cli.options import Options
from catnat.sweeps.runs import Rows, Run

Value = str | Any  # Any alone would read quoted text as YAML once more
Better = Literal["lower", "higher"]
SET_BY_SWEEP = ("seed", "seed_everything", "default_root_dir", "ckpt_path", "model", "program")


@dataclass
class Metric:
    """A column of a table.

    Attributes:
        label: its name in the table.
        better: which values are better; None for a column without a best.
        digits: after the decimal point.
    """

    label: str = ""
    better: Better | None = None
    digits: int = 3


@dataclass
class Search:
    """How the settings of a cell are found: in a grid, or fixed.

    Attributes:
        grid: as the plan's, with values for all heads or by head; all combinations are tried.
        factors: with a grid of one option, the best value is then multiplied by each of them.
        fixed: settings for all heads, or by head, in place of the grid; nothing is searched then.
        metric: of the last validation; the mean over the seeds of the search decides.
        better: which values are better.
        seeds: of the search.
        options: of the search that differ from those of the plan, such as fewer steps.
        top: the number of settings that get final runs; the table has the one whose final runs are
            best.
    """

    grid: dict[str, list[Value] | dict[str, list[Value]]] = field(default_factory=dict)
    factors: list[PositiveFloat] = field(default_factory=list)
    fixed: dict[str, Value] = field(default_factory=dict)
    metric: str = "val/loss"
    better: Better = "lower"
    seeds: list[int] = field(default_factory=lambda: [0])
    options: dict[str, Value] = field(default_factory=dict)
    top: PositiveInt = 1

    def __post_init__(self) -> None:
        """Leave out a grid that is not searched."""
        if self.fixed:
            self.grid = {}


@dataclass
class Plan:
    """What a table consists of.

    Attributes:
        title: of the table.
        study: the rows are in <results>/<study>/runs.csv.
        results: the folder of all studies; "" is the folder results in the working directory.
        model: what ``catnat --model`` takes.
        program: instead of a model, a program that takes the options as ``--name=value`` and writes
            its numbers, by names with a /, to metrics.json in the folder ``--default_root_dir``: a
            script, or "-m module".
        path: a folder of modules that ``model`` and the option ``import`` name. The plan's folder
            and the working directory are searched in any case.
        options: of all runs.
        grid: values of options; a cell is one combination of them. A key of several options has
            lists as values.
        search: of settings for each cell; without one a run has none but the cell's.
        seeds: of the final runs.
        metrics: columns of the table.
        names: short names of options.

    A plan that was read from a file also has its name, the scale, the folders of its modules, and
    the cells and the seeds of final runs that are left by :meth:`restrict`.
    """

    title: str
    study: str
    metrics: dict[str, Metric]
    grid: dict[str, list[Value]]
    model: str = ""
    program: str = ""
    results: str = ""
    path: str = ""
    options: dict[str, Value] = field(default_factory=dict)
    search: Search = field(default_factory=Search)
    seeds: list[int] = field(default_factory=lambda: [1])
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what types cannot express."""
        self.name = ""
        self.scale = ""
        self.folders: list[str] = []
        self.cells = combinations(self.grid)
        self.final_seeds = self.seeds
        if bool(self.model) == bool(self.program):
            raise ValueError("give either model or program")
        if not re.fullmatch(r"\w[\w.-]*", self.study):
            raise ValueError(f"study: {self.study} is not the name of a folder")
        in_grid = " ".join(self.grid).split()
        options = [*self.options, *in_grid, *self.searched, *SET_BY_SWEEP]
        lists: dict[str, list[Any]] = {
            "metrics": list(self.metrics),
            "seeds": self.seeds,
            "grid": self.cells,
            "options, grid, search and what a sweep sets": options,
        }
        if self.search != Search():
            lists["search: grid or fixed"] = self.searched
            lists["search: grid and options"] = [*self.searched, *self.search.options]
            lists["search: seeds"] = self.search.seeds
        for name, values in lists.items():
            if not values:
                raise ValueError(f"{name}: give at least one")
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"{name}: {value} appears twice")
        runs = self.runs({})  # this checks the names of options, and values by head
        if self.search.factors and self.search.grid:
            values = [run.options[name] for run in runs for name in self.searched]
            if len(self.searched) > 1 or any(type(x) not in (int, float) for x in values):
                raise ValueError(f"search: factors refine numbers of one option, not {values}")

    def restrict(self, only: Mapping[str, str]) -> None:
        """Leave the cells with some values of options, and the final runs with some seeds.

        Values are separated by commas.
        """
        for short, text in only.items():
            name = self.long(short)
            wanted = text.split(",")
            require_choice([*self.cells[0], "seed"], **{"--only": name})
            values = self.seeds if name == "seed" else [cell[name] for cell in self.cells]
            for value in wanted:
                require_choice(dict.fromkeys(map(str, values)), **{f"--only {name}": value})
            if name == "seed":
                self.final_seeds = [seed for seed in self.seeds if str(seed) in wanted]
            else:
                self.cells = [cell for cell in self.cells if str(cell[name]) in wanted]

    @property
    def label(self) -> str:
        """The name, with the scale if there are several."""
        return f"{self.name}, scale {self.scale}" if self.scale else self.name

    @property
    def searched(self) -> list[str]:
        """The options that the search decides on."""
        return " ".join([*self.search.fixed, *self.search.grid]).split()

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
        if stage == "search":
            options |= self.search.options
        return Run({**options, "seed": seed}, self.name, stage, self.folders)

    # -- the stages of a cell ------------------------------------------------------------------

    def tried(self, cell: Options, rows: Rows) -> list[Options]:
        """All settings of a cell's search so far; a refined grid follows the first."""
        if not self.search.grid:
            return []
        tried = combinations(self._of_head(cell, self.search.grid))
        if self.search.factors and (ranked := self._ranked(cell, tried, rows, "search")):
            ((option, center),) = ranked[0].items()
            tried += [{option: float(f"{center * factor:.3g}")} for factor in self.search.factors]
        return [settings for i, settings in enumerate(tried) if settings not in tried[:i]]

    def selected(self, cell: Options, rows: Rows) -> list[Options]:
        """The settings of a cell's final runs; none while its search is not done."""
        if not self.search.grid:
            return [self._of_head(cell, self.search.fixed)]
        return self._ranked(cell, self.tried(cell, rows), rows, "search")[: self.search.top]

    def table_settings(self, cell: Options, rows: Rows) -> Options | None:
        """The settings in the table: of several selected ones, those whose final runs are best."""
        selected = self.selected(cell, rows)
        return next(iter(self._ranked(cell, selected, rows, "final") or selected), None)

    def runs(self, rows: Rows) -> list[Run]:
        """All runs so far: searches first, then final runs, low seeds before high ones."""
        searches = []
        finals = []
        for cell in self.cells:
            for settings in self.tried(cell, rows):
                searches += [self.run(cell, settings, x, "search") for x in self.search.seeds]
            for settings in self.selected(cell, rows):
                finals += [self.run(cell, settings, x, "final") for x in self.final_seeds]
        return searches + sorted(finals, key=lambda run: run.options["seed"])

    def _of_head(self, cell: Options, settings: Options) -> Options:
        """Settings that may be given by head, for the head of a cell."""
        head = (self.options | cell).get("head")
        of_head = {}
        for name, value in settings.items():
            if isinstance(value, dict):
                if head not in value:
                    raise ValueError(f"search: {name} has no value for head {head}")
                value = value[head]
            of_head[name] = value
        return of_head

    def _ranked(self, cell: Options, tried: list[Options], rows: Rows, stage: str) -> list[Options]:
        """Settings by the mean of the search's metric, best first; none while searches are missing.

        Settings with a run that failed, or whose metric is not finite, come last or not at all.
        In the final stage settings with missing runs are left out instead.
        """
        sign = -1 if self.search.better == "higher" else 1
        seeds = self.search.seeds if stage == "search" else self.seeds
        means = []
        for number, settings in enumerate(tried):
            keys = [self.run(cell, settings, seed, stage).key for seed in seeds]
            if rows.keys() >= {*keys}:
                mean = statistics.fmean(rows[key].get(self.search.metric, math.nan) for key in keys)
                if not math.isnan(mean):  # by which nothing can be sorted
                    means.append((sign * mean, number))
            elif stage == "search":
                return []
        return [tried[number] for _, number in sorted(means)]


def combinations(grid: Mapping[str, list[Any]]) -> list[Options]:
    """All of them; a key of several options has lists as values, with null for one not given."""
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


# -- reading ---------------------------------------------------------------------------------------


def scales(name: str) -> list[str]:
    """The scales of a plan."""
    try:
        content = _read(Path(name))
    except RecursionError:
        raise ValueError(f"{name}: its base leads back to itself") from None
    return list(content.get("scales") or {"": {}})


def load(name: str, scale: str | None = None) -> Plan:
    """A plan by its file, at a scale (default: small, else its first).

    A ValueError says what is wrong.
    """
    path = Path(name)
    scale_names = scales(name)
    if scale and scale_names == [""]:
        raise ValueError(f"{path.name} has no scales, {scale!r} is not one")
    scale = scale or ("small" if "small" in scale_names else scale_names[0])
    require_choice(scale_names, **{f"scale of {path.name}": scale})
    content = _read(path, scale)
    content.pop("scales", None)
    for part in ("metrics", "grid", "options", "search", "names"):
        try:
            _mapping(content.get(part))
        except ValueError as error:
            raise ValueError(f"{path.name}, {part}: {error}") from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Plan, "plan")
    try:
        plan = parser.instantiate(parser.parse_object({"plan": content})).plan
    except (ValueError, ArgumentError) as error:
        raise ValueError(f"{path.name}, scale {scale}: {error}") from error
    plan.name = path.stem
    plan.scale = scale
    plan.folders = [plan.path, str(path.parent.resolve())]
    return plan


def _read(path: Path, scale: str = "") -> Options:
    """A file at a scale, laid over its base at that scale."""
    try:
        content = _mapping(get_loader("yaml")(path.read_text()))
        layer = _mapping(_mapping(content.get("scales")).get(scale))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    base = content.pop("base", None)
    result = {} if base is None else _read(path.parent / str(base), scale)
    for above in (content, layer):
        for key in above.keys() & {"path", "results"}:
            above[key] = above[key] and str((path.parent / str(above[key])).resolve())
        result = merged(result, above)
    return result


def _mapping(value: Any) -> Options:
    if not isinstance(value or {}, dict) or not all(isinstance(key, str) for key in value or ()):
        raise ValueError(f"expected keys and values, got {value!r}")
    return value or {}


def merged(below: Options, above: Options) -> Options:
    """Mappings laid over each other at every depth; None takes a key away."""
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result
