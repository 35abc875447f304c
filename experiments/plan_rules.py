"""The rules for a plan that types cannot express."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments import train_interface
from experiments.schema import Plan, PlanError, Search, choices

PAPER = Path(__file__).resolve().parent / "paper.json"


def check(plan: Plan, file: Path) -> None:
    """Raise PlanError for a plan that cannot be run, or whose table would mislead."""
    _check_source(plan, file)
    _check_options(plan)
    _check_grid(plan)
    _check_seeds(plan)
    if plan.search is not None:
        _check_search(plan.search, plan)
    options = [option for key in plan.grid for option in key.split()]
    _all_among("columns", plan.columns, options)
    if plan.paper is not None:
        tables = json.loads(PAPER.read_text())
        _all_among("paper.table", [plan.paper.table], tables)
        _all_among("paper.keys", plan.paper.keys, options)


def _check_source(plan: Plan, file: Path) -> None:
    if bool(plan.model) == bool(plan.program):
        raise PlanError("model, program: name one of them, and not both")
    if plan.program:
        train_interface.program_words(plan.program, file)
        if plan.imports:
            raise PlanError("import: only train.py takes it, a program imports by itself")
        return
    models = train_interface.models()
    if plan.model not in models and "." not in plan.model:  # a class has a dotted path
        raise PlanError(f"model: {plan.model!r}; {choices(plan.model, models)}")
    options = {option for key in plan.grid for option in key.split()}
    if "head" not in options | set(plan.options):
        raise PlanError("head: name one in options, or several in the grid")


def _check_options(plan: Plan) -> None:
    """What a sweep gives to each run by itself cannot be an option."""
    given = {"default_root_dir": "--runs of sweep.py"}
    if plan.seeds != [None]:  # such runs get no seed
        given["seed"] = "seeds"
    for option, instead in given.items():
        if option in plan.options:
            raise PlanError(f"options.{option}: the sweep gives it to each run; use {instead}")


def _check_grid(plan: Plan) -> None:
    seen: set[str] = set()
    for key, values in plan.grid.items():
        options = key.split()
        for option in options:
            if option in seen:
                raise PlanError(f"grid.{key}: {option} is there twice")
            seen.add(option)
        if not values:
            raise PlanError(f"grid.{key}: expected at least one value")
        if any(values.count(value) > 1 for value in values):
            raise PlanError(f"grid.{key}: a value is there twice, in {values}")
        for value in values:
            _check_value(f"grid.{key}", value, len(options))


def _check_value(where: str, value: Any, options: int) -> None:
    parts = value if options > 1 else [value]
    if not isinstance(parts, list) or len(parts) != options:
        raise PlanError(f"{where}: expected {options} values together, got {value!r}")
    for part in parts:
        if not isinstance(part, str | int | float):
            raise PlanError(f"{where}: expected text or a number, got {part!r}")


def _check_seeds(plan: Plan) -> None:
    if not plan.seeds:
        raise PlanError("seeds: expected at least one")
    if len(set(plan.seeds)) < len(plan.seeds):
        raise PlanError(f"seeds: one is there twice, in {plan.seeds}")
    wrong = [seed for seed in plan.seeds if seed is not None and not 0 <= seed < 2**32]
    if wrong:
        raise PlanError(f"seeds: {wrong[0]}; a seed is at least 0 and below 2^32")


def _check_search(search: Search, plan: Plan) -> None:
    options = [option for key in plan.grid for option in key.split()]
    if search.fixed:
        heads = [cell for key, cell in plan.grid.items() if key == "head"]
        _check_fixed(search, heads[0] if heads else [plan.options.get("head")])
        return
    if bool(search.coarse) == bool(search.space):
        raise PlanError("search: name one of coarse, space and fixed")
    if not search.metric or search.metric.startswith("test/"):
        raise PlanError(f"search.metric: {search.metric!r}; name a metric, and no test metric")
    if search.better is None:
        raise PlanError("search.better: missing; choose from lower, higher")
    if search.seed is None:
        raise PlanError("search.seed: missing")
    if search.seed in plan.seeds:  # the winner of a search is no fair sample
        raise PlanError(f"search.seed: {search.seed} must not be one of the seeds {plan.seeds}")
    for option in [search.option, *search.space]:
        if option in options:
            raise PlanError(f"search: {option} is already in the grid")
    if search.space:
        if search.confirm:
            raise PlanError("search.confirm: goes with coarse values, not with space")
        _check_space(search)
    elif not search.option:
        raise PlanError("search.option: missing: the option that has the coarse values")
    elif len(set(search.coarse)) < len(search.coarse):
        raise PlanError(f"search.coarse: a value is there twice, in {search.coarse}")


def _check_fixed(search: Search, heads: Iterable[Any]) -> None:
    for option, value in search.fixed.items():
        missing = [head for head in heads if isinstance(value, dict) and head not in value]
        if missing:
            known = ", ".join(map(str, value))
            raise PlanError(
                f"search.fixed.{option}: no value for head {missing[0]!r}, only for {known}"
            )


def _check_space(search: Search) -> None:
    for option, space in search.space.items():
        where = f"search.space.{option}"
        if space.low > space.high:
            raise PlanError(f"{where}: low {space.low} is above high {space.high}")
        if space.log and space.low <= 0:
            raise PlanError(f"{where}: log needs a low above 0, got {space.low}")
        if space.step is not None and (space.step <= 0 or space.log):
            raise PlanError(f"{where}: step {space.step} must be above 0, and without log")
    if search.trials < 1:
        raise PlanError(f"search.trials: expected at least 1, got {search.trials}")
    if not 1 <= search.top <= search.trials:
        raise PlanError(f"search.top: expected 1 to {search.trials}, got {search.top}")


def _all_among(where: str, values: Iterable[str], known: Iterable[str]) -> None:
    listed = list(known)
    for value in values:
        if value not in listed:
            raise PlanError(f"{where}: {value!r}; {choices(value, listed)}")
