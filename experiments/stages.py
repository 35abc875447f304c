"""The stages of a cell: search coarsely, refine, then run all seeds. Each needs the one before.

Cells do not wait for each other: a cell goes on to its seeds when its own search is done.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from experiments import runs
from experiments.plan import Experiment, Run
from experiments.schema import Options, Search


@dataclass(frozen=True)
class Stage:
    """Runs of a cell that do not depend on each other.

    Attributes:
        name: for lines of text.
        runs: all that are known, finished or not.
        missing: how many more settings TPE has to draw.
    """

    name: str
    runs: list[Run]
    missing: int = 0

    @property
    def pending(self) -> list[Run]:
        """Runs that still have to be done."""
        return [run for run in self.runs if not runs.done(run)]


def stages(experiment: Experiment, cell: Options) -> list[Stage]:
    """All stages of a cell; those that are not yet known are empty."""
    last = Stage("seeds", final(experiment, cell))
    if not searched(experiment):
        return [last]
    if by_tpe(experiment):
        found = trials(experiment, cell)
        return [Stage("search by TPE", found, trials_wanted(experiment) - len(found)), last]
    first = Stage("coarse search", coarse(experiment, cell))
    return [first, Stage("refined search", refined(experiment, cell)), last]


def present(experiment: Experiment, cell: Options) -> Stage | None:
    """The first stage of a cell that is not done, None if all are."""
    every = stages(experiment, cell)
    return next((stage for stage in every if stage.pending or stage.missing > 0), None)


def known(experiment: Experiment) -> list[Run]:
    """All runs of a table that are known, cell by cell."""
    every = (stage for cell in experiment.cells() for stage in stages(experiment, cell))
    return [run for stage in every for run in stage.runs]


def planned(experiment: Experiment, cell: Options) -> int:
    """How many runs a cell will have had in the end, as far as that is known."""
    search = experiment.search
    every = stages(experiment, cell)
    if search is None or len(every) == 1:
        return len(every[0].runs)
    *before, last = every
    finished = present(experiment, cell) is None
    seeds = len(last.runs) if last.runs or finished else search.top * len(experiment.final_seeds())
    if by_tpe(experiment):
        return trials_wanted(experiment) + seeds
    coarse_, refined_ = before
    later = len([factor for factor in search.factors if factor != 1])
    return len(coarse_.runs) + (len(refined_.runs) if not coarse_.pending else later) + seeds


def searched(experiment: Experiment) -> bool:
    """Whether there is anything to search for."""
    return experiment.search is not None and not experiment.search.fixed


def by_tpe(experiment: Experiment) -> bool:
    """Whether settings are drawn, not listed."""
    return searched(experiment) and bool(_search(experiment).space)


def is_search(experiment: Experiment, run: Run) -> bool:
    """Whether a run is one of a search: no other has the seed of the search."""
    return searched(experiment) and run.seed == _search(experiment).seed


def coarse(experiment: Experiment, cell: Options) -> list[Run]:
    """The first stage of a cell."""
    return [_search_run(experiment, cell, value) for value in _search(experiment).coarse]


def refined(experiment: Experiment, cell: Options) -> list[Run]:
    """The second stage of a cell, around the best of the first; none where all of it failed."""
    search = _search(experiment)
    first = coarse(experiment, cell)
    if not all(map(runs.done, first)):
        return []
    ranked = runs.best(first, search.metric, search.better)
    if not ranked:
        return []
    centre = ranked[0].settings[search.option]
    values = [float(f"{centre * factor:.3g}") for factor in search.factors]
    made = {run.folder: run for run in (_search_run(experiment, cell, v) for v in values)}
    before = {run.folder for run in first}
    return [run for folder, run in made.items() if folder not in before]


def final(experiment: Experiment, cell: Options) -> list[Run]:
    """The seeds asked for with the settings selected; none as long as nothing is."""
    return [
        experiment.run(cell, settings, seed, trial_name(settings) if by_tpe(experiment) else "")
        for settings in selected(experiment, cell)
        for seed in experiment.final_seeds()
    ]


def selected(experiment: Experiment, cell: Options) -> list[Options]:
    """The settings of a cell: given, or the best of a search that is done; usually one."""
    search = experiment.search
    if search is None:
        return [{}]
    if search.fixed:
        head = (experiment.options | cell).get("head")
        return [{name: _of_head(value, head) for name, value in search.fixed.items()}]
    tried = searching(experiment, cell)
    enough = len(tried) >= trials_wanted(experiment) if by_tpe(experiment) else bool(tried)
    if not enough or not all(map(runs.done, tried)):
        return []
    top = len(tried) if search.confirm else search.top
    ranked = [run.settings for run in runs.best(tried, search.metric, search.better, top)]
    if ranked and search.confirm:
        return [_confirmed(experiment, cell, ranked)]
    return ranked


def _confirmed(experiment: Experiment, cell: Options, ranked: list[Options]) -> Options:
    """The first settings whose runs with all seeds end no worse on average than their search did.

    All seeds of the plan count, whichever of them were asked for. Runs that are not done, or
    failed, say nothing against their settings. If all settings end worse, those whose runs end
    best.
    """
    search = _search(experiment)
    sign = -1 if search.better == "higher" else 1
    ends = []
    for settings in ranked:
        finals = [experiment.run(cell, settings, seed) for seed in experiment.seeds]
        numbers = [runs.metrics(run) for run in finals]
        if None in numbers:
            return settings
        (trial,) = (run for run in searching(experiment, cell) if run.settings == settings)
        end = sum(sign * (each or {})[search.metric] for each in numbers) / len(numbers)
        if end <= sign * (runs.metrics(trial) or {})[search.metric]:  # not where it is NaN
            return settings
        ends.append((math.inf if math.isnan(end) else end, settings))
    return min(ends, key=lambda each: each[0])[1]


def searching(experiment: Experiment, cell: Options) -> list[Run]:
    """All runs of a cell's search so far."""
    if not searched(experiment):
        return []
    if by_tpe(experiment):
        return trials(experiment, cell)
    return coarse(experiment, cell) + refined(experiment, cell)


def at_edge(experiment: Experiment, cell: Options) -> bool:
    """Whether the selected value is the least or the greatest of those tried, of at least three."""
    search = experiment.search
    if search is None or not searched(experiment) or not search.option:
        return False
    tried = {run.settings[search.option] for run in searching(experiment, cell)}
    chosen = [each[search.option] for each in selected(experiment, cell)]
    return len(tried) > 2 and any(each in (min(tried), max(tried)) for each in chosen)


def trials(experiment: Experiment, cell: Options) -> list[Run]:
    """The settings TPE has drawn for a cell, oldest first: each is in the trial.json of its run."""
    found = []
    for path in experiment.folder.glob("*/trial-*.json"):
        record = json.loads(path.read_text())
        if record["cell"] == cell:
            run = trial_run(experiment, cell, record["settings"])
            found.append((path.stat().st_mtime_ns, run.name, run))
    return [run for *_, run in sorted(found, key=lambda each: each[:2])]


def trials_wanted(experiment: Experiment) -> int:
    """How many trials a search has; a small space has no more than its points."""
    search = _search(experiment)
    points = math.prod(space.size for space in search.space.values())
    return int(min(search.trials, points))


def trial_run(experiment: Experiment, cell: Options, settings: Options) -> Run:
    """The run that tries settings."""
    search = _search(experiment)
    return experiment.run(cell, settings, search.seed, trial_name(settings), **search.options)


def open_trial(experiment: Experiment, cell: Options, settings: Options) -> Run:
    """Write down settings that TPE has drawn, before they are tried."""
    run = trial_run(experiment, cell, settings)
    path = run.folder / f"trial-{cell.get('head', 'any')}.json"
    runs.write_json(path, {"cell": cell, "settings": settings})
    return run


def trial_name(settings: Options) -> str:
    """A name that settings always get."""
    text = json.dumps(settings, sort_keys=True)
    return f"trial{hashlib.sha1(text.encode()).hexdigest()[:8]}"


def _search(experiment: Experiment) -> Search:
    assert experiment.search is not None
    return experiment.search


def _search_run(experiment: Experiment, cell: Options, value: float) -> Run:
    search = _search(experiment)
    name = "search" if search.options else ""  # other runs than those of the last stage
    return experiment.run(cell, {search.option: value}, search.seed, name, **search.options)


def _of_head(value: Any, head: Any) -> Any:
    return value[head] if isinstance(value, dict) else value
