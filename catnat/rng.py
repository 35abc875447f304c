"""Random states: forked, saved and restored.

They are part of checkpoints, so that a resumed run draws the numbers that the run would have drawn
without the interruption.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

State = dict[str, Any]  # what a checkpoint has of something, by name


def random_states(device: torch.device) -> list[State]:
    """The states of the generators of torch, NumPy and Python on each rank, as plain values."""
    name, keys, *position = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, torch.from_numpy(np.asarray(keys, np.int64)), *position),
        "python": random.getstate(),
    }
    if not (dist.is_available() and dist.is_initialized()):
        return [state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def set_random_states(states: list[State], device: torch.device, rank: int = 0) -> None:
    """Put all generators back to where :func:`random_states` found them.

    A rank that the saved run did not have gets noise of its own, which follows from the state of
    rank 0.
    """
    is_new = rank >= len(states)
    state = states[0 if is_new else rank]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    name, keys, *position = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    random.setstate(state["python"])
    if is_new:
        torch.manual_seed(int(torch.randint(2**62, ())))
        separate_noise(rank)


def separate_noise(rank: int) -> None:
    """Give a rank noise of its own; otherwise equal seeds would mean equal noise."""
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
