"""What a table consists of: ``experiments/plans/<name>.yaml`` or any other plan, turned into runs.

The keys of a plan are described in schema.py.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments import train_interface
from experiments.plan_rules import check
from experiments.schema import Options, Plan, PlanError, build, choices
from experiments.train_interface import ROOT

HERE = Path(__file__).resolve().parent
PLANS = HERE / "plans"
SCALES = ("smoke", "small", "paper")  # those of our own plans


@dataclass(frozen=True)
class Run:
    """One command.

    Attributes:
        cell: the values of the grid.
        settings: the values that were searched for, such as the learning rate.
        seed: of weights and noise, if there are any.
        folder: the run's --default_root_dir.
        home: where its version_<k> will lie.
        command: the words, without --ckpt_path.
        cwd: the folder the command is started in.
    """

    cell: Options
    settings: Options
    seed: int | None
    folder: Path
    home: Path
    command: tuple[str, ...]
    cwd: Path = ROOT

    @property
    def name(self) -> str:
        """A short name for a line of text."""
        return " ".join([self.folder.name, *self.home.relative_to(self.folder).parts[1:]])


@dataclass(frozen=True, kw_only=True)
class Experiment(Plan):
    """A table at one scale, and where its runs lie."""

    name: str
    scale: str
    file: Path
    runs: Path = Path("runs")
    only: dict[str, list[str]] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    cwd: Path = field(default_factory=Path.cwd)

    @property
    def folder(self) -> Path:
        """Where the runs of this table at this scale lie."""
        return self.runs / self.name / self.scale

    def cells(self) -> list[Options]:
        """All combinations of the grid that were asked for."""
        return [cell for cell in combinations(self.grid) if self._wanted(cell)]

    def final_seeds(self) -> list[int | None]:
        """The seeds of the last stage that were asked for; a search has a seed of its own."""
        asked = self.only.get("seed")
        if asked is None or "seed" in grid_options(self.grid):
            return self.seeds
        return [seed for seed in self.seeds if str(seed) in asked]

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
        every = self.options | cell | settings | options | seeded
        places = [self.model, str(every["head"])] if self.model else []
        words = train_interface.command(self, every, folder)
        return Run(cell, settings, seed, folder, folder.joinpath(*places), words, self.cwd)

    def _parts(self, options: Options) -> Iterator[str]:
        for option, value in options.items():
            if option != "head" or not self.model:  # train.py makes a folder of the head
                yield value if isinstance(value, str) else f"{self.short(option)}{value:.6g}"

    def _wanted(self, cell: Options) -> bool:
        return all(str(cell[key]) in values for key, values in self.only.items() if key in cell)


def names() -> list[str]:
    """The plans of the paper's tables and figures."""
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


def scales(name: str) -> list[str]:
    """The scales a plan has."""
    return list(_read(_find(name))["scales"])


def default_scale(name: str) -> str:
    """The scale of a plan if none is asked for: small, else its first."""
    found = scales(name)
    return "small" if "small" in found else found[0]


def load(
    name: str, scale: str | None = None, runs: Path = Path("runs"), **options: Any
) -> Experiment:
    """A plan at a scale, by name or as a file; a ``ValueError`` of one line says what is wrong."""
    path = _find(name)
    content = _read(path)
    layers = content.pop("scales")
    scale = scale or default_scale(name)
    if scale not in layers:
        raise PlanError(f"{path.name}: there is no scale {scale!r}; {choices(scale, layers)}")
    plans: dict[str, Plan] = {}
    for each, above in layers.items():  # a mistake in any of them is a mistake
        try:
            plans[each] = build(Plan, _laid_over(content, above))
            check(plans[each], path)
        except PlanError as error:
            where = path.name if len(layers) == 1 else f"{path.name}, scale {each}"
            raise PlanError(f"{where}: {error}") from error
    runs = runs.resolve()  # processes elsewhere work in folders of their own
    fields = {key: getattr(plans[scale], key) for key in Plan.__dataclass_fields__}
    found = Experiment(name=path.stem, scale=scale, file=path, runs=runs, **fields, **options)
    _check_only(found)
    return found


