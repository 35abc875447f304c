"""What the folder of a run holds: options, metrics, curves and pictures. Needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from catnat.training.errors import UsageError

Curve = list[tuple[int, float]]


@dataclass
class RecordedRun:
    """A run, read from its folder.

    Args:
        folder: of the run.
        options: by full name, such as model.head, as text.
        metrics: at the end of the run; empty if the run has not finished.
        curves: scalars by tag, as (step, value).
        pictures: by tag, as (step, PNG or GIF).
        explanations: a line for a tag, where the run has one.
        seconds: from the first value to the last.
    """

    folder: Path
    options: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    pictures: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    explanations: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def option(self, name: str) -> str:
        """The value of an option; empty if the run has none of this name."""
        return self.options.get(name, "")


def read_run(folder: Path) -> RecordedRun:
    """Read a run; a :class:`UsageError` says why a folder is none."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if not any(folder.glob("events.out.tfevents.*")):
        below = sorted({str(path.parent) for path in folder.rglob("events.out.tfevents.*")})
        meant = f"; did you mean {', '.join(below[:3])}?" if below else ""
        raise UsageError(f"{folder} is no run: it has no event file{meant}")
    run = RecordedRun(folder)
    run.options = _flat(_read(folder / "config.yaml", yaml.safe_load))
    found = _read(folder / "metrics.json", json.loads)
    run.metrics = {name: float(value) for name, value in found.items()}
    _read_events(run)
    return run


def _read(path: Path, load: Any) -> dict[str, Any]:
    """A file that holds a dictionary; nothing if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = load(path.read_text())
    except (ValueError, yaml.YAMLError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} should hold names and values, got {content!r}")
    return content


def _flat(options: dict[str, Any], before: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, dict) and value and before == "":
            flat |= _flat(value, f"{name}.")
        else:
            flat[f"{before}{name}"] = str(value)
    return flat


def _read_events(run: RecordedRun) -> None:
    import logging

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(run.folder), {"scalars": 0, "images": 0}).Reload()
    tags = events.Tags()
    times: list[float] = []
    for tag in sorted(tags["scalars"]):
        values = events.Scalars(tag)
        run.curves[tag] = [(each.step, each.value) for each in values]
        times += [each.wall_time for each in (values[0], values[-1])]
    for tag in sorted(tags["images"]):
        run.pictures[tag] = [(each.step, each.encoded_image_string) for each in events.Images(tag)]
    for tag in (*run.curves, *run.pictures):
        known = events.summary_metadata.get(tag)  # none for tags that have no explanation
        run.explanations[tag] = known.summary_description if known else ""
    run.seconds = max(times) - min(times) if times else 0.0


def thinned(curve: Curve, most: int = 400) -> Curve:
    """At most so many points of a curve: the lowest and the highest of each stretch of steps.

    >>> thinned([(0, 1.0), (1, 5.0), (2, math.nan), (3, 0.0), (4, 2.0), (5, 3.0)], 4)
    [(1, 5.0), (3, 0.0), (4, 2.0), (5, 3.0)]
    """
    finite = [point for point in curve if math.isfinite(point[1])]
    if len(finite) <= most:
        return finite
    size = math.ceil(len(finite) / (most // 2))
    kept = []
    for start in range(0, len(finite), size):
        part = finite[start : start + size]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept
