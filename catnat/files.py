"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes | memoryview, shared: bool = False) -> None:
    """Write a file; a reader never sees a part of it, and a failure leaves what was there before.

    Args:
        path: of the file; its folder is made if there is none.
        content: all of it.
        shared: other processes may write the same file at the same time; the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}{f'.{os.getpid()}' if shared else ''}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
