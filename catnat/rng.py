"""Random states: forked, saved and restored.

They are part of checkpoints, so that a resumed run draws the numbers that the run would have drawn
without the interruption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def noise_state(device: torch.device, gather: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """States of torch's generators on all ranks, each (ranks, bytes) uint8.

    Args:
        device: where the model lives.
        gather: collects a tensor from all ranks, (n,) -> (ranks, n), or (n,) if there is one rank.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: gather(each).reshape(-1, len(each)).cpu() for name, each in states.items()}


def set_noise_state(states: dict[str, Tensor], device: torch.device, rank: int) -> None:
    """Put torch's generators back to where :func:`noise_state` found them.

    A rank that the saved run did not have gets noise of its own, which follows from the state of
    rank 0.
    """
    if rank >= len(states["cpu"]):
        torch.set_rng_state(states["cpu"][0].clone())
        torch.manual_seed(int(torch.randint(2**62, ())))
        separate_noise(rank)
        return
    torch.set_rng_state(states["cpu"][rank].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"][rank].clone(), device)


def separate_noise(rank: int) -> None:
    """Give every rank noise of its own; otherwise equal seeds would mean equal noise."""
    if rank:
        torch.manual_seed((torch.initial_seed() + rank * 0x9E3779B1) % 2**63)


@contextmanager
def forked_random_state(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from this seed inside the block; the random state outside does not change."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # Not torch.manual_seed for all: it would also seed a CUDA device that is first used later.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif device.type != "cpu":
            torch.manual_seed(seed)
        yield


# -- all generators of one process -----------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators of torch, NumPy and Python, as tensors and plain values."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put all generators back to where :func:`random_state` found them."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
