"""Defaults of the options that plans and rows leave out.

``<results>/<study>/defaults.yaml`` records the defaults that the rows of a study were made with, so
that a row stops counting as finished where a default has changed since. An option that is new
changes no row. An option that is gone, or whose value is left to the class (null), has its last
default.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from catnat.sweeps.runs import OBSERVING, Family, canonical, key_of

Options = dict[str, Any]  # values by names
Texts = dict[str, str]  # values as canonical texts, by names

# Options that decide which defaults the others have: with the first, options form a family.
_FAMILY = ("program", "model", "data", "env")
_CONTEXT = (*_FAMILY, "import", "max_steps", "max_epochs", "max_time", "total_steps", "device")
_OF_A_RUN = ("seed_everything", "default_root_dir", "ckpt_path", "config", "class_path")
_GROUPS = ("model.", "data.", "trainer.")
_OBSERVING_GROUPS = ("fisher.", "checkpoint.")


def resolve(arguments: Sequence[str]) -> Options:
    """All options of a command line by their full names, checked.

    This is what sweeps need of the command line. A ValueError says what is wrong with it.
    """
    from catnat.cli import main

    return main.resolve(list(arguments))


def family_of(options: Mapping[str, Any]) -> str:
    """The name of the family of a run or a row."""
    return " ".join(f"{name}={options[name]}" for name in _FAMILY if options.get(name))


class Defaults:
    """The defaults of the runs of a study, now and when its rows were made.

    Args:
        path: file of the record.
        resolves: whether the defaults now are found out, which imports PyTorch and Lightning;
            otherwise they are the last ones of the record.
    """

    def __init__(self, path: Path, resolves: bool = True) -> None:
        self.path = path
        self.resolves = resolves
        self._families: dict[str, Family] = {}
        self._now: dict[str, Texts] = {}
        self._changed: dict[tuple[str, str], Texts] = {}
        self._read()

    def _read(self) -> None:
        """Read the record: ``rows`` has the digest of rows without one, by family."""
        record: Any = {}
        if self.path.is_file():
            try:
                record = yaml.load(self.path.read_text(), getattr(yaml, "CSafeLoader", yaml.Loader))
                self._of_rows: Texts = dict(record["rows"])
                self._recorded: dict[str, Texts] = dict(record["defaults"])
                self._digests: dict[str, list[str]] = dict(record["families"])
                return
            except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.path} cannot be read: {error}") from None
        self._of_rows = {}
        self._recorded = {}
        self._digests = {}

    def family(self, options: Options) -> Family:
        """The family of a run."""
        name = family_of(options)
        if name not in self._families:
            self._families[name] = self._make_family(name, options)
        return self._families[name]

    def _make_family(self, name: str, options: Options) -> Family:
        if "program" in options:
            return Family()
        base: Texts = {}
        first: Texts = {}
        for earlier in self._digests.get(name, ()):
            base |= self._recorded[earlier]
            first = {**self._recorded[earlier], **first}
        now = self._resolve(options) if self.resolves else {}
        now = {option: text or base.get(option, "") for option, text in now.items()}
        content = json.dumps(now, sort_keys=True)
        digest = hashlib.sha1(content.encode()).hexdigest()[:8] if now else ""
        self._now[digest] = now
        changes = {x: now[x] for x in now if x in first and first[x] != now[x]}
        return Family(base | now, digest, changes)

    def _resolve(self, options: Options) -> Texts:
        """The defaults of a family now; none if they cannot be found out here."""
        words = []
        for name in _CONTEXT:
            value = options.get(name)
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}={x}" for x in values if x is not None]
        try:
            resolved = resolve(words)
        except ValueError:  # a module that is not installed; a sweep checks its options apart
            return {}
        defaults: Texts = {}
        for full_name, value in resolved.items():
            name = short_name(full_name)
            unused = name in {*OBSERVING, *_CONTEXT, *_OF_A_RUN}
            if not unused and not full_name.startswith(_OBSERVING_GROUPS):
                # Lightning has options of the same name as a model, which are empty.
                defaults[name] = canonical(value) or defaults.get(name, "")
        return defaults

    def key(self, row: Mapping[str, Any]) -> str:
        """The key of a row, which is that of a run with the same resolved options."""
        name = family_of(row)
        digest = row.get("defaults") or self._of_rows.get(name, "")
        base = self._families.get(name, Family()).base
        return key_of({**self._changed_since(name, digest), **row}, base)

    def _changed_since(self, name: str, digest: str) -> Texts:
        """The defaults of rows that differ from those now."""
        family = self._families.get(name)
        if family is None or not digest or digest == family.digest:
            return {}
        if (name, digest) not in self._changed:
            recorded = self._recorded.get(digest, {"defaults": digest})  # unknown: no run has them
            # An option without a default differs from one that has one now.
            changed = {x: y or "null" for x, y in recorded.items() if y != family.base.get(x)}
            self._changed[name, digest] = changed
        return self._changed[name, digest]

    def save(self) -> None:
        """Add the defaults of the families so far to the record; the caller locks the study."""
        self._read()
        added = False
        for name, family in self._families.items():
            digests = self._digests.setdefault(name, [])
            if family.digest and family.digest not in digests:
                self._recorded[family.digest] = self._now[family.digest]
                digests.append(family.digest)
                added = True
        if added:
            self.write()

    def write(self) -> None:
        """Write the record, under another name first."""
        record = {"rows": self._of_rows, "families": self._digests, "defaults": self._recorded}
        text = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(
            "# Defaults of the options that the rows beside this file leave out; sweeps write it.\n"
            "# rows: the defaults of rows that name none; families: all defaults of a model.\n"
            + text
        )
        partial.replace(self.path)


def short_name(full_name: str) -> str:
    """The name of an option in plans: without its group, but data.seed is not the seed of a run.

    >>> short_name("model.num_latents"), short_name("data.seed")
    ('num_latents', 'data.seed')
    """
    for group in _GROUPS:
        if full_name.startswith(group) and full_name != "data.seed":
            return full_name.removeprefix(group)
    return full_name
