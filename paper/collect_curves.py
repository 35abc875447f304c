"""Write the validation curves of a plan's runs to curves.csv beside their rows.

    python paper/collect_curves.py paper/plans/architecture.yaml --scale small --runs runs

A row is one validation of a run, with the options that differ between the runs of the plan. Curves
come from the event files in the folder of the runs, so that those of runs that were stopped are
there as well. Rows of the file whose runs are not in that folder stay.
"""

from __future__ import annotations

import sys

import pandas as pd

from catnat.sweeps.figures import read_curve
from catnat.sweeps.sweep import Sweep
from catnat.sweeps.words import plan_parser


def curves(sweep: Sweep) -> list[dict[str, str]]:
    """All validations of the runs that have begun."""
    plan = sweep.plan
    varied = list(dict.fromkeys([*plan.cells[0], *plan.searched, "max_steps", "seed"]))
    points = []
    for run in plan.runs(sweep.rows()):
        if run.stage == "final":
            options = {name: run.options.get(name) for name in varied}
            text = {name: "" if value is None else str(value) for name, value in options.items()}
            steps, losses = read_curve(sweep.folder_of(run), "val/loss")
            _, kls = read_curve(sweep.folder_of(run), "val/kl")
            for step, loss, kl in zip(steps, losses, kls, strict=False):
                numbers = {"val/loss": f"{loss:.3f}", "val/kl": f"{kl:.3f}"}
                points.append({**text, "step": str(int(step)), **numbers})
    return points


def main() -> int:
    """Merge the curves of each plan into its file."""
    args = plan_parser("curves", __doc__).parse_args()
    for name in args.plans:
        sweep = Sweep.load(name, args)
        path = sweep.rows_path.with_name("curves.csv")
        points = pd.DataFrame(curves(sweep))
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
