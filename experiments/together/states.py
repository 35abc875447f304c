"""States of groups of runs that were interrupted: ``together-X.pt`` in the folder of a table.

The list of its runs, with their commands, lies beside each state. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from catnat.files import write_whole
from experiments import runs
from experiments.plan import Run


def state_path(folder: Path, group: Sequence[Run]) -> Path:
    """The file of a group's state: another one if runs, their order or their options differ."""
    return folder / f"together-{hashlib.sha1(_record(group)).hexdigest()[:12]}.pt"


def save(path: Path, state: memoryview, group: Sequence[Run]) -> None:
    """Write a state and the list of its runs, the list first: no state is without a list."""
    try:
        write_whole(path.with_suffix(".json"), _record(group))
        write_whole(path, state)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def interrupted(folder: Path) -> dict[Path, list[Run]]:
    """The groups of a table that were interrupted, by their states; of a run, home and command."""
    found = {}
    for path in folder.glob("together-*.json"):
        try:
            record = [(Path(home), tuple(words)) for home, words in json.loads(path.read_text())]
        except (OSError, ValueError):
            forget(path)
            continue
        group = [Run({}, {}, None, home, home, words) for home, words in record]
        found[path.with_suffix(".pt")] = group
    return found


def forget(path: Path) -> None:
    """Remove the state of a group."""
    for suffix in (".json", ".pt"):
        path.with_suffix(suffix).unlink(missing_ok=True)


def forget_done(folder: Path) -> None:
    """Remove the states of groups whose runs are all done, by whichever engine."""
    for path, group in interrupted(folder).items():
        if all(map(runs.done, group)):
            forget(path)


def _record(group: Sequence[Run]) -> bytes:
    return json.dumps([[str(run.home), run.command] for run in group]).encode()
