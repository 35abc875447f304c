"""Masks of actions: which environments have them, and how they reach heads and players.

The convention is sb3-contrib's: an environment has a method ``action_masks()``, which returns an
array of bool, True for each allowed action of a ``Discrete`` space. For ``MultiDiscrete`` the array
has the choices of all actions in a row, for ``MultiBinary`` two for each: 0 and 1.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from catnat.numerics import can_branch_on

METHOD = "action_masks"
Env = VecEnv | gymnasium.Env[Any, Any]


def has_masks(env: Env) -> bool:
    """Whether an environment, or all environments of a ``VecEnv``, have ``action_masks()``."""
    if isinstance(env, VecEnv):
        return env.has_attr(METHOD)
    try:
        env.get_wrapper_attr(METHOD)
    except AttributeError:
        return False
    return True


def masks_of(env: Env) -> NDArray[np.bool_]:
    """The present masks of an environment (C,), or of all environments of a ``VecEnv`` (n, C)."""
    if isinstance(env, VecEnv):
        return np.stack([np.asarray(each, bool) for each in env.env_method(METHOD)])
    return np.asarray(env.get_wrapper_attr(METHOD)(), bool)


def takes_masks(policy: BasePolicy) -> bool:
    """Whether a policy's methods have an argument ``action_masks``."""
    method: Any = policy.get_distribution
    return METHOD in inspect.signature(method).parameters


def decide(wanted: bool | None, policy: BasePolicy, env: VecEnv) -> bool:
    """Whether actions are masked.

    Args:
        wanted: False for no. True raises a ValueError where there can be no masks. None is yes
            where there can be masks.
        policy: the policy that acts.
        env: the environments it acts in.
    """
    if wanted is False:
        return False
    obstacles = {
        "the environment has no method action_masks()": not has_masks(env),
        f"{type(policy).__name__} takes no action_masks": not takes_masks(policy),
    }
    reason = next((reason for reason, applies in obstacles.items() if applies), None)
    if wanted and reason:
        raise ValueError(f"masks is True, but {reason}")
    if reason and has_masks(env):
        warnings.warn(f"actions are not masked: {reason}", stacklevel=2)
    return reason is None


def split_masks(
    masks: Any, sizes: Sequence[int], batch: Sequence[int], name: str = "state", first: int = 0
) -> list[Tensor]:
    """A mask (*, K) for each action, from masks of all choices in a row.

    A row that allows no choice raises a ValueError, where the masks are on the host. Elsewhere the
    head makes the probabilities of the row NaN.

    Args:
        masks: array, tensor or list with prod(batch) rows of sum(sizes) entries, in any shape.
        sizes: K of each action.
        batch: the shape *.
        name: what a row belongs to, for the error.
        first: number of the first row.
    """
    given = masks if isinstance(masks, Tensor) else torch.from_numpy(_booleans(masks))
    shape = (*batch, sum(sizes))
    if given.numel() != math.prod(shape):
        raise ValueError(
            f"masks need {sum(sizes)} entries for each of {math.prod(batch)} {name}s, got shape "
            f"{tuple(given.shape)}"
        )
    parts = given.bool().reshape(shape).split(list(sizes), -1)
    for number, part in enumerate(parts):
        if can_branch_on(part) and not bool(part.any(-1).all()):
            row = first + int((~part.any(-1)).flatten().nonzero()[0])
            what = f"choice of action {number}" if len(sizes) > 1 else "action"
            raise ValueError(f"the mask of {name} {row} allows no {what}")
    return list(parts)


class MaskedPlayer:
    """Plays with a model, and asks the environment for masks before each action.

    Args:
        model: its ``predict`` takes ``action_masks``: HeadPPO, MaskablePPO, or a policy of theirs.
        env: the environment that is played in.
    """

    def __init__(self, model: BaseAlgorithm | BasePolicy, env: Env) -> None:
        if not has_masks(env):
            raise ValueError(f"the environment {env} has no method action_masks()")
        self.model, self.env = model, env

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """Allowed actions for the present observations of the environment."""
        chosen: Any = self.model.predict
        now = masks_of(self.env)
        actions, state = chosen(observation, state, episode_start, deterministic, action_masks=now)
        return actions, state


def _booleans(masks: Any) -> NDArray[np.bool_]:
    """Masks as an array of bool; a ValueError for numbers other than 0 and 1."""
    given = np.asarray(masks)
    yes = given.astype(bool)
    if not np.array_equal(given, yes):
        wrong = given[given != yes].flat[0]
        raise ValueError(f"masks are 1 where a choice is allowed and 0 elsewhere, got {wrong}")
    return np.array(yes)  # torch wants an array that it may write to
