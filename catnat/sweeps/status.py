"""The progress of plans.

catnat status plan.yaml --scale small
catnat status plans/*.yaml --only head=natural
"""

from __future__ import annotations

from catnat.sweeps.sweep import Sweep, plan_parser


def main(words: list[str]) -> int:
    """Print a line for each plan, and one for each run that failed."""
    args = plan_parser("status", __doc__).parse_args(words)
    for name in args.plans:
        sweep = Sweep(name, args)
        rows = sweep.rows()
        print(sweep.progress(rows))
        for run in sweep.plan.runs(rows):
            row = rows.find(run)
            if row and not row.finished:
                print(f"  failed: {run.name}: {row.about.get('note', '')}")
    return 0
