"""The table and the figure of compare.py."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare import Comparison

COLUMNS = ("output", "rate", "validation perplexity", "test perplexity", "accuracy", "n")
IN_TIME = ("tokens/s alone", "steps in equal time", "test perplexity in equal time", "n in time")


def write_table(comparison: Comparison) -> None:
    """Write runs.csv, curves.csv, table.csv and table.md from the runs that are done."""
    out, results = comparison.given.out, comparison.results
    names = ("val/perplexity", "test/perplexity", "test/accuracy")
    runs = [[*run, *(each.get(name) for name in names)] for run, each in results.items()]
    write_csv(out / "runs.csv", ("output", "rate", "seed", "steps", *names), runs)
    points = [
        (*run, step, value)
        for run, each in results.items()
        for step, value in each["curves"].get("val/perplexity", ())
    ]
    write_csv(out / "curves.csv", ("output", "rate", "seed", "steps", "step", "perplexity"), points)
    rows = [row_of(output, comparison) for output in comparison.given.outputs]
    write_csv(out / "table.csv", (*COLUMNS, *IN_TIME), rows)
    lines = [(*COLUMNS, *IN_TIME), ["---"] * len(COLUMNS + IN_TIME), *rows]
    text = "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
    (out / "table.md").write_text(text)


def row_of(output: str, comparison: Comparison) -> list[Any]:
    """A row of the table; "" for what is not known yet."""
    given, rate = comparison.given, comparison.best(output)
    speed = comparison.speeds().get(output)
    in_time = comparison.steps_in_equal_time().get(output, 0)
    full, short = (
        [each for run, each in comparison.results.items() if run_is(run, output, rate, steps)]
        for steps in (given.steps, in_time)
    )
    edge = rate and rate in (min(given.rates), max(given.rates))
    return [
        output,
        f"{rate:g}" + ("" if not edge else " (edge)" if not beyond(comparison, output) else ""),
        spread(each["val/perplexity"] for each in full),
        spread(each["test/perplexity"] for each in full),
        spread((100 * each["test/accuracy"] for each in full), " %"),
        len(full),
        f"{speed['tokens/s']:,.0f}" if speed else "",
        in_time or "",
        spread(each["test/perplexity"] for each in short),
        len(short),
    ]


def run_is(run: Any, output: str, rate: float, steps: int) -> bool:
    """Whether a run is one of these."""
    return bool(run.output == output and run.rate == rate and run.steps == steps)


def beyond(comparison: Comparison, output: str) -> bool:
    """Whether rates on both sides of the best one are known."""
    best = comparison.best(output)
    rates = {run.rate for run in comparison.results if run.output == output}
    return min(rates) < best < max(rates)


def spread(values: Iterable[float], unit: str = "") -> str:
    """Mean and standard deviation."""
    known = list(values)
    if not known:
        return ""
    more = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.2f}{more}{unit}"


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a file whole."""
    partial = path.with_suffix(".partial")
    with open(partial, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    partial.replace(path)


def draw(comparison: Comparison) -> None:
    """Draw the validation perplexity against steps and against seconds, to figure.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    speeds = comparison.speeds()
    for output in comparison.given.outputs:
        rate = comparison.best(output)
        for run, each in comparison.results.items():
            if run.seed == 0 and run_is(run, output, rate, comparison.given.steps):
                steps, values = zip(*each["curves"]["val/perplexity"], strict=True)
                style = {"softmax": "k-", "adaptive softmax": "k--"}.get(output, "-")
                left.plot(steps, values, style, label=output)
                if output in speeds:
                    right.plot([n * speeds[output]["step"] for n in steps], values, style)
    left.set(xlabel="steps", ylabel="validation perplexity, one seed", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    right.set(xlabel="seconds of training, alone on the device")
    if left.lines:
        left.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(comparison.given.out / "figure.png", dpi=150)
    plt.close(figure)
