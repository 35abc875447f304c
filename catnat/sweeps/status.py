"""How far plans are.

catnat status plan.yaml --scale small
catnat status plans/*.yaml --cells        # each cell
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from catnat.sweeps.runs import Rows, Run
from catnat.sweeps.sweep import Sweep, add_plan_options


def main(argv: list[str] | None = None) -> int:
    """Print it."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("catnat status", description=description, allow_abbrev=False)
    add_plan_options(parser)
    parser.add_argument("--cells", action="store_true", help="a line for each cell")
    args = parser.parse_args(argv)
    try:
        for name in args.plans:
            print("\n".join(lines(Sweep(name, args), args.cells)))
    except ValueError as error:
        print(f"catnat status: {error}", file=sys.stderr)
        return 2
    return 0


def lines(sweep: Sweep, each_cell: bool) -> list[str]:
    """One line for a plan, and one for each cell if asked for."""
    plan, rows = sweep.plan, sweep.rows()
    known = plan.runs(rows, sweep.only)
    cells = plan.cells(sweep.only)
    open_cells = sum(not plan.selected(cell, rows) for cell in cells)
    said = [f"{plan.name}, {plan.scale}: {counts(known, rows)}"]
    if open_cells:
        said[0] += f"; the searches of {open_cells} of {len(cells)} cells are not done"
    for run in known:
        row = rows.find(run)
        if row is not None and not row.finished:
            said.append(f"  failed: {run.name}: {row.about.get('note', '')}")
    for cell in cells if each_cell else []:
        runs = [*plan.search_runs(cell, rows), *plan.final_runs(cell, rows)]
        words = " ".join(f"{name}={value}" for name, value in cell.items())
        said.append(f"  {words}: {counts(runs, rows)}")
    return said


def counts(known: list[Run], rows: Rows) -> str:
    """Such as "3 of 5 final runs finished, 1 failed"."""
    parts = []
    for stage in dict.fromkeys(run.stage for run in known):
        found = [rows.find(run) for run in known if run.stage == stage]
        states = Counter("" if row is None else row.about["status"] for row in found)
        text = f"{states['finished']} of {len(found)} {stage} runs finished"
        parts.append(text + (f", {states['failed']} failed" if states["failed"] else ""))
    return "; ".join(parts) or "no run yet"


if __name__ == "__main__":
    sys.exit(main())
