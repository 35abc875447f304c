"""Runs, and the record of those that are done: ``<results>/<study>/runs.csv``, a row for each.

All options of a run and its seed identify it, except options that only observe. A row has the
options as columns, then metrics (their names have a ``/``), and how and where the run was made.
"""

import csv
import fcntl
import hashlib
import json
import os
import re
import subprocess
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from catnat import __version__
from catnat.cli.options import Options

OBSERVING = {  # options that change neither what is learned nor how it is tested
    "accelerator",
    "capture",
    "data.root",
    "device",
    "enable_progress_bar",
    "eval_every",
    "fisher.every_n_steps",
    "fisher.num_samples",
    "log_every_n_steps",
    "root",
    "save_every",
    "val_check_interval",
}
ABOUT = ("plans", "stage", "status", "note", "engine", "device", "commit", "data_source")
Row = dict[str, Any]  # of a run that is done: options as text, metrics as numbers, and ABOUT it;
# an outcome is the part that is known where the run has ended, and empty if it is left for later
Rows = dict[str, Row]  # by the key of their run
_DEFAULTS = {"head_options.tail": "0"}  # a run with this value equals one without the option


@dataclass(frozen=True)
class Run:
    """One command: ``catnat`` with options, or a program of the plan's own.

    Attributes:
        options: all of them, the model and the seed too.
        plan: the plan that it belongs to.
        stage: "search" or "final".
        path: folders of modules that the options name.
    """

    options: Options
    plan: str
    stage: str
    path: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse options that would be taken for other columns of a row."""
        for name in self.options:
            if (name in ABOUT and name not in OBSERVING) or "/" in name:
                raise ValueError(f"an option cannot be called {name}: the name is reserved")

    @property
    def key(self) -> str:
        """Equal for equal runs."""
        return key_of(self.options)

    @property
    def name(self) -> str:
        """A name for a folder and for a line of text: the main options, and a digest of all."""
        shown = ("head", "num_latents", "num_categories", "variant", "theta", "env", "seed")
        words = [str(self.options[name]) for name in shown if name in self.options]
        text = re.sub(r"[^\w.+-]+", "_", "-".join([self.plan, self.stage, *words])).strip(".")
        return f"{text}-{hashlib.sha1(self.key.encode()).hexdigest()[:10]}"

    def arguments(self, folder: Path) -> list[str]:
        """The options as words."""
        words = []
        for name, value in {**self.options, "default_root_dir": folder, "program": None}.items():
            values = value if name == "import" and isinstance(value, list) else [value]
            words += [f"--{name}={text_of(x)}" for x in values if x is not None]
        return words


def by_key(rows: Iterable[Row], plan: str = "") -> Rows:
    """The rows of a study by the keys of their runs.

    Rows with one key were made at different commits, or for several plans; one that has finished
    counts, of this plan if there is one.
    """
    best_first = sorted(
        rows, key=lambda row: (not is_finished(row), plan not in row.get("plans", "").split())
    )
    indexed: Rows = {}
    for row in best_first:
        indexed.setdefault(key_of(row), row)
    return indexed


def text_of(value: Any) -> str:
    """A value as the command line reads it: whole numbers and floats exactly."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def key_of(options: Options) -> str:
    """All options that decide what a run learns and how it is tested, as one text.

    It is equal for a run and its row.
    """
    texts = {}
    for name, value in options.items():
        if "/" not in name and name not in OBSERVING and name not in ABOUT:
            text = _canonical(str(value))
            if text not in ("", "None", _DEFAULTS.get(name)):
                texts[name] = text
    return json.dumps(texts, sort_keys=True)


def is_finished(row: Row) -> bool:
    """Whether a row has metrics, and is not that of a run that failed."""
    return row["status"] == "finished"


def metrics_of(row: Row) -> dict[str, float]:
    """The metrics of a row."""
    return {name: value for name, value in row.items() if "/" in name}


