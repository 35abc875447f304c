"""How a table looks, in Markdown and in LaTeX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from experiments.plan import Experiment
from experiments.schema import Options
from experiments.summary import Entry, Row

MISSING = "—"
EDGE = "†"
_ARROWS = {"lower": " ↓", "higher": " ↑", None: ""}
_ESCAPES = {
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "θ": r"$\theta$",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "±": r"$\pm$",
    "≥": r"$\geq$",
    EDGE: r"$^\dagger$",
    MISSING: "---",
}


@dataclass(frozen=True)
class Words:
    """How a language writes text and numbers."""

    plain: Callable[[str], str]
    entry: Callable[[Entry, int], str]


def markdown(experiment: Experiment, rows: list[Row], facts: list[str]) -> str:
    """The whole file: the table as the paper has it, where that differs, and all there is."""
    words = Words(str, _markdown_entry)
    said = [*facts, caption(experiment, rows)]
    lines = [f"# {experiment.title}", "", *(f"- {fact}" for fact in said)]
    if experiment.differences:
        lines += ["- Not as in the paper:", *(f"  - {each}" for each in experiment.differences)]
    tables = [_long(experiment, rows, words)]
    if experiment.columns:
        tables.insert(0, _wide(experiment, rows, words))
    for header, *body in tables:
        lines += ["", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
        lines += [f"| {' | '.join(cells)} |" for cells in body]
    return "\n".join(lines) + "\n"


def latex(experiment: Experiment, rows: list[Row], facts: list[str]) -> str:
    """A table for booktabs with its caption, and the facts as comments."""
    draw = _wide if experiment.columns else _long
    header, *body = draw(experiment, rows, Words(escaped, _latex_entry))
    lines = [f"% {fact}" for fact in [*facts, *experiment.differences]]
    text = escaped(f"{experiment.title}. {caption(experiment, rows)}")
    lines += [r"\begin{table}", rf"\caption{{{text}}}", rf"\label{{tab:{experiment.name}}}"]
    lines += [r"\centering"]
    lines += [r"\begin{tabular}{" + "l" * len(header) + "}", r"\toprule", _latex_line(header)]
    first = header.index("head") if "head" in header else 0
    for _, group in itertools.groupby(body, key=lambda cells: cells[:first]):
        lines += [r"\midrule", *map(_latex_line, group)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def settings(experiment: Experiment, row: Row) -> str:
    """What was selected for a cell; short where that is one number."""
    if not row.selected:
        return MISSING
    if len(row.selected) > 1:
        return f"the {len(row.selected)} best configurations"
    (chosen,) = row.selected
    if len(chosen) == 1:
        (value,) = chosen.values()
        return str(value) if isinstance(value, str) else f"{value:g}"
    return ", ".join(f"{experiment.short(name)} {value:.3g}" for name, value in chosen.items())


def escaped(text: str) -> str:
    """Text for LaTeX."""
    for character, replacement in _ESCAPES.items():
        text = text.replace(character, replacement)
    return text


def title(experiment: Experiment, cell: Options, options: Iterable[str]) -> str:
    """Some values of a cell in words: "gray, N = 10"."""
    parts = [
        cell[option]
        if isinstance(cell[option], str)
        else f"{experiment.short(option)} = {cell[option]}"
        for option in options
    ]
    return ", ".join(parts)


def caption(experiment: Experiment, rows: list[Row]) -> str:
    """What the numbers, the bold ones and the marks are."""
    counts = sorted({row.finished for row in rows if row.finished})
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else "".join(map(str, counts))
    lines = [
        f"Mean ± standard deviation (with n - 1) over n = {many or 0} runs",
        " (the paper's mean, ours minus it). " if experiment.paper else ". ",
    ]
    if any(entry.bold for row in rows for entry in row.entries.values()):
        lines.append(
            "Bold: the best of its group, and all that a test does not tell from it "
            "(p ≥ 0.05 after Holm's method over all tests of the table): Welch's t-test, or "
            "the rank test of Mann and Whitney where standard deviations differ by more than a "
            "factor of 10. A cell is not bold if only its own larger spread hides the difference; "
            "with a single run there is no test. "
        )
    if any(row.at_edge for row in rows):
        lines.append(f"{EDGE}: the selected value is at the edge of those searched. ")
    return "".join(lines) + f"{MISSING}: no finished run."


def _long(experiment: Experiment, rows: list[Row], words: Words) -> list[list[str]]:
    """One line for each cell, with everything; the header first."""
    lines = [[words.plain(column) for column in _columns(experiment)]]
    for row in rows:
        cell = [words.plain(str(value)) for value in row.cell.values()]
        entries = [_entry(experiment, row, metric, words) for metric in experiment.metrics]
        last = [words.plain(text) for text in _last_columns(experiment, row)]
        lines.append([*cell, *entries, *last])
    return lines


def _wide(experiment: Experiment, rows: list[Row], words: Words) -> list[list[str]]:
    """The first metric alone, with some options across, as the paper has it; the header first."""
    metric = next(iter(experiment.metrics))
    down = [option for option in rows[0].cell if option not in experiment.columns]
    by_place = {(_key(row, down), _key(row, experiment.columns)): row for row in rows}
    lines, columns = (_in_order(keys) for keys in zip(*by_place, strict=True))
    titles = [
        title(experiment, dict(zip(experiment.columns, each, strict=True)), experiment.columns)
        for each in columns
    ]
    table = [[words.plain(text) for text in [*map(experiment.short, down), *titles]]]
    for line in lines:
        found = [by_place.get((line, column)) for column in columns]
        entries = [_marked(experiment, row, metric, words) if row else "" for row in found]
        table.append([*(words.plain(str(value)) for value in line), *entries])
    return table


def _marked(experiment: Experiment, row: Row, metric: str, words: Words) -> str:
    """An entry, with a mark if its settings are at the edge of the search."""
    entry = _entry(experiment, row, metric, words)
    return entry + words.plain(EDGE) if row.at_edge and row.entries[metric].values else entry


def _key(row: Row, options: Iterable[str]) -> tuple[Any, ...]:
    return tuple(row.cell[option] for option in options)


def _in_order(keys: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Without repetitions; numbers from small to large, words as they come."""
    known = list(dict.fromkeys(keys))
    words = list(dict.fromkeys(value for key in known for value in key))
    return sorted(known, key=lambda key: [words.index(v) if isinstance(v, str) else v for v in key])


