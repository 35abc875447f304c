"""The progress of plans.

catnat status plan.yaml --scale small
catnat status plans/*.yaml --cells        # a line for each cell
"""

from __future__ import annotations

from collections import Counter

from catnat.sweeps.runs import Rows, Run
from catnat.sweeps.sweep import Sweep, plan_parser


def main(words: list[str]) -> int:
    """Print it."""
    parser = plan_parser("status", __doc__)
    parser.add_argument("--cells", action="store_true", help="a line for each cell")
    args = parser.parse_args(words)
    for name in args.plans:
        print("\n".join(lines(Sweep(name, args), args.cells)))
    return 0


def lines(sweep: Sweep, with_cells: bool) -> list[str]:
    """One line for a plan, one for each run that failed, and one for each cell if asked for."""
    plan, rows = sweep.plan, sweep.rows()
    runs = plan.runs(rows, sweep.only)
    cells = plan.cells(sweep.only)
    result = [f"{plan.name}, {plan.scale}: {counts(runs, rows)}"]
    if open_cells := sum(not plan.selected(cell, rows) for cell in cells):
        result[0] += f"; the searches of {open_cells} of {len(cells)} cells are not done"
    for run in runs:
        row = rows.find(run)
        if row and not row.finished:
            result.append(f"  failed: {run.name}: {row.about.get('note', '')}")
    for cell in cells if with_cells else []:
        options = " ".join(f"{name}={value}" for name, value in cell.items())
        cell_runs = [*plan.search_runs(cell, rows), *plan.final_runs(cell, rows)]
        result.append(f"  {options}: {counts(cell_runs, rows)}")
    return result


def counts(runs: list[Run], rows: Rows) -> str:
    """Such as "3 of 5 final runs finished, 1 failed"."""
    parts = []
    for stage in dict.fromkeys(run.stage for run in runs):
        done = [rows.find(run) for run in runs if run.stage == stage]
        states = Counter(row.about["status"] for row in done if row)
        failed = f", {states['failed']} failed" if states["failed"] else ""
        parts.append(f"{states['finished']} of {len(done)} {stage} runs finished{failed}")
    return "; ".join(parts) or "no run yet"
