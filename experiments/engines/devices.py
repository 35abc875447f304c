"""The GPUs of this machine, dealt out to runs."""

from __future__ import annotations

import os
import subprocess

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible() -> list[str]:
    """The GPUs that runs may use: those of CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    given = os.environ.get(VISIBLE)
    if given is not None:
        return [each.strip() for each in given.split(",") if each.strip() not in ("", "-1")]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return said.stdout.split() if said.returncode == 0 else []


def grouped(found: list[str], each: int) -> list[str]:
    """Devices for runs that take several of them: "0,1", "2,3"."""
    if each > len(found):
        raise ValueError(f"--gpus_per_run {each}: this machine has {len(found)}")
    whole = len(found) - len(found) % each
    return [",".join(found[i : i + each]) for i in range(0, whole, each)]


def dealt(devices: list[str], jobs: int) -> list[str | None]:
    """The device of each job: all devices in turn; None where there are none."""
    return [devices[i % len(devices)] if devices else None for i in range(jobs)]
