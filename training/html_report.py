"""``catnat report RUN [RUN ...]``: one HTML page about runs, which needs no other file."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from catnat.training.errors import UsageError, command_words
from catnat.training.html_charts import COLOURS, Chart
from catnat.training.html_style import SCRIPT, STYLE
from catnat.training.names import PlainParser
from catnat.training.recorded_run import RecordedRun, read_run

_GROUPS = {
    "Fisher matrix": ("fim",),
    "Evaluation": ("val", "eval", "test"),
    "Training": ("train", "rollout", "time"),
}


def report_command(argv: list[str]) -> int:
    """Write the page that a command line asks for, and say where it is."""
    parser = PlainParser(
        prog=f"{' '.join(command_words())} report",
        description="Writes one HTML page about runs, which needs no server and no other file: "
        "curves, pictures, options and metrics, with the runs side by side.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="[report.html]")
    options = parser.parse_args(argv)
    runs = [read_run(Path(each)) for each in dict.fromkeys(options.runs)]
    out = Path(options.out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from error
    print(f"report of {len(runs)} run{'s' * (len(runs) > 1)}: {out}", file=sys.stdout)
    return 0


def page(runs: list[RecordedRun]) -> str:
    """The page as HTML."""
    names = _names(runs)
    title = "Runs of catnat" if len(runs) > 1 else f"A run of catnat: {names[0]}"
    sections = [
        _overview(runs, names),
        _metrics(runs, names),
        *_curves(runs),
        _fisher_pictures(runs, names),
        _pictures(runs, names),
        _options(runs, names),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{_legend(names)}{''.join(sections)}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _names(runs: list[RecordedRun]) -> list[str]:
    """A short name for each run: the head where that is enough, else the folders that differ."""
    heads = [run.option("model.head") for run in runs]
    if all(heads) and len(set(heads)) == len(heads):
        return heads
    folders = [str(run.folder.resolve()) for run in runs]
    if len(runs) == 1:
        return ["/".join(runs[0].folder.resolve().parts[-3:])]
    return [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]


def _legend(names: list[str]) -> str:
    labels = (
        f'<label><input type="checkbox" checked data-run="{number}">'
        f'<i style="background:{COLOURS[number % len(COLOURS)]}"></i>'
        f"<span>{escape(name)}</span></label>"
        for number, name in enumerate(names)
    )
    return f'<nav class="legend">{"".join(labels)}</nav>'


def _table(header: list[str], rows: Iterable[list[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in header)
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(each)}</td>' for each in rest)}</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _section(title: str, content: str, said: str = "") -> str:
    said = f"<p>{escape(said)}</p>" if said else ""
    return f"<section><h2>{escape(title)}</h2>{said}{content}</section>" if content else ""


def _overview(runs: list[RecordedRun], names: list[str]) -> str:
    wanted = {"model.name": "model", "model.head": "head", "seed": "seed"}
    wanted |= {"data.name": "data", "data.env": "environment"}
    columns = {name: said for name, said in wanted.items() if any(run.option(name) for run in runs)}
    rows = []
    for name, run in zip(names, runs, strict=True):
        last = max((curve[-1][0] for curve in run.curves.values()), default=0)
        shown = [run.option(each) for each in columns]
        state = "finished" if run.metrics else "not finished"
        rows.append([name, *shown, f"{last:,}", f"{run.seconds:,.0f} s", state, str(run.folder)])
    header = ["run", *columns.values(), "last step", "time", "state", "folder"]
    return _section("Runs", _table(header, rows))


def _metrics(runs: list[RecordedRun], names: list[str]) -> str:
    tags = dict.fromkeys(tag for run in runs for tag in run.metrics)
    rows = [
        [tag, *(f"{run.metrics[tag]:.5g}" if tag in run.metrics else "" for run in runs),
         _said(tag, runs)]
        for tag in tags
    ]  # fmt: skip
    table = _table(["metric", *names, "meaning"], rows, "numbers") if rows else ""
    return _section("Metrics at the end", table)


def _said(tag: str, runs: list[RecordedRun]) -> str:
    return next((run.explanations[tag] for run in runs if run.explanations.get(tag)), "")


def _curves(runs: list[RecordedRun]) -> Iterator[str]:
    """A section of charts for each group of tags."""
    title_of = {group: title for title, groups in _GROUPS.items() for group in groups}
    tags = dict.fromkeys(tag for run in runs for tag in run.curves)
    for title in (*_GROUPS, "More"):
        mine = [tag for tag in tags if title_of.get(tag.split("/")[0], "More") == title]
        yield _section(title, _charts(mine, runs))


def _charts(tags: list[str], runs: list[RecordedRun]) -> str:
    """Charts of tags; a test has one value only, which the table of metrics shows."""
    charts = []
    for tag in tags:
        curves = {n: run.curves[tag] for n, run in enumerate(runs) if tag in run.curves}
        if tag.split("/")[0] != "test":
            charts.append(Chart(tag, _said(tag, runs), curves).html())
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _fisher_pictures(runs: list[RecordedRun], names: list[str]) -> str:
    tags = sorted({tag for run in runs for tag in run.pictures if tag.startswith("fim/")})
    strips = []
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        for tag in (tag for tag in tags if tag in run.pictures):
            drawn = "".join(
                f"<figure>{_image(content, f'{tag} of {name} at step {step}')}"
                f"<figcaption>step {step:,}</figcaption></figure>"
                for step, content in run.pictures[tag]
            )
            more = f" {tag.removeprefix('fim/').removesuffix('/mean')}" if len(tags) > 1 else ""
            strips.append(
                f'<div class="strip run-{number}"><h3>{escape(name + more)}</h3>'
                f'<div class="row">{drawn}</div></div>'
            )
    said = _said(tags[0], runs) if tags else ""
    return _section("The Fisher matrix during training", "".join(strips), said)


def _pictures(runs: list[RecordedRun], names: list[str]) -> str:
    tags = sorted({tag for run in runs for tag in run.pictures if not tag.startswith("fim/")})
    blocks = []
    for tag in tags:
        drawn = "".join(
            f'<figure class="run-{number}">{_image(run.pictures[tag][-1][1], f"{tag} of {name}")}'
            f"<figcaption>{escape(name)}, step {run.pictures[tag][-1][0]:,}</figcaption></figure>"
            for number, (name, run) in enumerate(zip(names, runs, strict=True))
            if tag in run.pictures
        )
        blocks.append(
            f"<h3>{escape(tag)}</h3><p>{escape(_said(tag, runs))}</p>"
            f'<div class="pictures">{drawn}</div>'
        )
    return _section("Pictures at the end", "".join(blocks))


def _image(content: bytes, said: str) -> str:
    kind = "gif" if content.startswith(b"GIF") else "png"
    data = base64.b64encode(content).decode()
    return f'<img alt="{escape(said)}" src="data:image/{kind};base64,{data}">'


def _options(runs: list[RecordedRun], names: list[str]) -> str:
    options = dict.fromkeys(name for run in runs for name in run.options)
    rows = {name: [run.option(name) for run in runs] for name in options}
    differ = [[name, *values] for name, values in rows.items() if len(set(values)) > 1]
    every = [[name, *values] for name, values in rows.items()]
    header = ["option", *names]
    parts = [_table(header, differ)] if differ else []
    if every:
        parts.append(f"<details><summary>All options</summary>{_table(header, every)}</details>")
    said = "Options that differ between the runs." if differ else ""
    return _section("Configuration", "".join(parts), said)
