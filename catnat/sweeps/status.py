"""The progress of plans.

catnat status plan.yaml --scale small
catnat status plans/*.yaml --only head=natural
"""

from __future__ import annotations

from collections import Counter

from catnat.sweeps.runs import Rows, Run
from catnat.sweeps.sweep import Sweep, plan_parser


def main(words: list[str]) -> int:
    """Print a line for each plan, and one for each run that failed."""
    args = plan_parser("status", __doc__).parse_args(words)
    for name in args.plans:
        sweep = Sweep(name, args)
        plan = sweep.plan
        rows = sweep.rows()
        runs = plan.runs(rows, sweep.only)
        cells = plan.cells(sweep.only)
        text = f"{plan.label}: {counts(runs, rows)}"
        if searching := sum(not plan.selected(cell, rows) for cell in cells):
            text += f"; the searches of {searching} of {len(cells)} cells are not done"
        print(text)
        for run in runs:
            row = rows.find(run)
            if row and not row.finished:
                print(f"  failed: {run.name}: {row.about.get('note', '')}")
    return 0


def counts(runs: list[Run], rows: Rows) -> str:
    """Such as "3 of 5 final runs finished, 1 failed"."""
    parts = []
    for stage in dict.fromkeys(run.stage for run in runs):
        done = [rows.find(run) for run in runs if run.stage == stage]
        states = Counter(row.about["status"] for row in done if row)
        failed = f", {states['failed']} failed" if states["failed"] else ""
        parts.append(f"{states['finished']} of {len(done)} {stage} runs finished{failed}")
    return "; ".join(parts) or "no run yet"
