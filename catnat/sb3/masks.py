"""What environments say about actions: which are allowed, and which are played anyway.

The convention is sb3-contrib's: an environment has a method ``action_masks()``, which returns an
array of bool, True for each allowed action of a ``Discrete`` space. For ``MultiDiscrete`` the array
has the choices of all actions in a row, for ``MultiBinary`` two for each: 0 and 1. Gymnasium's
convention, masks in ``info["action_mask"]``, needs a wrapper, such as sb3-contrib's ActionMasker.

A ``VecEnv`` with a ``Discrete`` action space may have an attribute ``forced_actions``: an array
(n,) of the actions that the next step plays whatever actions it is given, -1 where the policy is
free. HeadPPO and HeadA2C store the actions that are played. Forced actions are not the policy's
choice: the critic learns from them, the policy does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from catnat.numerics import can_branch_on


def masks_of(env: VecEnv) -> NDArray[np.bool_]:
    """The present masks of all environments, (n, C)."""
    return np.stack([_booleans(mask) for mask in env.env_method("action_masks")])


def split_masks(masks: Any, sizes: Sequence[int], batch: Sequence[int]) -> list[Tensor]:
    """A mask (*, K) for each action, from masks of all choices in a row.

    A row that allows no choice raises a ValueError, where the masks are on the host. Elsewhere the
    head makes the probabilities of the row NaN.

    Args:
        masks: array, tensor or list with prod(batch) rows of sum(sizes) entries, in any shape.
        sizes: K of each action.
        batch: the shape *.
    """
    on_device = isinstance(masks, Tensor) and not can_branch_on(masks)
    allowed: Tensor = masks.bool() if on_device else torch.from_numpy(_booleans(masks))
    rows = math.prod(batch)
    if allowed.numel() != rows * sum(sizes):
        raise ValueError(f"masks need {sum(sizes)} entries for each of {rows} states")
    parts = allowed.reshape(*batch, sum(sizes)).split(list(sizes), -1)
    for part in parts if not on_device else ():
        is_empty = ~part.any(-1).flatten()
        if is_empty.any():
            raise ValueError(f"the mask of state {int(is_empty.nonzero()[0])} allows no action")
    return list(parts)


class MaskedPlayer:
    """Plays with a model, and asks the environment for masks before each action.

    Args:
        model: its ``predict`` takes ``action_masks``: HeadPPO, MaskablePPO, or a policy of theirs.
        env: the environments that are played in; they have ``action_masks()``.
    """

    def __init__(self, model: Any, env: VecEnv) -> None:
        self.model = model
        self.env = env

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Allowed actions for the present observations of the environment; as in a model."""
        return self.model.predict(*args, **kwargs, action_masks=masks_of(self.env))


def _booleans(masks: Any) -> NDArray[np.bool_]:
    """Masks as an array of bool; a ValueError for numbers other than 0 and 1.

    Masks that are added to scores have 0 where a choice is allowed: read as ours they would mean
    the opposite.
    """
    numbers = np.asarray(masks)
    allowed = np.array(numbers, bool)  # a copy: torch wants an array that it may write to
    if not np.array_equal(numbers, allowed):
        wrong = numbers[numbers != allowed].flat[0]
        raise ValueError(f"masks are 1 where a choice is allowed and 0 elsewhere, got {wrong}")
    return allowed
