"""Make files again only when what they are made from has changed."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = ("catnat", "lit_modules", "datamodules", "callbacks")


def fingerprint(source: Path, *more: str) -> str:
    """A number that changes with a file, with the library, or with the other words given."""
    found = hashlib.sha256("\0".join(more).encode())
    library = sorted(path for name in LIBRARY for path in (ROOT / name).rglob("*.py"))
    for path in (source, *library):
        found.update(path.read_bytes())
    return found.hexdigest()


def is_fresh(stamp: Path, number: str) -> bool:
    """Whether the stamp says that files were made with this fingerprint."""
    return stamp.is_file() and stamp.read_text() == number
