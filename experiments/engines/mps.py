"""One GPU for many processes: with NVIDIA's MPS they use it at the same time, not by turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from experiments.engines.devices import VISIBLE

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
def server(device: str | None = None) -> Iterator[dict[str, str]]:
    """A server for the processes that get this environment; empty if it does not start.

    A server of one device has it as its first: its clients ask for device 0.
    """
    with tempfile.TemporaryDirectory(prefix="mps") as place:
        here = {_PIPES: f"{place}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{place}/log"}
        for folder in here.values():
            Path(folder).mkdir()
        if _control(["-d"], b"", here, device):
            yield {}
            return
        try:
            yield here if device is None else here | {VISIBLE: _from_zero(device)}
        finally:
            _control([], b"quit -t 10\n", here, device)  # seconds for whoever still uses it


def _from_zero(device: str) -> str:
    """The numbers by which clients know the devices of a server of its own."""
    return ",".join(str(i) for i in range(len(device.split(","))))


def _control(words: list[str], said: bytes, here: dict[str, str], device: str | None) -> int:
    """Exit status of the control program."""
    null, environment = subprocess.DEVNULL, os.environ | here
    environment.pop(VISIBLE, None)  # devices would be counted from there, by clients once more
    if device is not None:
        environment[VISIBLE] = device
    command = [CONTROL, *words]
    try:
        return subprocess.run(
            command, input=said, stdout=null, stderr=null, env=environment, timeout=60
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


@contextmanager
def environments(devices: Sequence[str], shared: bool) -> Iterator[dict[str, dict[str, str]]]:
    """The environment of runs on each device; with a server for each, if they are shared.

    Servers take turns with each other: for several sweeps at a time start one before them.
    """
    plain = {device: {VISIBLE: device} for device in devices}
    if not shared or running() or not available():
        yield plain
        return
    with ExitStack() as servers:
        yield {each: servers.enter_context(server(each)) or plain[each] for each in devices}
