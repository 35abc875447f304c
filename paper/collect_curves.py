"""Write the validation curves of a plan's runs to curves.csv beside their rows.

    python paper/collect_curves.py paper/plans/architecture.yaml --scale small --runs runs

A row is one validation of a run, with the options that differ between the runs of the plan. Curves
come from the event files in the folder of the runs, so that those of runs that were stopped are
there as well. Rows of the file whose runs are not in that folder stay.
"""

from __future__ import annotations

import csv
import sys

from catnat.sweeps.figures import read_curve
from catnat.sweeps.sweep import Sweep, plan_parser

METRICS = ("val/loss", "val/kl")
Point = dict[str, str]


def curves(sweep: Sweep) -> list[Point]:
    """All validations of the runs that have begun."""
    plan = sweep.plan
    varied = list(dict.fromkeys([*plan.cells[0], *plan.searched]))
    rows = sweep.rows()
    points: list[Point] = []
    for run in plan.runs(rows):
        if run.stage == "final":
            options = {name: run.options.get(name) for name in (*varied, "max_steps", "seed")}
            text = {name: "" if value is None else str(value) for name, value in options.items()}
            folder = sweep.folder / run.name
            steps, *columns = (
                read_curve(folder, METRICS[0])[0],
                *(read_curve(folder, metric)[1] for metric in METRICS),
            )
            for step, *values in zip(steps, *columns, strict=False):
                numbers = (f"{value:.3f}" for value in values)
                named = zip(METRICS, numbers, strict=True)
                points.append({**text, "step": str(int(step)), **dict(named)})
    return points


def identity(point: Point) -> tuple[tuple[str, str], ...]:
    """The run and the step of a point."""
    return tuple(sorted((name, value) for name, value in point.items() if "/" not in name))


def main() -> int:
    """Merge the curves of each plan into its file."""
    args = plan_parser("curves", __doc__).parse_args()
    for name in args.plans:
        sweep = Sweep(name, args)
        path = sweep.rows_path.with_name("curves.csv")
        points: dict[tuple[tuple[str, str], ...], Point] = {}
        if path.is_file():
            with path.open(newline="") as file:
                points = {identity(point): point for point in csv.DictReader(file)}
        points |= {identity(point): point for point in curves(sweep)}
        if not points:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            columns = list(next(iter(points.values())))
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(points.values())
        partial.replace(path)
        print(f"{path}: {len(points)} validations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
