"""What run folders hold: finished, failed or interrupted, and the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from experiments.plan import Run


def versions(run: Run) -> list[Path]:
    """The version_<k> folders of a run, newest first; for a figure its only folder."""
    found = [path for path in run.home.glob("version_*") if path.name[8:].isdigit()]
    return [*sorted(found, key=lambda path: -int(path.name[8:])), run.home]


def version(run: Run) -> Path | None:
    """The newest finished version: one with its numbers in metrics.json."""
    return next((path for path in versions(run) if _read_json(path / "metrics.json")), None)


def metrics(run: Run) -> dict[str, float] | None:
    """The numbers of a finished run."""
    folder = version(run)
    return _read_json(folder / "metrics.json") if folder else None


def config(run: Run) -> dict[str, Any]:
    """All options a finished run had, by group."""
    path = (version(run) or run.home) / "config.yaml"
    return dict(yaml.safe_load(path.read_text())) if path.is_file() else {}


def failure(run: Run) -> str | None:
    """Why a run was given up, None if it was not."""
    record = _read_json(run.home / "failed.json")
    return str(record["line"]) if record and metrics(run) is None else None


def done(run: Run) -> bool:
    """Whether there is nothing left to do: finished, or given up."""
    return metrics(run) is not None or failure(run) is not None


def interrupted(run: Run) -> bool:
    """Whether it can go on from a checkpoint."""
    return metrics(run) is None and any(
        path.is_file() for folder in versions(run) for path in folder.glob("checkpoints/last.*")
    )


def record_failure(run: Run, attempts: int, line: str) -> None:
    """Write down that a run was given up."""
    text = json.dumps({"attempts": attempts, "line": line, "command": run.command}, indent=1)
    (run.home / "failed.json").write_text(text + "\n")


def forget_failures(runs: Iterable[Run]) -> None:
    """Let runs that were given up be tried again."""
    for run in runs:
        (run.home / "failed.json").unlink(missing_ok=True)


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def best(runs: Iterable[Run], metric: str, better: str, top: int = 1) -> list[Run]:
    """The runs with the best metrics, best first; those without a finite one do not count."""
    sign = -1 if better == "higher" else 1
    values = [(sign * float((metrics(run) or {}).get(metric, math.nan)), run) for run in runs]
    ranked = sorted((pair for pair in values if math.isfinite(pair[0])), key=lambda pair: pair[0])
    return [run for _, run in ranked[:top]]


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
    """The content of a file; None if there is none, or half of one."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
