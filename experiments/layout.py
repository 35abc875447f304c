"""How a table looks, in Markdown and in LaTeX."""

from __future__ import annotations

import itertools
import math
from typing import Any

from experiments.plan import Experiment
from experiments.summary import Entry, Row

MISSING = "—"
_ARROWS = {"lower": " ↓", "higher": " ↑", None: ""}
_LATEX = {
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "θ": r"$\theta$",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    MISSING: "---",
}


def markdown(experiment: Experiment, rows: list[Row], facts: list[str]) -> str:
    """The whole file."""
    columns = _columns(experiment)
    lines = [f"# {experiment.title}", "", *(f"- {fact}" for fact in [*facts, _legend()])]
    if experiment.differences:
        lines += ["- Not as in the paper:", *(f"  - {each}" for each in experiment.differences)]
    lines.append("")
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [
            *(str(value) for value in row.cell.values()),
            *(_entry(experiment, row, metric, _markdown_entry) for metric in experiment.metrics),
            *_last_columns(experiment, row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def latex(experiment: Experiment, rows: list[Row], facts: list[str]) -> str:
    """A table for booktabs, with the facts as comments."""
    columns = [escaped(column) for column in _columns(experiment)]
    lines = [f"% {fact}" for fact in [*facts, *experiment.differences]]
    lines += [
        r"\begin{tabular}{" + "l" * len(columns) + "}",
        r"\toprule",
        " & ".join(columns) + r" \\",
    ]
    for _, group in itertools.groupby(rows, key=_without_head):
        lines.append(r"\midrule")
        for row in group:
            cells = [
                *(escaped(str(value)) for value in row.cell.values()),
                *(_entry(experiment, row, metric, _latex_entry) for metric in experiment.metrics),
                *(escaped(text) for text in _last_columns(experiment, row)),
            ]
            lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def settings(experiment: Experiment, row: Row) -> str:
    """What was selected for a cell; short where that is one number."""
    if not row.selected:
        return MISSING
    if len(row.selected) > 1:
        return f"the {len(row.selected)} best configurations"
    (chosen,) = row.selected
    if len(chosen) == 1:
        return f"{next(iter(chosen.values())):g}"
    return ", ".join(f"{experiment.short(name)} {value:.3g}" for name, value in chosen.items())


def escaped(text: str) -> str:
    """Text for LaTeX."""
    for character, replacement in _LATEX.items():
        text = text.replace(character, replacement)
    return text


def _legend() -> str:
    return (
        "Mean ± standard deviation over n runs (the paper's mean, ours minus it). Bold: the best "
        "of its group, and all that Welch's t-test does not tell from it (p ≥ 0.05); with a single "
        f"run there is no test. {MISSING}: no finished run."
    )


def _columns(experiment: Experiment) -> list[str]:
    options = [experiment.short(option) for option in experiment.cells()[0]]
    metrics = [f"{m['label']}{_ARROWS[m.get('better')]}" for m in experiment.metrics.values()]
    search = experiment.search or {}
    known = list(search.get("fixed") or [search.get("option", "settings")])
    searched = [experiment.short(known[0]) if len(known) == 1 else "settings"] if search else []
    return [*options, *metrics, *searched, "n", "notes"]


def _last_columns(experiment: Experiment, row: Row) -> list[str]:
    whole = row.finished == row.planned
    count = str(row.planned) if whole else f"{row.finished} of {row.planned}"
    chosen = [settings(experiment, row)] if experiment.search else []
    return [*chosen, count, "; ".join(row.notes)]


def _entry(experiment: Experiment, row: Row, metric: str, write: Any) -> str:
    entry = row.entries[metric]
    digits = experiment.metrics[metric].get("digits", 3)
    theirs = entry.paper.get("mean")
    if not entry.values:
        return MISSING if theirs is None else f"{MISSING} ({theirs:.{digits}f})"
    text: str = write(entry, digits)
    return text


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


def _without_head(row: Row) -> list[tuple[str, Any]]:
    return [(option, value) for option, value in row.cell.items() if option != "head"]
