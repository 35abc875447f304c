"""The progress of plans.

catnat status plan.yaml --scale small
catnat status plans/*.yaml --only head=natural
"""

from catnat.sweeps.runs import is_finished
from catnat.sweeps.sweep import Sweep
from catnat.sweeps.words import plan_parser


def main(words: list[str]) -> int:
    """Print a line for each plan, and one for each run that failed."""
    args = plan_parser("status", __doc__).parse_args(words)
    for name in args.plans:
        sweep = Sweep.load(name, args, resolves=True)
        rows = sweep.rows()
        print(sweep.progress()[0])
        for run in sweep.plan.runs(rows):
            row = rows.get(run)
            if row and not is_finished(row):
                print(f"  failed: {sweep.folder_of(run).name}: {row.get('note', '')}")
    return 0
