"""Fork, save and restore random states.

Checkpoints contain them, so that a resumed run draws the same numbers as a run without
interruption.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

State = dict[str, Any]  # values in a checkpoint by name


def random_states(device: torch.device) -> list[State]:
    """States of the generators of torch, NumPy and Python on each rank, as plain values."""
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
    """Restore the states that :func:`random_states` returned.

    A rank that the saved run did not have gets its own noise, derived from the state of rank 0.
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
    """Give each rank different noise; with equal seeds all ranks would draw the same numbers."""
    torch.manual_seed((torch.initial_seed() + rank * 0x9E3779B1) % 2**63)


@contextmanager
def forked_random_state(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators inside the block and restore their states afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # torch.manual_seed would also seed CUDA devices that are first used later.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif device.type != "cpu":
            torch.manual_seed(seed)
        yield
