"""Random states: kept in checkpoints, so that a resumed run draws what it would have drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def noise_state(device: torch.device, gather: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """States of torch's generators on all ranks, each (ranks, bytes) uint8.

    Args:
        device: where the model lives.
        gather: collects a tensor from all ranks, (n,) -> (ranks, n), or (n,) if there is but one.
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: gather(each).reshape(-1, len(each)).cpu() for name, each in states.items()}


def set_noise_state(states: dict[str, Tensor], device: torch.device, rank: int) -> None:
    """Undo what happened since :func:`noise_state`.

    A rank that was not there gets noise of its own, which follows from the state of rank 0.
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
    """Give every rank noise of its own; without this, equal seeds mean equal noise."""
    if rank:
        torch.manual_seed((torch.initial_seed() + rank * 0x9E3779B1) % 2**63)


@contextmanager
def own_noise(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from this seed inside the block; outside nothing was ever drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
