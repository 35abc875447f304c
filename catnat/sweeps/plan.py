"""A plan: which runs a table consists of. :class:`Plan` lists the keys of its YAML file.

Each combination of values of ``grid`` is a cell, a line of the table. A cell has up to three
stages: a search tries settings, a refined one tries more of them near the best, and final runs
repeat the selected settings with all seeds. A plan therefore has more runs the more rows there are.
"""

import json
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from catnat.checks import require_choice
from catnat.cli.names import Options
from catnat.sweeps.defaults import Rows
from catnat.sweeps.runs import Run, short_name, text_of
from catnat.sweeps.search import Better, Search, Value, combinations, text_of_trial

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
        search: search of settings for each cell (:class:`catnat.sweeps.search.Search`); optional.
        seeds: seeds of the final runs.
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

    def add_options(self, added: Mapping[str, str]) -> None:
        """Add options to every run; a ValueError for one that the plan itself sets."""
        fixed = {*self.cells[0], *self.searched, *SET_BY_SWEEP}
        for name in added:
            if self.long(short_name(name.replace("-", "_"))) in fixed:
                raise ValueError(f"--{name}: the plan sets it; --only takes a part of the plan")
        self.options |= added
        self.search.options |= added

    @property
    def label(self) -> str:
        """The name, with the scale if there are several."""
        return f"{self.name}, scale {self.scale}" if self.scale else self.name

    @property
    def searched(self) -> list[str]:
        """The options that the search decides on."""
        drawn = [name for name in self.search.space if not name.startswith("_")]
        named = [*self.search.fixed, *self.search.grid, *drawn, *self.search.derived]
        return " ".join(named).split()

    def describe(self, run: Run) -> str:
        """The stage of a run, and the options that vary in the plan, by their short names."""
        varied = [x for x in self.cells[0] if len({str(cell[x]) for cell in self.cells}) > 1]
        fixed = [key for key, value in self.search.fixed.items() if not isinstance(value, dict)]
        chosen = [name for name in self.searched if name not in " ".join(fixed).split()]
        names = dict.fromkeys([*varied, *chosen, "seed"])
        values = {name: run.options.get(name) for name in names}
        texts = [f"{self.short(name)}={x}" for name, x in values.items() if x is not None]
        return f"{run.stage} {' '.join(texts)}"

    def short(self, option: str) -> str:
        """The name of an option in tables."""
        return self.names.get(option, option)

    def long(self, name: str) -> str:
        """The option with a short name."""
        return next((option for option, short in self.names.items() if short == name), name)

    # -- runs ----------------------------------------------------------------------------------

    def runs(self, rows: Rows) -> list[Run]:
        """All runs so far: searches first, then final runs, low seeds before high ones."""
        searches = []
        finals = []
        for cell in self.cells:
            for settings in self.tried(cell, rows) if self.search.is_search else ():
                searches += self._stage(cell, settings, "search")
            for settings in self.selected(cell, rows):
                finals += [self.run(cell, settings, x, "final") for x in self.final_seeds]
        return searches + sorted(finals, key=lambda run: run.options["seed"])

    def examples(self) -> list[Run]:
        """The runs that can start first, and those at both ends of a space."""
        runs = self.runs(Rows())
        for cell in self.cells if self.search.is_sampled else ():
            for end in ("low", "high"):
                runs += self.trial_runs(cell, self.search.example(self.options | cell, end))
        return runs

    def trial_runs(self, cell: Options, drawn: Options) -> list[Run]:
        """The runs of a trial with these parameters."""
        settings = self.search.settings(drawn, self.options | cell)
        text = text_of_trial(drawn)
        return [self.run(cell, settings, x, "search", text) for x in self.search.seeds]

    def run(self, cell: Options, settings: Options, seed: int, stage: str, trial: str = "") -> Run:
        """A run of a cell with settings, which may be those of a trial."""
        program = {"program": self.program} if self.program else {"model": self.model}
        options = {**program, **self.options, **cell, **settings}
        if stage == "search":
            options |= self.search.options
        return Run({**options, "seed": seed}, self.name, stage, self.folders, trial)

    def _stage(self, cell: Options, settings: Options, stage: str) -> list[Run]:
        """The runs of settings with all seeds of a stage."""
        seeds = self.search.seeds if stage == "search" else self.seeds
        return [self.run(cell, settings, seed, stage) for seed in seeds]

    # -- settings ------------------------------------------------------------------------------

    def tried(self, cell: Options, rows: Rows) -> list[Options]:
        """All settings of a cell so far; a refined grid follows the first."""
        if self.search.is_sampled:
            return [settings for _, settings in self.trials(cell, rows)]
        tried = self.search.given(self.options | cell)
        is_refined = self.search.grid and self.search.factors
        if is_refined and (ranked := self._ranked(cell, tried, rows, "search")):
            ((option, center),) = ranked[0].items()
            tried += [{option: float(f"{center * factor:.3g}")} for factor in self.search.factors]
        return [settings for i, settings in enumerate(tried) if settings not in tried[:i]]

    def selected(self, cell: Options, rows: Rows) -> list[Options]:
        """The settings of a cell's final runs; none while its search is not done."""
        tried = self.tried(cell, rows)
        if not self.search.is_search:
            return tried
        if self.search.is_sampled and len(tried) < (self.search.trials or 0):
            return []
        return self._ranked(cell, tried, rows, "search")[: self.search.top]

    def table_settings(self, cell: Options, rows: Rows) -> Options | None:
        """The settings in the table: the selected settings with the best final runs."""
        selected = self.selected(cell, rows)
        return next(iter(self._ranked(cell, selected, rows, "final") or selected), None)

    def trials(self, cell: Options, rows: Rows) -> list[tuple[Options, Options]]:
        """The parameters and the settings of a cell's trials that have rows."""
        texts = {name: text_of(value) for name, value in cell.items() if value is not None}
        of_cell = [row["trial"] for row in rows if "trial" in row and texts.items() <= row.items()]
        trials = []
        for drawn in map(json.loads, dict.fromkeys(of_cell)):
            if drawn.keys() <= self.search.space.keys():
                settings = self.search.settings(drawn, self.options | cell)
                if any(map(rows.get, self._stage(cell, settings, "search"))):
                    trials.append((drawn, settings))
        return trials

    def finished_trials(self, cell: Options, rows: Rows) -> list[tuple[Options, float]]:
        """The parameters of a cell's trials that are done, and their metric; NaN if one failed."""
        means = [
            (drawn, self._mean(cell, settings, rows, "search"))
            for drawn, settings in self.trials(cell, rows)
        ]
        return [(drawn, mean) for drawn, mean in means if mean is not None]

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
        values = []
        for run in self._stage(cell, settings, stage):
            row = rows.get(run)
            if row is None:
                return None
            values.append(row.get(self.search.metric, math.nan))
        return statistics.fmean(values)
