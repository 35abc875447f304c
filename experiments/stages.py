"""The stages of a table: search coarsely, refine, then run all seeds. Each needs the one before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from experiments import runs
from experiments.plan import Experiment, Options, Run


@dataclass(frozen=True)
class Stage:
    """Runs that do not depend on each other.

    Attributes:
        name: what is done here.
        runs: all of them, finished or not.
        trials: how many more settings TPE has to draw, for each cell, in the order of cells().
    """

    name: str
    runs: list[Run]
    trials: list[int] = field(default_factory=list)

    @property
    def pending(self) -> list[Run]:
        """Runs that are neither finished nor given up."""
        return [run for run in self.runs if not runs.done(run)]

    @property
    def done(self) -> bool:
        """Whether the next stage can be known."""
        return not self.pending and not any(self.trials)


def stages(experiment: Experiment) -> Iterator[Stage]:
    """One after the other; ask for the next only when one is done."""
    cells, search = experiment.cells(), experiment.search or {}
    if searched(experiment) and "space" in search:
        found = [trials(experiment, cell) for cell in cells]
        missing = [max(0, int(search["trials"]) - len(each)) for each in found]
        yield Stage("search by TPE", [run for each in found for run in each], missing)
    elif searched(experiment):
        yield Stage("coarse search", [r for cell in cells for r in coarse(experiment, cell)])
        yield Stage("refined search", [r for cell in cells for r in refined(experiment, cell)])
    last = [run for cell in cells for run in final(experiment, cell)]
    yield Stage("seeds", sorted(last, key=lambda run: run.seed or 0))  # cut short, it has all cells


def open_stage(experiment: Experiment) -> Stage | None:
    """The first stage that is not done, None if all are."""
    return next((stage for stage in stages(experiment) if not stage.done), None)


def names(experiment: Experiment) -> list[str]:
    """All stages, whether they can be known or not."""
    if not searched(experiment):
        return ["seeds"]
    by_tpe = "space" in (experiment.search or {})
    return ["search by TPE", "seeds"] if by_tpe else ["coarse search", "refined search", "seeds"]


def searched(experiment: Experiment) -> bool:
    """Whether there is anything to search for."""
    return bool(experiment.search) and not (experiment.search or {}).get("fixed")


def coarse(experiment: Experiment, cell: Options) -> list[Run]:
    """The first stage of a cell."""
    search = experiment.search or {}
    return [_search_run(experiment, cell, value) for value in search["coarse"]]


def refined(experiment: Experiment, cell: Options) -> list[Run]:
    """The second stage of a cell, around the best of the first; none where all of it failed."""
    search = experiment.search or {}
    first = coarse(experiment, cell)
    ranked = runs.best(first, search["metric"], search["better"])
    if not ranked or not all(map(runs.done, first)):
        return []
    centre = ranked[0].settings[search["option"]]
    known = {run.folder for run in first}
    values = [float(f"{centre * factor:.3g}") for factor in search.get("factors", [])]
    made = [_search_run(experiment, cell, value) for value in values]
    return [run for run in made if run.folder not in known]


def final(experiment: Experiment, cell: Options) -> list[Run]:
    """All seeds with what was selected; none as long as nothing is."""
    chosen = selected(experiment, cell)
    return [
        experiment.run(cell, settings, seed, trial_name(settings) if _by_tpe(experiment) else "")
        for settings in chosen
        for seed in experiment.seeds
    ]


def selected(experiment: Experiment, cell: Options) -> list[Options]:
    """The settings of a cell: given, or the best of a search that is done; usually one."""
    search = experiment.search
    if not search:
        return [{}]
    if fixed := search.get("fixed"):
        return [{name: _of_head(value, cell) for name, value in fixed.items()}]
    tried = searching(experiment, cell)
    enough = len(tried) >= search["trials"] if _by_tpe(experiment) else bool(tried)
    if not enough or not all(map(runs.done, tried)):
        return []
    ranked = runs.best(tried, search["metric"], search["better"], search.get("top", 1))
    return [run.settings for run in ranked]


def searching(experiment: Experiment, cell: Options) -> list[Run]:
    """All runs of a cell's search so far."""
    if not searched(experiment):
        return []
    if _by_tpe(experiment):
        return trials(experiment, cell)
    return coarse(experiment, cell) + refined(experiment, cell)


def trials(experiment: Experiment, cell: Options) -> list[Run]:
    """The settings TPE has drawn for a cell, oldest first: each is in the trial.json of its run."""
    found = []
    for path in experiment.folder.glob("*/trial-*.json"):
        record = json.loads(path.read_text())
        if record["cell"] == cell:
            run = trial_run(experiment, cell, record["settings"])
            found.append((path.stat().st_mtime_ns, run.name, run))
    return [run for *_, run in sorted(found, key=lambda each: each[:2])]


def trial_run(experiment: Experiment, cell: Options, settings: Options) -> Run:
    """The run that tries settings."""
    search = experiment.search or {}
    more: Options = search.get("options", {})
    return experiment.run(cell, settings, search["seed"], trial_name(settings), **more)


def open_trial(experiment: Experiment, cell: Options, settings: Options) -> Run:
    """Write down settings that TPE has drawn, before they are tried."""
    run = trial_run(experiment, cell, settings)
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / f"trial-{cell.get('head', 'any')}.json"
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps({"cell": cell, "settings": settings}, indent=1) + "\n")
    partial.replace(path)
    return run


def trial_name(settings: Options) -> str:
    """A name that settings always get."""
    text = json.dumps(settings, sort_keys=True)
    return f"trial{hashlib.sha1(text.encode()).hexdigest()[:8]}"


def _search_run(experiment: Experiment, cell: Options, value: float) -> Run:
    search = experiment.search or {}
    more: Options = search.get("options", {})
    name = "search" if more else ""  # other runs than those of the last stage
    return experiment.run(cell, {search["option"]: value}, search["seed"], name, **more)


def _by_tpe(experiment: Experiment) -> bool:
    return searched(experiment) and "space" in (experiment.search or {})


def _of_head(value: Any, cell: Options) -> Any:
    return value[cell["head"]] if isinstance(value, dict) else value
