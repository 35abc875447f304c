"""Runs, and the record of those that are done: ``<results>/<study>/runs.csv``, a row for each.

All options of a run and its seed identify it, except options that only observe. A row has the
options as columns, then metrics (their names have a ``/``), and how and where the run was made.
"""

import csv
import hashlib
import json
import re
import subprocess
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from catnat import __version__
from catnat.cli.names import Options
from catnat.sweeps.spellings import command_options

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
ABOUT = (
    "plans",
    "stage",
    "status",
    "note",
    "engine",
    "device",
    "commit",
    "data_source",
    "trial",
    "defaults",
)
Row = dict[str, Any]  # of a run that is done: options as text, metrics as numbers, and ABOUT it;
# an outcome is the part that is known where the run has ended, and empty if it is left for later
Rows = dict[str, Row]  # by the key of their run
_DEFAULTS = {"head_options.tail": "0"}  # no class has it as a default
Texts = dict[str, str]  # options as canonical texts


@dataclass(frozen=True)
class Family:
    """The defaults of runs of one model, with one kind of data.

    Attributes:
        base: the defaults now, and the last ones of options that are gone.
        digest: name of the defaults in the record.
        changes: the defaults that have changed since the first record of the family.
    """

    base: Texts = field(default_factory=dict)
    digest: str = ""
    changes: Texts = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One command: ``catnat`` with options, or a program of the plan's own.

    Attributes:
        options: all of them, the model and the seed too.
        plan: the plan that it belongs to.
        stage: "search" or "final".
        path: folders of modules that the options name.
        trial: the parameters of a trial of a search; empty outside a search by a sampler.
        family: the defaults of the options that are left out.
    """

    options: Options
    plan: str
    stage: str
    path: Sequence[str] = ()
    trial: str = ""
    family: Family = field(default_factory=Family)

    def __post_init__(self) -> None:
        """Refuse options that would be taken for other columns of a row."""
        for name in self.options:
            if (name in ABOUT and name not in OBSERVING) or "/" in name:
                raise ValueError(f"an option cannot be called {name}: the name is reserved")
            if "\r" in str(self.options[name]):
                raise ValueError(f"option {name} has a carriage return: {self.options[name]!r}")

    @property
    def key(self) -> str:
        """Equal for runs whose resolved options are equal."""
        return key_of(self.options, self.family.base)

    @property
    def name(self) -> str:
        """A name for a folder and for a line of text: the main options, and a digest of all."""
        shown = ("head", "num_latents", "num_categories", "variant", "theta", "env", "seed")
        words = [str(self.options[name]) for name in shown if name in self.options]
        text = re.sub(r"[^\w.+-]+", "_", "-".join([self.plan, self.stage, *words])).strip(".")
        changes = {x: y for x, y in self.family.changes.items() if x not in self.options}
        identity = key_of(self.options) + (json.dumps(changes, sort_keys=True) if changes else "")
        return f"{text}-{hashlib.sha1(identity.encode()).hexdigest()[:10]}"

    def arguments(self, folder: Path) -> list[str]:
        """The options as words."""
        options = self.options
        if "program" not in options:
            options = command_options(options)
        words = []
        for name, value in {**options, "default_root_dir": folder, "program": None}.items():
            values = value if name == "import" and isinstance(value, list) else [value]
            words += [f"--{name}={text_of(x)}" for x in values if x is not None]
        return words


def by_key(rows: Iterable[Row], plan: str = "", key: Callable[[Row], str] | None = None) -> Rows:
    """The rows of a study by the keys of their runs.

    Rows with one key were made at different commits, or for several plans; one that has finished
    counts, of this plan if there is one.
    """
    best_first = sorted(
        rows, key=lambda row: (not is_finished(row), plan not in row.get("plans", "").split())
    )
    indexed: Rows = {}
    for row in best_first:
        indexed.setdefault((key or key_of)(row), row)
    return indexed


def text_of(value: Any) -> str:
    """A value as the command line reads it: whole numbers and floats exactly."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def key_of(options: Options, base: Mapping[str, str] = {}) -> str:
    """The options that decide what a run learns and how it is tested, as one text.

    It is equal for a run and its row.

    Args:
        options: options of a run, or a row.
        base: defaults; options that have them are left out.
    """
    texts = {}
    for name, value in options.items():
        if "/" not in name and name not in OBSERVING and name not in ABOUT:
            text = canonical(value)
            # An empty text is that of an option that is not given.
            if text and text != base.get(name, _DEFAULTS.get(name)):
                texts[name] = text
    return json.dumps(texts, sort_keys=True)


def is_finished(row: Row) -> bool:
    """Whether a row has metrics, and is not that of a run that failed."""
    return row["status"] == "finished"


def metrics_of(row: Row) -> dict[str, float]:
    """The metrics of a row."""
    return {name: value for name, value in row.items() if "/" in name}


def canonical(value: Any) -> str:
    """One text for one value: 125 and 125.0 are equal, True and true; empty for None."""
    text = "" if value is None else str(value)
    try:
        number = float(text)
    except ValueError:
        return {"True": "true", "False": "false", "None": ""}.get(text, text)
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
    """The rows of a file; an empty list without a file."""
    return list(read_once(path))


def read_once(path: Path) -> tuple[Row, ...]:
    """The rows of a file; the same object as long as the file is unchanged."""
    if not path.is_file():
        return ()
    stat = path.stat()
    return _read(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=4)
def _read(path: Path, _state: tuple[int, ...]) -> tuple[Row, ...]:
    """The rows of a file in one state."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            text = file.read().replace("\r\n", "\n")
        return tuple(_parsed(path, text))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a file of rows: {error}") from None


def _parsed(path: Path, text: str) -> Iterator[Row]:
    before, carriage_return, _ = text.partition("\r")
    if carriage_return:
        raise ValueError(f"{path}, line {before.count(chr(10)) + 1}: a carriage return in a value")
    reader = csv.DictReader(StringIO(text, newline=""), strict=True)
    columns = list(reader.fieldnames or ())
    for column in columns:
        if columns.count(column) > 1:
            raise ValueError(f"{path}: column {column!r} appears twice")
        if column.startswith("\ufeff"):
            raise ValueError(f"{path} begins with a byte order mark: save it as UTF-8 without one")
    for line in reader:
        try:
            yield _row_of(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from None


def _row_of(line: dict[str, str]) -> Row:
    if None in line or None in line.values():
        raise ValueError("the number of values is not that of the columns")
    row: Row = {name: text for name, text in line.items() if text}
    if not row.keys() >= {"seed", "status"}:
        raise ValueError("not the row of a run: it has no seed or no status")
    numbers = {name: float(text) for name, text in metrics_of(row).items()}
    if is_finished(row) and not numbers:
        raise ValueError("the run has finished, but has no metrics")
    return row | numbers


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
    with lock(path, path.name):
        key = key_of(row)
        _write(path, [x for x in read(path) if is_finished(x) or key_of(x) != key] + [row])


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


@contextmanager
def claimed(run: Run, path: Path) -> Iterator[bool]:
    """Lock a run while it is done and its row is added to a file.

    Yields False if another sweep with this file does it. The system frees the lock of a process
    that is gone.
    """
    held = lock(path, run.name)
    try:
        held.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        held.release()


def lock(path: Path, name: str) -> FileLock:
    """A lock with a name, beside a file of rows."""
    folder = path.parent / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / name)


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
    if run.family.digest:
        about["defaults"] = run.family.digest
    if run.trial:
        about["trial"] = run.trial
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
