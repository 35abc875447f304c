"""Print the means of plans beside the paper's, and how our runs differ from the paper's.

    python paper/beside.py paper/plans/vae_adam.yaml --scale small

The paper's tables are in paper.json; beside.yaml says which one belongs to a plan.
"""

import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import yaml
from measures import PAPER, PRINTED

from catnat.checks import require_choice
from catnat.sweeps.plan import Plan
from catnat.sweeps.sweep import Sweep
from catnat.sweeps.tables import MISSING, Cell, cells_of
from catnat.sweeps.words import plan_parser

TABLES = yaml.safe_load((PAPER / "beside.yaml").read_text())


def published(plan: Plan, cell: dict[str, Any]) -> dict[str, Any]:
    """The paper's row for the options of a cell, with the true ELBO; empty if it has none."""
    for row in PRINTED[TABLES[plan.name]["table"]]:
        options = {name: value for name, value in row.items() if "/" not in name}
        if options.items() <= (plan.options | cell).items():
            return row | true_elbo(row)
    return {}


def true_elbo(row: dict[str, Any]) -> dict[str, Any]:
    """The ELBO of a row whose code subtracted N log K once per batch of 128, not once per image."""
    if "test/elbo_table" not in row:
        return {}
    log_prior = row["num_latents"] * math.log(row["num_categories"])
    return {"test/elbo": {"mean": row["test/elbo_table"]["mean"] - log_prior * (1 - 1 / 128)}}


def lines_of(plan: Plan, cell: Cell) -> Iterator[list[str]]:
    """The entries of a line for each metric of a cell that the paper has."""
    row = published(plan, cell.options)
    for metric in [metric for metric in plan.metrics if metric in row]:
        label, digits = plan.metrics[metric].label, plan.metrics[metric].digits
        values, theirs = cell.values(metric), row[metric]["mean"]
        ours = f"{fmean(values):.{digits}f}" if values else MISSING
        difference = f"{fmean(values) - theirs:+.{digits}f}" if values else MISSING
        numbers = [f"{len(values)}", ours, f"{theirs:.{digits}f}", difference]
        yield [*map(str, cell.options.values()), label, *numbers]


def main() -> None:
    """Print a Markdown table for each plan."""
    args = plan_parser("beside", __doc__).parse_args()
    for sweep in [Sweep.load(name, args) for name in args.plans]:
        require_choice(TABLES, plan=sweep.plan.name)
        options = map(sweep.plan.short, sweep.plan.cells[0])
        lines = [[*options, "metric", "n", "ours", "the paper's", "ours minus it"]]
        for cell in cells_of(sweep.plan, sweep.rows()):
            lines += lines_of(sweep.plan, cell)
        lines.insert(1, ["---"] * len(lines[0]))
        facts = [f"- {text}" for text in TABLES[sweep.plan.name]["differences"]]
        text = [f"| {' | '.join(line)} |" for line in lines]
        print(f"## {sweep.plan.title}", "", *facts, "", *text, "", sep="\n")


if __name__ == "__main__":
    main()
