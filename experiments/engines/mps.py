"""One GPU for many processes: with NVIDIA's MPS they use it at the same time, not by turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_USUAL_PIPES = Path("/tmp/nvidia-mps")


def available() -> bool:
    """Whether a server can be started here: it comes with NVIDIA's driver."""
    return shutil.which(CONTROL) is not None


def running() -> bool:
    """Whether somebody has started one that processes from here would use anyway."""
    return _PIPES in os.environ or (_USUAL_PIPES / "control").exists()


@contextmanager
def server() -> Iterator[dict[str, str]]:
    """A server for the processes that get this environment; empty if it does not start."""
    with tempfile.TemporaryDirectory(prefix="mps") as place:
        here = {_PIPES: f"{place}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{place}/log"}
        for folder in here.values():
            Path(folder).mkdir()
        if _control(["-d"], b"", here):
            yield {}
            return
        try:
            yield here
        finally:
            _control([], b"quit -t 10\n", here)  # seconds for whoever still uses it


def _control(words: list[str], said: bytes, environment: dict[str, str]) -> int:
    """Exit status of the control program."""
    null, both = subprocess.DEVNULL, os.environ | environment
    both.pop("CUDA_VISIBLE_DEVICES", None)  # it would count from there, and its clients once more
    command = [CONTROL, *words]
    try:
        return subprocess.run(
            command, input=said, stdout=null, stderr=null, env=both, timeout=60
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Processes started inside share the GPU at the same time, where that is possible.

    Servers take turns with each other: for several sweeps at a time start one before them.
    """
    if running() or not available():
        yield
        return
    with server() as environment:
        os.environ.update(environment)
        try:
            yield
        finally:
            for name in environment:
                os.environ.pop(name, None)