def _columns(experiment: Experiment) -> list[str]:
    options = [experiment.short(option) for option in experiment.cells()[0]]
    metrics = [
        f"{each.label or name}{_ARROWS[each.better]}" for name, each in experiment.metrics.items()
    ]
    search = experiment.search
    if search is None:
        return [*options, *metrics, "n", "notes"]
    known = list(search.fixed) or [search.option]
    name = experiment.short(known[0]) if known != [""] and len(known) == 1 else "settings"
    return [*options, *metrics, name, "n", "notes"]


def _last_columns(experiment: Experiment, row: Row) -> list[str]:
    whole = row.finished == row.planned
    count = str(row.planned) if whole else f"{row.finished} of {row.planned}"
    mark = EDGE if row.at_edge else ""
    chosen = [settings(experiment, row) + mark] if experiment.search else []
    return [*chosen, count, "; ".join(row.notes)]


def _entry(experiment: Experiment, row: Row, metric: str, words: Words) -> str:
    entry = row.entries[metric]
    digits = experiment.metrics[metric].digits
    theirs = entry.paper.get("mean")
    if not entry.values:
        return words.plain(MISSING) + ("" if theirs is None else f" ({theirs:.{digits}f})")
    return words.entry(entry, digits)


def _markdown_entry(entry: Entry, digits: int) -> str:
    text = f"{entry.mean:.{digits}f}"
    if not math.isnan(entry.std):
        text += f" ± {entry.std:.{digits}f}"
    text = f"**{text}**" if entry.bold else text
    return text + _beside(entry, digits)


def _latex_entry(entry: Entry, digits: int) -> str:
    text = f"{entry.mean:.{digits}f}"
    if not math.isnan(entry.std):
        text += rf" \pm {entry.std:.{digits}f}"
    text = rf"$\mathbf{{{text}}}$" if entry.bold else f"${text}$"
    beside = _beside(entry, digits).strip()
    return rf"{text} {{\scriptsize ${beside}$}}" if beside else text


def _beside(entry: Entry, digits: int) -> str:
    """The paper's mean, and ours minus it."""
    if "mean" not in entry.paper:
        return ""
    return f" ({entry.paper['mean']:.{digits}f}, {entry.difference:+.{digits}f})"


def _latex_line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"
