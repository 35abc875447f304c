"""Run folders on disk: finished, failed, stopped early or interrupted, and their numbers."""

from __future__ import annotations

import fcntl
import json
import math
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from catnat.files import write_whole
from experiments.plan import Run

_RECORDS = ("failed.json", "stopped.json")


def versions(run: Run) -> list[Path]:
    """The version_<k> folders of a run, newest first; for a figure its only folder."""
    found = [path for path in run.home.glob("version_*") if path.name[8:].isdigit()]
    return [*sorted(found, key=lambda path: -int(path.name[8:])), run.home]


def version(run: Run) -> Path | None:
    """The newest finished version: one with its numbers in metrics.json."""
    return next((path for path in versions(run) if _read_json(path / "metrics.json")), None)


def metrics(run: Run) -> dict[str, float] | None:
    """The numbers of a finished run. A null counts as NaN; lists and text are left out."""
    folder = version(run)
    found = _read_json(folder / "metrics.json") if folder else None
    if found is None:
        return None
    known = {key: math.nan if value is None else value for key, value in found.items()}
    return {key: float(v) for key, v in known.items() if isinstance(v, int | float)}


def config(run: Run) -> dict[str, Any]:
    """All options a finished run had, by group."""
    path = (version(run) or run.home) / "config.yaml"
    return dict(yaml.safe_load(path.read_text())) if path.is_file() else {}


def failure(run: Run) -> str | None:
    """Why a run was given up, None if it was not."""
    record = _read_json(run.home / "failed.json")
    return str(record.get("line")) if record and metrics(run) is None else None


def stopped(run: Run) -> dict[str, Any] | None:
    """The record of a run of a search that was stopped early, None if it was not."""
    return _read_json(run.home / "stopped.json") if metrics(run) is None else None


def counted(count: int) -> str:
    """1 run, 2 runs."""
    return "1 run" if count == 1 else f"{count} runs"


def done(run: Run) -> bool:
    """Whether nothing is left to do: finished, given up, or stopped early."""
    return metrics(run) is not None or failure(run) is not None or stopped(run) is not None


def running(run: Run) -> bool:
    """Whether a process holds the lock of a run; others that look at the same time do not."""
    try:
        with (run.home / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def ended_at(run: Run) -> float | None:
    """When a run was finished or given up, in seconds since 1970."""
    folder = version(run)
    paths = [folder / "metrics.json"] if folder else [run.home / name for name in _RECORDS]
    return next((path.stat().st_mtime for path in paths if path.is_file()), None)


def checkpoint(run: Run) -> Path | None:
    """The file from which an unfinished run goes on; None if there is none that is intact."""
    found = (path for folder in versions(run) for path in folder.glob("checkpoints/last.*"))
    newest = next(found, None)
    return newest if newest is not None and _is_intact(newest) else None


def interrupted(run: Run) -> bool:
    """Whether a run can go on from a checkpoint."""
    return metrics(run) is None and checkpoint(run) is not None


def _is_intact(path: Path) -> bool:
    """Whether a checkpoint can be read to its end: those of torch and SB3 are zip files."""
    if path.suffix not in (".ckpt", ".zip"):
        return path.is_file()
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def record_failure(run: Run, attempts: int, line: str) -> None:
    """Write down that a run was given up."""
    record = {"attempts": attempts, "line": line, "command": run.command}
    write_json(run.home / "failed.json", record)


def record_stop(run: Run, reason: str, **numbers: float) -> None:
    """Write down that a run of a search was stopped early."""
    write_json(run.home / "stopped.json", {"reason": reason, **numbers})


def forget_failures(runs: Iterable[Run]) -> None:
    """Let runs that were given up be tried again."""
    for run in runs:
        (run.home / "failed.json").unlink(missing_ok=True)


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def best(runs: Iterable[Run], metric: str, better: str | None, top: int = 1) -> list[Run]:
    """The runs with the best metrics, best first; those without a finite one do not count."""
    sign = -1 if better == "higher" else 1
    found = [(run, numbers) for run in runs if (numbers := metrics(run)) is not None]
    for run, numbers in found:
        check_metric(run, numbers, metric)
    values = [(sign * numbers[metric], run) for run, numbers in found]
    ranked = sorted((pair for pair in values if math.isfinite(pair[0])), key=lambda pair: pair[0])
    return [run for _, run in ranked[:top]]


def check_metric(run: Run, numbers: dict[str, float], metric: str) -> None:
    """Raise if a finished run does not have the metric of the search."""
    if metric not in numbers:
        known = ", ".join(numbers)
        raise ValueError(f"search.metric: {metric!r} is no number of {run.name}; it has {known}")


def curves(
    run: Run, tags: Iterable[str], points: int = 200, unfinished: bool = False
) -> Iterator[dict[str, Any]]:
    """Scalars over training, from the event files, as {tag, step, value}; at most so many each.

    Of a run that is not finished, if asked for, those up to where it has come.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    begun = (folder for folder in versions(run) if any(folder.glob("events.*")))
    folder = version(run) or (next(begun, None) if unfinished and not done(run) else None)
    if folder is None:
        return
    events = EventAccumulator(str(folder), {"scalars": points})
    events.Reload()
    known = events.Tags()["scalars"]
    for tag in tags:
        for event in events.Scalars(tag) if tag in known else ():
            yield {"tag": tag, "step": event.step, "value": event.value}


def _read_json(path: Path) -> dict[str, Any] | None:
    """The content of a file; None if there is none, half of one, or no mapping."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a record; a reader never sees a part of it."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
