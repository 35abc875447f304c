"""Runs, and the record of those that are done: ``results/<study>/runs.csv``, one row for each.

A run is known by all of its options and its seed, but for options that only observe. A row has the
options as columns, then metrics (their names have a ``/``), and how and where the run was made.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catnat import __version__

OBSERVING = {  # options that do not change what is learned, nor how it is tested
    *("accelerator", "capture", "device", "enable_progress_bar", "eval_every"),
    "log_every_n_steps",
    *("root", "data.root", "save_every", "val_check_interval"),
    *("fisher.every_n_steps", "fisher.num_samples"),
}
ABOUT = ("plans", "stage", "status", "note", "engine", "device", "commit", "data_source")
_DEFAULTS = {"head_options.tail": "0"}  # options that say what is the case without them


@dataclass(frozen=True)
class Run:
    """One command: ``catnat`` with options, or a program of the plan's own.

    Attributes:
        options: all of them, the model and the seed too.
        plan: the plan that it belongs to.
        stage: "search" or "final".
        path: folders of modules that the options name.
    """

    options: dict[str, Any]
    plan: str
    stage: str
    path: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse options that would be taken for other columns of a row."""
        for name in self.options:
            if (name in ABOUT and name not in OBSERVING) or "/" in name:
                raise ValueError(f"an option cannot be called {name}: a row has that for itself")

    @property
    def key(self) -> str:
        """Equal for equal runs."""
        return key_of(self.options)

    @property
    def name(self) -> str:
        """A name for a folder and for a line of text: what is special, and a digest of all."""
        shown = ("head", "num_latents", "num_categories", "variant", "theta", "env", "seed")
        words = [f"{self.options[name]}" for name in shown if name in self.options]
        text = re.sub(r"[^\w.+-]+", "_", "-".join([self.plan, self.stage, *words])).strip(".")
        return f"{text}-{hashlib.sha1(self.key.encode()).hexdigest()[:10]}"

    def arguments(self, folder: Path) -> list[str]:
        """The options as words."""
        options = {**self.options, "default_root_dir": folder, "program": None}
        modules = options.pop("import", None) or []
        modules = modules if isinstance(modules, list) else [modules]
        words = [f"--{name}={text_of(x)}" for name, x in options.items() if x is not None]
        return [*words, *(f"--import={module}" for module in modules)]

    def command(self, folder: Path) -> list[str]:
        """The whole command."""
        program = str(self.options.get("program", "-m catnat")).split()
        return [sys.executable, *program, *self.arguments(folder)]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the process that does the run."""
        folders = [os.environ.get("PYTHONPATH", ""), *self.path]
        return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


@dataclass
class Row:
    """A run that is done.

    Attributes:
        options: as text.
        metrics: of a run that has finished.
        about: plans (all that the run belongs to), stage, status ("finished" or "failed"), note
            (why it failed), engine, device, commit.
    """

    options: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """That of its run."""
        return key_of(self.options)

    @property
    def plans(self) -> list[str]:
        """All plans that it was made for."""
        return self.about.get("plans", "").split()

    @property
    def finished(self) -> bool:
        """Whether it has metrics."""
        return self.about.get("status") == "finished"


class Rows:
    """The rows of a study, by key.

    Args:
        rows: in the order of the file.
        plans: of rows with one key, which were made at different commits, that of the first of
            these plans counts.
    """

    def __init__(self, rows: list[Row], plans: Iterable[str] = ()) -> None:
        wanted = list(plans)
        self._by_key: dict[str, Row] = {}

        def rank(row: Row) -> int:
            places = (wanted.index(plan) for plan in row.plans if plan in wanted)
            return min(places, default=len(wanted))

        for row in sorted(rows, key=rank):
            self._by_key.setdefault(row.key, row)

    @property
    def first(self) -> list[Row]:
        """One row of each run."""
        return list(self._by_key.values())

    def find(self, run: Run) -> Row | None:
        """The row of a run, None if it is not done."""
        return self._by_key.get(run.key)


def text_of(value: Any) -> str:
    """A value as ``train.py`` reads it: whole numbers and floats exactly."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def key_of(options: dict[str, Any]) -> str:
    """All options that decide what a run learns and how it is tested, as one text."""
    kept = {}
    for name, value in options.items():
        text = _canonical(text_of(value))
        if name not in OBSERVING and text not in ("", "None") and text != _DEFAULTS.get(name):
            kept[name] = text
    return json.dumps(kept, sort_keys=True)


def _canonical(text: str) -> str:
    """One text for one value: 125 and 125.0 are equal, True and true."""
    if text in ("True", "False"):
        return text.lower()
    try:
        return str(int(text))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else repr(number)


# -- the file --------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    """The rows of a file, none if there is no file."""
    if not path.is_file():
        return []
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for column in ("seed", "status"):
            if column not in (reader.fieldnames or ()):
                raise ValueError(f"{path} has no column {column}")
        for number, line in enumerate(reader, 2):
            if None in line or None in line.values():
                raise ValueError(f"{path}, line {number}: not as many values as columns")
            given = {name: value for name, value in line.items() if value != ""}
            try:
                metrics = {name: float(x) for name, x in given.items() if "/" in name}
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            about = {name: given[name] for name in ABOUT if name in given}
            rest = {n: x for n, x in given.items() if "/" not in n and n not in ABOUT}
            found.append(Row(rest, metrics, about))
    return found


def add(path: Path, rows: list[Row]) -> None:
    """Add rows to a file; a row whose key is there takes its place if that one failed.

    Another process may do the same at the same time.
    """
    with _locked(path):
        known = read(path)
        new = {row.key for row in rows}
        kept = [row for row in known if row.finished or row.key not in new]
        write(path, kept + rows)


def write(path: Path, rows: list[Row]) -> None:
    """Write a whole file, under another name first."""
    options, metrics = (
        list(dict.fromkeys(name for row in rows for name in getattr(row, part)))
        for part in ("options", "metrics")
    )
    about = [name for name in ABOUT if any(name in row.about for row in rows)]
    columns = [*about, *sorted(options, key=lambda name: name == "seed"), *metrics]
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            numbers = {name: f"{value:.9g}" for name, value in row.metrics.items()}
            writer.writerow(row.about | row.options | numbers)
    partial.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def made(
    run: Run, metrics: dict[str, Any], note: str = "", engine: str = "", device: str = ""
) -> Row:
    """The row of a run that has ended here; without metrics it has failed."""
    numbers = {name: float(x) for name, x in metrics.items() if isinstance(x, (int, float))}
    about = {"plans": run.plan, "stage": run.stage, "status": "finished" if numbers else "failed"}
    more = {"note": note, "engine": engine, "device": device, "commit": commit()}
    more["data_source"] = str(metrics.get("data_source", ""))
    about |= {name: value for name, value in more.items() if value}
    given = {n: x for n, x in run.options.items() if n not in OBSERVING and x is not None}
    return Row({n: text_of(x) for n, x in given.items()}, numbers, about)


def commit() -> str:
    """The commit of the working directory, with + if files have been changed; else our version."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=7"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # git is not installed
        return f"catnat-{__version__}"
    return done.stdout.strip() or f"catnat-{__version__}"