def _find(name: str) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name).resolve()
        if not path.is_file():
            raise PlanError(f"there is no plan {name}")
        return path
    path = PLANS / f"{name}.yaml"
    if not path.is_file():
        # Commands that take all have replaced it by the names of all tables before.
        known = choices(name, names() if name == "all" else [*names(), "all"])
        raise PlanError(f"there is no experiment {name!r}; {known}; or the path of a YAML file")
    return path


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file with its bases under it; scales are not yet laid over the rest."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"{path.name} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{path.name}: expected keys and values, got {content!r}")
    if not isinstance(content.get("scales") or {}, dict):
        raise PlanError(f"{path.name}: scales: expected keys and values")
    base = content.pop("base", None)
    if base is None:
        content["scales"] = content.get("scales") or {"full": {}}
        return content
    if path in above:
        raise PlanError(f"{path.name}: base: the files are each other's base")
    below = _read(_find_base(path, base), (*above, path))
    layers, over = below["scales"], content.get("scales") or {}
    both = {name: _laid_over(layers.get(name, {}), over.get(name)) for name in {**layers, **over}}
    try:
        return _laid_over(below, content) | {"scales": both}
    except PlanError as error:
        raise PlanError(f"{path.name}: {error}") from error


def _find_base(path: Path, base: object) -> Path:
    near = [path.with_name(str(base)), path.with_name(f"{base}.yaml"), PLANS / f"{base}.yaml"]
    for each in near:
        if each.is_file() and each.resolve() != path.resolve():
            return each.resolve()
    raise PlanError(
        f"{path.name}: base: there is no {base!r} beside it; {choices(str(base), names())}"
    )


def _laid_over(below: dict[str, Any], above: Any) -> dict[str, Any]:
    """Merged, with the differences of both, or of the upper one alone if it begins with null."""
    above = {} if above is None else above
    if not isinstance(above, Mapping):
        raise PlanError(f"expected keys and values, got {above!r}")
    lists = [each.get("differences") or [] for each in (below, above)]
    for each in lists:
        if not isinstance(each, list):
            raise PlanError(f"differences: expected a list, got {each!r}")
    differences = [*lists[0], *lists[1]]
    if None in differences:
        differences = differences[differences.index(None) + 1 :]
    return merged(below, above) | {"differences": differences}


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


def grid_options(grid: dict[str, list[Any]]) -> list[str]:
    """The options of a grid, each by itself."""
    return [option for key in grid for option in key.split()]


def combinations(grid: dict[str, list[Any]]) -> Iterator[Options]:
    """The cells of a grid."""
    keys = [key.split() for key in grid]
    for values in itertools.product(*grid.values()):
        cell: Options = {}
        for names_, value in zip(keys, values, strict=True):
            cell |= zip(names_, value if len(names_) > 1 else [value], strict=True)
        yield cell


def _check_only(experiment: Experiment) -> None:
    cells = list(combinations(experiment.grid))
    known = {
        key: sorted({str(cell[key]) for cell in cells}) for key in grid_options(experiment.grid)
    }
    seeds = [str(seed) for seed in experiment.seeds if seed is not None]
    known = ({"seed": seeds} if seeds else {}) | known
    for option, values in experiment.only.items():
        if option not in known:
            raise PlanError(
                f"--only {option}: {experiment.name} has no such option in its grid; "
                + choices(option, sorted(known))
            )
        for value in values:
            if value not in known[option]:
                what = "final run" if known[option] is seeds else "cell"
                text = choices(value, known[option])
                raise PlanError(f"--only {option}={value}: no {what} has that; {text}")
    if not experiment.cells():
        raise PlanError(f"--only: no cell of {experiment.name} has {experiment.only}")
