"""Write the validation curves of a plan's runs to curves.csv beside their rows.

    python paper/collect_curves.py paper/plans/architecture.yaml --scale small --runs runs

A row is one validation of a run, with the options that differ between the runs of the plan. Curves
come from the event files in the folder of the runs, so that those of runs that were stopped are
there as well. Rows of the file whose runs are not in that folder stay. ``--values information``
adds further values of validations, which a model may log as val/information.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pandas as pd

from catnat.sweeps.figures import read_curve
from catnat.sweeps.sweep import Sweep
from catnat.sweeps.words import plan_parser


def curves(sweep: Sweep, values: Sequence[str]) -> list[dict[str, str]]:
    """All validations of the runs that have begun, with values such as val/loss."""
    plan = sweep.plan
    varied = list(dict.fromkeys([*plan.cells[0], *plan.searched, "max_steps", "seed"]))
    points = []
    for run in plan.runs(sweep.rows()):
        if run.stage == "final":
            options = {name: run.options.get(name) for name in varied}
            text = {name: "" if value is None else str(value) for name, value in options.items()}
            read = [read_curve(sweep.folder_of(run), value) for value in values]
            for step, *numbers in zip(read[0][0], *(column for _, column in read), strict=False):
                shown = dict(zip(values, (f"{number:.3f}" for number in numbers), strict=True))
                points.append({**text, "step": str(int(step)), **shown})
    return points


def main() -> int:
    """Merge the curves of each plan into its file."""
    parser = plan_parser("curves", __doc__)
    parser.add_argument("--values", nargs="+", default=[], help="beside loss and kl")
    args = parser.parse_args()
    values = [f"val/{name}" for name in ("loss", "kl", *args.values)]
    for name in args.plans:
        sweep = Sweep.load(name, args)
        path = sweep.rows_path.with_name("curves.csv")
        points = pd.DataFrame(curves(sweep, values))
        if path.is_file():
            before = pd.read_csv(path, dtype=str, keep_default_na=False)
            points = pd.concat([before, points])
        if points.empty:
            continue
        options = [column for column in points if "/" not in column]
        points = points.fillna("").drop_duplicates(options, keep="last")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        points.to_csv(partial, index=False, lineterminator="\n")
        partial.replace(path)
        print(f"{path}: {len(points)} validations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
