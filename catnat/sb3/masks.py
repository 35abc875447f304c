"""Masks and forced actions of environments.

The convention is sb3-contrib's: an environment has a method ``action_masks()``, which returns an
array of bool, True for each allowed action of a ``Discrete`` space. For ``MultiDiscrete``, the
array concatenates the choices of all actions. For ``MultiBinary``, it has two entries for each
action, 0 and 1. Gymnasium's convention, masks in ``info["action_mask"]``, needs a wrapper, such as
sb3-contrib's ActionMasker.

A ``VecEnv`` with a ``Discrete`` action space may have an attribute ``forced_actions``: an array
(n,) of the actions that the next step plays instead of the given actions, -1 where the policy
chooses. HeadPPO and HeadA2C store the actions that are played. Forced actions are not the policy's
choice: the critic learns from them, the policy does not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from catnat.numerics import can_branch_on


def categories_of(action_space: spaces.Space[Any]) -> list[int]:
    """K of each action of a space; ValueError for a space whose actions are not categories."""
    if isinstance(action_space, spaces.Discrete):
        sizes = [int(action_space.n)]
    elif isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim == 1:
        sizes = action_space.nvec.tolist()
    elif isinstance(action_space, spaces.MultiBinary) and isinstance(action_space.n, int):
        sizes = [2] * action_space.n
    else:
        raise ValueError(
            "a categorical head needs a Discrete action space, or a one-dimensional MultiDiscrete "
            f"or MultiBinary one, got {action_space}"
        )
    if np.any(getattr(action_space, "start", 0)):
        raise ValueError(f"actions must begin with 0: wrap an environment with {action_space}")
    return sizes


def masks_of(env: VecEnv) -> Tensor:
    """The current masks of all environments, (n, C) bool on the host."""
    masks = np.stack(env.env_method("action_masks"))
    return checked_masks(masks, categories_of(env.action_space), (env.num_envs,))


def checked_masks(masks: Any, sizes: Sequence[int], batch: Sequence[int]) -> Tensor:
    """Masks of all choices in a row, (*, C) bool.

    Masks that are added to scores have 0 where a choice is allowed: read as ours they would mean
    the opposite. So numbers other than 0 and 1 raise a ValueError, and so does a row that allows no
    choice, where the masks are on the host. Elsewhere the head makes the probabilities of the row
    NaN.

    Args:
        masks: array, tensor or list with prod(batch) rows of C = sum(sizes) entries, in any shape.
        sizes: K of each action.
        batch: the shape *.
    """
    shape = (*batch, sum(sizes))
    if math.prod(np.shape(masks)) != math.prod(shape):
        raise ValueError(f"masks need {shape[-1]} entries for each of {math.prod(batch)} states")
    if isinstance(masks, Tensor) and not can_branch_on(masks):
        return masks.bool().reshape(shape)
    numbers = np.asarray(masks).reshape(shape)
    allowed = numbers.astype(bool)
    wrong = numbers[numbers != allowed]
    if wrong.size:
        raise ValueError(f"masks are 1 where a choice is allowed and 0 elsewhere, got {wrong[0]}")
    for part in np.split(allowed, np.cumsum(sizes)[:-1], -1):
        empty_rows = np.flatnonzero(~part.any(-1))
        if empty_rows.size:
            raise ValueError(f"the mask of state {empty_rows[0]} allows no action")
    return torch.from_numpy(allowed)


@dataclass
class MaskedPlayer:
    """Plays with a model, and requests masks from the environment before each action.

    Attributes:
        model: a model whose ``predict`` accepts ``action_masks``: HeadPPO, MaskablePPO, or one of
        their policies.
        env: the environments to play in, which have a method ``action_masks()``.
    """

    model: Any
    env: VecEnv

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Allowed actions for the current observations, with the arguments of the model."""
        return self.model.predict(*args, **kwargs, action_masks=masks_of(self.env))
