"""A plan: which runs a table consists of. Any YAML file.

A plan is read into :class:`Plan`, whose attributes are its keys. ``base`` names the file of a plan
that it changes, at the same scale (null takes a key away), ``scales`` has versions of it by name.
Files and folders in a plan are relative to the plan's own folder.
"""

import itertools
import json
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
from catnat.cli.names import Options
from catnat.sweeps.defaults import Defaults
from catnat.sweeps.runs import Family, Rows, Run, text_of
from catnat.sweeps.search import Parameter, Sampler, Space, text_of_trial

Value = str | Any  # Any alone would read quoted text as YAML once more
Better = Literal["lower", "higher"]
SET_BY_SWEEP = ("seed", "seed_everything", "default_root_dir", "ckpt_path", "model", "program")


@dataclass
class Metric:
    """A column of a table.

    Attributes:
        label: its name in the table.
        better: "lower" or "higher"; None for a column without a best.
        digits: after the decimal point.
    """

    label: str = ""
    better: Better | None = None
    digits: int = 3


@dataclass
class Search:
    """How the settings of a cell are found: in a grid, by a sampler of Optuna, or fixed.

    Attributes:
        grid: values of options for all heads, or by head; all combinations are tried.
        factors: with a grid of one option, the best value is then multiplied by each of them.
        sampler: "tpe", "random" or "grid": how Optuna draws settings from ``space``.
        trials: number of settings that are drawn; a grid has all of its settings by default.
        space: parameters by name, such as ``{low: 1.0e-4, high: 0.1, log: true}`` or
            ``{choices: [8, 16], when: {head: natural}}``. One whose name begins with _ is not an
            option; ``derived`` uses it.
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
    sampler: Sampler = "grid"
    trials: PositiveInt | None = None
    space: dict[str, Parameter] = field(default_factory=dict)
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
        size = Space(self.space, self.derived).size
        if self.sampler == "grid":
            if size == math.inf or any(parameter.when for parameter in self.space.values()):
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
    def sampled(self) -> Space:
        """The space that a sampler draws from."""
        return Space(self.space, self.derived)


@dataclass
class Plan:
    """Runs and columns of a table.

    Attributes:
        title: title of the table.
        study: the rows are in <results>/<study>/runs.csv.
        results: the folder of all studies; "" is the folder results in the working directory.
        model: value of ``catnat --model``.
        program: instead of a model, a program that takes the options as ``--name=value`` and writes
            its numbers, by names with a /, to metrics.json in the folder ``--default_root_dir``: a
            script, or "-m module".
        path: a folder of modules that ``model`` and the option ``import`` name. The plan's folder
            and the working directory are searched in any case.
        options: options of all runs.
        grid: values of options; a cell is one combination of them. A key of several options has
            lists as values.
        search: search of settings for each cell; optional.
        seeds: seeds of the final runs.
        metrics: columns of the table.
        names: short names of options.

    A plan that was read from a file also has its name, the scale, the folders of its modules, the
    defaults of its runs if its rows are known, and the cells and the seeds of final runs that are
    left by :meth:`restrict`.
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
        self.defaults: Defaults | None = None
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
        runs = self.examples()  # this checks the names of options, and values by head
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
        sampled = self.search.sampled.options if self.search.space else []
        return " ".join([*self.search.fixed, *self.search.grid, *sampled]).split()

    def describe(self, run: Run) -> str:
        """The stage of a run, and the options that vary in the plan, by their short names."""
        varied = [x for x in self.cells[0] if len({str(cell[x]) for cell in self.cells}) > 1]
        names = dict.fromkeys([*varied, *self.searched, "seed"])
        values = {name: run.options.get(name) for name in names}
        texts = [f"{self.short(name)}={x}" for name, x in values.items() if x is not None]
        return f"{run.stage} {' '.join(texts)}"

    def short(self, option: str) -> str:
        """The name of an option in tables."""
        return self.names.get(option, option)

    def long(self, name: str) -> str:
        """The option with a short name."""
        return next((option for option, short in self.names.items() if short == name), name)

    def run(
        self, cell: Options, settings: Options, seed: int, stage: str, trial: Options | None = None
    ) -> Run:
        """A run of a cell with settings, which may be those of a trial."""
        program = {"program": self.program} if self.program else {"model": self.model}
        options = {**program, **self.options, **cell, **settings}
        if stage == "search":
            options |= self.search.options
        text = text_of_trial(trial) if trial else ""
        family = self.defaults.family(options) if self.defaults else Family()
        return Run({**options, "seed": seed}, self.name, stage, self.folders, text, family)

    # -- the stages of a cell ------------------------------------------------------------------

    def tried(self, cell: Options, rows: Rows) -> list[Options]:
        """All settings of a cell's search so far; a refined grid follows the first."""
        if self.search.space:
            return [settings for _, settings in self.trials(cell, rows)]
        if not self.search.grid:
            return []
        tried = combinations(self._of_head(cell, self.search.grid))
        if self.search.factors and (ranked := self._ranked(cell, tried, rows, "search")):
            ((option, center),) = ranked[0].items()
            tried += [{option: float(f"{center * factor:.3g}")} for factor in self.search.factors]
        return [settings for i, settings in enumerate(tried) if settings not in tried[:i]]

    def selected(self, cell: Options, rows: Rows) -> list[Options]:
        """The settings of a cell's final runs; none while its search is not done."""
        if not self.search.is_search:
            return [self._of_head(cell, self.search.fixed)]
        if len(self.tried(cell, rows)) < (self.search.trials or 0):
            return []
        return self._ranked(cell, self.tried(cell, rows), rows, "search")[: self.search.top]

    def table_settings(self, cell: Options, rows: Rows) -> Options | None:
        """The settings in the table: of several selected ones, those whose final runs are best."""
        selected = self.selected(cell, rows)
        return next(iter(self._ranked(cell, selected, rows, "final") or selected), None)

    def trials(self, cell: Options, rows: Rows) -> list[tuple[Options, Options]]:
        """The parameters and the settings of a cell's trials that have rows."""
        options = self.options | cell
        found: dict[str, tuple[Options, Options]] = {}
        for key, row in rows.items():
            text = row.get("trial", "")
            of_cell = all(
                value is None or row.get(name) == text_of(value) for name, value in cell.items()
            )
            if not text or text in found or not of_cell:
                continue
            drawn = json.loads(text)
            if not drawn.keys() <= self.search.space.keys():
                continue
            settings = self.search.sampled.settings(drawn, options)
            keys = [self.run(cell, settings, seed, "search").key for seed in self.search.seeds]
            if key in keys:
                found[text] = drawn, settings
        return list(found.values())

    def trial_runs(self, cell: Options, drawn: Options) -> list[Run]:
        """The runs of a trial."""
        settings = self.search.sampled.settings(drawn, self.options | cell)
        return [self.run(cell, settings, x, "search", drawn) for x in self.search.seeds]

    def finished_trials(self, cell: Options, rows: Rows) -> list[tuple[Options, float]]:
        """The parameters of a cell's trials that are done, and their metric; NaN if one failed."""
        finished = []
        for drawn, settings in self.trials(cell, rows):
            mean = self._mean(cell, settings, rows, "search")
            if mean is not None:
                finished.append((drawn, mean))
        return finished

    def examples(self) -> list[Run]:
        """The runs that can start first, and those at both ends of a space."""
        runs = self.runs({})
        for cell in self.cells if self.search.space else []:
            for end in ("low", "high"):
                drawn = self.search.sampled.example(self.options | cell, end)
                runs += self.trial_runs(cell, drawn)
        return runs

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
        means = []
        for number, settings in enumerate(tried):
            mean = self._mean(cell, settings, rows, stage)
            if mean is None and stage == "search":
                return []
            if mean is not None and not math.isnan(mean):  # NaN has no place in an order
                means.append((sign * mean, number))
        return [tried[number] for _, number in sorted(means)]

    def _mean(self, cell: Options, settings: Options, rows: Rows, stage: str) -> float | None:
        """The mean of the search's metric over seeds; None while runs are missing."""
        seeds = self.search.seeds if stage == "search" else self.seeds
        keys = [self.run(cell, settings, seed, stage).key for seed in seeds]
        if not rows.keys() >= {*keys}:
            return None
        return statistics.fmean(rows[key].get(self.search.metric, math.nan) for key in keys)


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