def _canonical(text: str) -> str:
    """One text for one value: 125 and 125.0 are equal, True and true."""
    try:
        number = float(text)
    except ValueError:
        return text.lower() if text in ("True", "False") else text
    return str(int(number)) if number.is_integer() else repr(number)


# -- words of commands -----------------------------------------------------------------------------


def make_parser(command: str, doc: str | None) -> ArgumentParser:
    """A parser for ``catnat <command>``, with the option that takes a part of the runs."""
    parser = ArgumentParser(
        f"catnat {command}",
        description=doc,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE[,VALUE]",
        help="the part with these values of options, or with seed=1,2",
    )
    return parser


def read_pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Words such as NAME=VALUE of an option."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in pairs:
            raise ValueError(f"{option} {word}: expected name=value, and a name once")
        pairs[name] = value
    return pairs


# -- the file --------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    """The rows of a file, none if there is no file."""
    if not path.is_file():
        return []
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for number, line in enumerate(reader, 2):
            try:
                if None in line or None in line.values():
                    raise ValueError("not as many values as columns")
                row = {name: text for name, text in line.items() if text}
                if not row.keys() >= {"seed", "status"}:
                    raise ValueError("not the row of a run: it has no seed or no status")
                rows.append(row | {name: float(text) for name, text in metrics_of(row).items()})
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return rows


def read_metrics(path: Path) -> Options:
    """The numbers that a run has written, by name, and what it says about itself."""
    try:
        metrics = json.loads(path.read_text())
        numbers = {name: float(x) for name, x in metrics.items() if isinstance(x, int | float)}
        return numbers | {name: metrics[name] for name in ABOUT if name in metrics}
    except (ValueError, AttributeError):
        raise ValueError(f"{path} has no metrics by name") from None


def add(path: Path, row: Row) -> None:
    """Add a row to a file, in place of a failed one with its key.

    Other processes may do the same at the same time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        key = key_of(row)
        _write(path, [x for x in read(path) if is_finished(x) or key_of(x) != key] + [row])
    finally:
        os.close(folder)


def _write(path: Path, rows: list[Row]) -> None:
    """Write a file, under another name first."""
    names = dict.fromkeys(name for row in rows for name in row)
    about = [name for name in ABOUT if name in names]
    last = ["seed", *metrics_of(names)]
    options = [name for name in names if name not in about + last]
    columns = [*about, *options, *last]
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            numbers = {name: f"{value:.9g}" for name, value in metrics_of(row).items()}
            writer.writerow(row | numbers)
    partial.replace(path)


def claim(run: Run, path: Path) -> IO[str] | None:
    """A lock on a run, None if another sweep with this file of rows does it or has done it.

    The lock lasts as long as a process has the file open.
    """
    file = lock_path(run, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.open("w")
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not any(is_finished(row) and key_of(row) == run.key for row in read(path)):
            return lock
    lock.close()
    return None


def lock_path(run: Run, path: Path) -> Path:
    """The file that is locked while a run is done whose row will be in the file ``path``."""
    return path.parent / ".locks" / run.name


def make_row(run: Run, outcome: Row) -> Row:
    """The row of a run that has ended, with this outcome; without metrics it has failed."""
    options = {
        name: text_of(value)
        for name, value in run.options.items()
        if name not in OBSERVING and value is not None
    }
    numbers = metrics_of(outcome)
    about = {
        "plans": run.plan,
        "stage": run.stage,
        "status": "finished" if numbers else "failed",
        "commit": commit(),
    }
    reported = {name: outcome[name] for name in ABOUT if outcome.get(name)}
    return reported | about | options | numbers


@cache
def commit() -> str:
    """The commit of the working directory, with + if files have been changed; else our version.

    It is that of the first call: what is checked out later did not make the rows.
    """
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=7"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # git is not installed
        text = ""
    return text or f"catnat-{__version__}"
