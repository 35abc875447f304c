"""Match rows to runs when plans and rows leave options to their defaults.

``<results>/<study>/defaults.yaml`` records the defaults that the rows of a study were made with, so
that a row stops counting where a default has changed since. An option that is new changes no row.
An option that is gone, or whose value is left to the class (null), has its last default.
"""

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml

from catnat.cli.names import Options
from catnat.sweeps.runs import (
    OBSERVING,
    Row,
    Run,
    Texts,
    by_key,
    canonical,
    key_of,
    lock,
    short_name,
)

# Options with equal values of these have equal defaults: they are a family.
_FAMILY = ("program", "model", "data", "env")
_CONTEXT = (*_FAMILY, "import", "max_steps", "max_epochs", "max_time", "total_steps", "device")
_OF_A_RUN = ("seed_everything", "default_root_dir", "ckpt_path", "config", "class_path")
_NO_DEFAULTS = {*OBSERVING, *_CONTEXT, *_OF_A_RUN}
_HEADER = """\
# Defaults of the options that the rows beside this file leave out; sweeps write it.
# rows: the defaults of rows that name none; families: all defaults of a model.
"""


def resolve(arguments: Sequence[str]) -> Options:
    """All options of a command line by their full names; a ValueError if it is wrong."""
    from catnat.cli import main

    return main.resolve(list(arguments))


def family_of(options: Mapping[str, Any]) -> str:
    """The name of the family of a run or a row."""
    return " ".join(f"{name}={options[name]}" for name in _FAMILY if options.get(name))


@dataclass(frozen=True)
class Family:
    """The defaults of runs of one model, with one kind of data.

    Attributes:
        latest: the defaults now, and the last ones of options that are gone.
        first: the defaults that were recorded first.
        now: the defaults of the classes now; empty if they are not known.
    """

    latest: Texts
    first: Texts
    now: Texts

    @cached_property
    def digest(self) -> str:
        """The name of the defaults in the record."""
        content = json.dumps(self.now, sort_keys=True)
        return hashlib.sha1(content.encode()).hexdigest()[:8] if self.now else ""

    @cached_property
    def changed(self) -> Texts:
        """The defaults that have changed since the first record."""
        return {x: y for x, y in self.now.items() if y != self.first.get(x, y)}


class Defaults:
    """The defaults of the runs of a study, now and when its rows were made.

    Args:
        path: file of the record.
        resolves: whether the defaults now are those of the classes, which imports PyTorch and
            Lightning; otherwise they are the last ones of the record.
    """

    def __init__(self, path: Path, resolves: bool = False) -> None:
        self.path = path
        self.resolves = resolves
        self._record = self._read()
        self._families: dict[str, Family] = {}

    def family(self, options: Options) -> Family:
        """The family of a run."""
        name = family_of(options)
        if name not in self._families:
            recorded = [self._record["defaults"][x] for x in self._record["families"].get(name, ())]
            first: Texts = {}
            latest: Texts = {}
            for texts in recorded:
                first = texts | first
                latest |= texts
            now = self._resolve(options) if self.resolves and "program" not in options else {}
            now = {option: text or latest.get(option, "") for option, text in now.items()}
            self._families[name] = Family(latest | now, first, now)
        return self._families[name]

    def _resolve(self, options: Options) -> Texts:
        """The defaults of a family now; none if they cannot be found out here."""
        run = Run({name: options[name] for name in _CONTEXT if name in options}, "", "")
        try:
            resolved = resolve(run.arguments(Path("runs")))
        except ValueError:  # a module that is not installed; a sweep checks its options apart
            return {}
        defaults: Texts = {}
        for full_name, value in resolved.items():
            name = short_name(full_name)
            if name not in _NO_DEFAULTS and not name.startswith(("fisher.", "checkpoint.")):
                # Lightning has options of the same name as a model, which are empty.
                defaults[name] = canonical(value) or defaults.get(name, "")
        return defaults

    def key(self, run: Run) -> str:
        """A text that is equal for runs, and rows, whose resolved options are equal."""
        return key_of(run.options, self.family(run.options).latest)

    def key_of_row(self, row: Row, family: Family) -> str:
        """The key of the run that has made a row."""
        digest = row.get("defaults") or self._record["rows"].get(family_of(row), "")
        if digest in ("", family.digest):
            return key_of(row, family.latest)
        # No run has defaults that are not in the record.
        then = self._record["defaults"].get(digest, {"defaults of the row": digest})
        # An option without a default differs from one that has one now.
        changed = {x: y or "null" for x, y in then.items() if y != family.latest.get(x)}
        return key_of(changed | row, family.latest)

    # -- the file ------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        """The record: the digest of rows without one, digests by family, defaults by digest."""
        if not self.path.is_file():
            return {"rows": {}, "families": {}, "defaults": {}}
        try:
            content = yaml.load(self.path.read_text(), getattr(yaml, "CSafeLoader", yaml.Loader))
            return {name: dict(content[name]) for name in ("rows", "families", "defaults")}
        except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path} cannot be read: {error}") from None

    def record(self, options: Options) -> str:
        """The digest of the defaults of a run, for its row; new defaults are added to the file."""
        name = family_of(options)
        family = self.family(options)
        if not family.digest or family.digest in self._record["families"].get(name, ()):
            return family.digest
        with lock(self.path, "defaults"):
            self._record = self._read()
            self._record["defaults"][family.digest] = family.now
            digests = self._record["families"].setdefault(name, [])
            if family.digest not in digests:
                digests.append(family.digest)
            partial = self.path.with_suffix(".partial")
            text = yaml.safe_dump(self._record, sort_keys=False, allow_unicode=True)
            partial.write_text(_HEADER + text)
            partial.replace(self.path)
        return family.digest


class Rows:
    """The rows of a study, found by the runs of a plan.

    Args:
        rows: all rows.
        plan: name of the plan, whose rows count before those of other plans.
        defaults: defaults of the options that runs and rows leave out.
        without: keys of failed runs that do not count as done.
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        plan: str = "",
        defaults: Defaults | None = None,
        without: Container[str] = (),
    ) -> None:
        self.defaults = defaults or Defaults(Path())
        self._plan = plan
        self._without = without
        self._rows: dict[str, list[Row]] = {}  # by family
        for row in rows:
            self._rows.setdefault(family_of(row), []).append(row)
        self._indexed: dict[str, dict[str, Row]] = {}  # by family and key

    def get(self, run: Run) -> Row | None:
        """The row of a run that is done."""
        name = family_of(run.options)
        if name not in self._rows:
            return None
        if name not in self._indexed:
            key_of_row = partial(self.defaults.key_of_row, family=self.defaults.family(run.options))
            self._indexed[name] = by_key(self._rows[name], self._plan, key_of_row)
        key = self.defaults.key(run)
        return None if key in self._without else self._indexed[name].get(key)

    def __iter__(self) -> Iterator[Row]:
        return (row for rows in self._rows.values() for row in rows)
