"""Runs, and the record of those that are done: ``<results>/<study>/runs.csv``, a row for each.

A row has the options of a run as columns, then its metrics (their names have a ``/``), and how and
where the run was made. Options and seed identify a run, except options that only observe.
"""

import csv
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from filelock import FileLock

from catnat import __version__
from catnat.checks import require_choice
from catnat.cli.names import Options

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
ABOUT = (  # columns that are neither options nor metrics
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
_NAMING = ("head", "num_latents", "num_categories", "variant", "theta", "env", "seed")
_ALWAYS = {"head_options.tail": "0"}  # defaults that no class has
# Options and metrics of a run that is done, and how it was made. The outcome that an engine returns
# is a part of a row; it is empty if the run was stopped.
Row = dict[str, Any]
Texts = dict[str, str]  # options as canonical texts


@dataclass(frozen=True)
class Run:
    """One command: ``catnat`` with options, or a program of the plan's own.

    Attributes:
        options: all of them, the model and the seed too.
        plan: name of the plan.
        stage: "search" or "final".
        path: folders of modules that the options name.
        trial: parameters of the trial of a search as JSON; empty outside a search by a sampler.
    """

    options: Options
    plan: str
    stage: str
    path: Sequence[str] = ()
    trial: str = ""

    def __post_init__(self) -> None:
        """Refuse options that would be taken for other columns of a row."""
        for name, value in self.options.items():
            if (name in ABOUT and name not in OBSERVING) or "/" in name:
                raise ValueError(f"an option cannot be called {name}: the name is reserved")
            if "\r" in str(value):
                raise ValueError(f"option {name} has a carriage return: {value!r}")

    def name(self, changed_defaults: Mapping[str, str] = {}) -> str:
        """A name for a folder: the main options, and a digest of all and of changed defaults."""
        words = [str(self.options[name]) for name in _NAMING if name in self.options]
        text = re.sub(r"[^\w.+-]+", "_", "-".join([self.plan, self.stage, *words])).strip(".")
        changes = {x: y for x, y in changed_defaults.items() if x not in self.options}
        identity = key_of(self.options) + (json.dumps(changes, sort_keys=True) if changes else "")
        return f"{text}-{hashlib.sha1(identity.encode()).hexdigest()[:10]}"

    def arguments(self, folder: Path) -> list[str]:
        """The options as words of a command line."""
        options = self.options if "program" in self.options else command_options(self.options)
        words = []
        for name, value in {**options, "default_root_dir": folder, "program": None}.items():
            values = value if name == "import" and isinstance(value, list) else [value]
            words += [f"--{name}={text_of(x)}" for x in values if x is not None]
        return words

    def row(self, outcome: Row, defaults: str = "") -> Row:
        """The row of the run when it has ended; without metrics it has failed.

        Args:
            outcome: metrics, device, note and engine.
            defaults: digest of the defaults of options that are not given.
        """
        numbers = metrics_of(outcome)
        about = {name: outcome[name] for name in ABOUT if outcome.get(name)} | {
            "plans": self.plan,
            "stage": self.stage,
            "status": "finished" if numbers else "failed",
            "commit": commit(),
        }
        about |= {x: y for x, y in {"defaults": defaults, "trial": self.trial}.items() if y}
        texts = {
            name: text_of(value)
            for name, value in self.options.items()
            if name not in OBSERVING and value is not None
        }
        return about | texts | numbers


# -- options ---------------------------------------------------------------------------------------


def command_options(options: Options) -> Options:
    """The options of a plan as the command line spells them: optimizers and schedules by class.

    >>> command_options({"optimizer": "sgd", "lr_decay": 1.0})
    {'optimizer': 'torch.optim.SGD'}
    >>> list(command_options({"lr_schedule": "linear", "max_steps": 9}).values())
    [9, 'torch.optim.lr_scheduler.PolynomialLR', 9]
    """
    spelled = dict(options)
    schedule = spelled.pop("lr_schedule", "constant")
    require_choice(("constant", "linear"), lr_schedule=schedule)
    decay, decay_steps = spelled.pop("lr_decay", 1.0), spelled.pop("lr_decay_steps", 1000)
    if optimizer := spelled.get("optimizer"):
        classes = {"adam": "torch.optim.Adam", "sgd": "torch.optim.SGD"}
        spelled["optimizer"] = classes.get(optimizer, optimizer)
    if schedule == "linear":
        spelled["lr_scheduler"] = "torch.optim.lr_scheduler.PolynomialLR"
        spelled["lr_scheduler.total_iters"] = spelled.get("max_steps", 5000)
    if float(decay) != 1:
        spelled["lr_scheduler"] = "torch.optim.lr_scheduler.StepLR"
        spelled["lr_scheduler.gamma"] = decay
        spelled["lr_scheduler.step_size"] = decay_steps
    return spelled


def short_name(full_name: str) -> str:
    """The name of an option in plans and rows: without its group, except for data.seed.

    >>> short_name("model.num_latents"), short_name("data.seed")
    ('num_latents', 'data.seed')
    """
    return re.sub(r"^(model|data(?!\.seed$)|trainer)\.", "", full_name)


def text_of(value: Any) -> str:
    """A value as the command line reads it: whole numbers and floats exactly."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def canonical(value: Any) -> str:
    """One text for one value: 125 and 125.0 are equal, True and true; empty for None."""
    text = "" if value is None else str(value)
    try:
        number = float(text)
    except ValueError:
        return {"True": "true", "False": "false", "None": ""}.get(text, text)
    return str(int(number)) if number.is_integer() else repr(number)


def key_of(options: Mapping[str, Any], defaults: Mapping[str, str] = {}) -> str:
    """The options that decide what a run learns and how it is tested, as one text.

    Args:
        options: options of a run, or its row.
        defaults: options that have these values are left out.
    """
    texts = {}
    for name, value in options.items():
        if "/" not in name and name not in OBSERVING and name not in ABOUT:
            text = canonical(value)
            # An empty text is that of an option that is not given.
            if text and text != defaults.get(name, _ALWAYS.get(name)):
                texts[name] = text
    return json.dumps(texts, sort_keys=True)


# -- rows ------------------------------------------------------------------------------------------


def is_finished(row: Row) -> bool:
    """Whether a row has metrics, and is not that of a run that failed."""
    return row["status"] == "finished"


def metrics_of(row: Row) -> dict[str, float]:
    """The metrics of a row."""
    return {name: value for name, value in row.items() if "/" in name}


def by_key(
    rows: Iterable[Row], plan: str = "", key: Callable[[Row], str] = key_of
) -> dict[str, Row]:
    """Rows by the keys of their runs.

    Rows with one key were made at different commits, or for several plans. One that has finished
    counts, and one of this plan before others.
    """
    best_first = sorted(
        rows, key=lambda row: (not is_finished(row), plan not in row.get("plans", "").split())
    )
    indexed: dict[str, Row] = {}
    for row in best_first:
        indexed.setdefault(key(row), row)
    return indexed


def read_metrics(path: Path) -> Options:
    """The numbers that a run has written, by name, and what it says about itself."""
    try:
        metrics = json.loads(path.read_text())
        numbers = {name: float(x) for name, x in metrics.items() if isinstance(x, int | float)}
        return numbers | {name: metrics[name] for name in ABOUT if name in metrics}
    except (ValueError, AttributeError):
        raise ValueError(f"{path} has no metrics by name") from None


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


# -- the file --------------------------------------------------------------------------------------


def read(path: Path) -> tuple[Row, ...]:
    """The rows of a file, if it exists; the same object as long as the file is unchanged."""
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
        return tuple(_parse(path, text))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a file of rows: {error}") from None


def _parse(path: Path, text: str) -> Iterator[Row]:
    if text.startswith("\ufeff"):
        raise ValueError(f"{path} begins with a byte order mark: save it as UTF-8 without one")
    before, carriage_return, _ = text.partition("\r")
    if carriage_return:
        raise ValueError(f"{path}, line {before.count(chr(10)) + 1}: a carriage return in a value")
    lines = csv.reader(StringIO(text, newline=""), strict=True)
    columns = next(lines, [])
    for column in columns:
        if columns.count(column) > 1:
            raise ValueError(f"{path}: column {column!r} appears twice")
    for values in filter(None, lines):
        try:
            yield _row_of(columns, values)
        except ValueError as error:
            raise ValueError(f"{path}, line {lines.line_num}: {error}") from None


def _row_of(columns: list[str], values: list[str]) -> Row:
    if len(values) != len(columns):
        raise ValueError("the number of values is not that of the columns")
    row: Row = {x: y for x, y in zip(columns, values, strict=True) if y}
    if not row.keys() >= {"seed", "status"}:
        raise ValueError("not the row of a run: it has no seed or no status")
    numbers = {name: float(text) for name, text in metrics_of(row).items()}
    if is_finished(row) and not numbers:
        raise ValueError("the run has finished, but has no metrics")
    return row | numbers


def add(path: Path, row: Row) -> None:
    """Add a row to a file, in place of a failed one with its options.

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
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*about, *options, *last], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            numbers = {name: f"{value:.9g}" for name, value in metrics_of(row).items()}
            writer.writerow(row | numbers)
    partial.replace(path)


def lock(path: Path, name: str) -> FileLock:
    """A lock beside a file of rows; the system frees that of a process that is gone."""
    folder = path.parent / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / name)
