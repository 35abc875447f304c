"""What environments say about actions: which are allowed, and which are played anyway.

The convention is sb3-contrib's: an environment has a method ``action_masks()``, which returns an
array of bool, True for each allowed action of a ``Discrete`` space. For ``MultiDiscrete`` the array
has the choices of all actions in a row, for ``MultiBinary`` two for each: 0 and 1. Gymnasium's
convention, masks in ``info["action_mask"]``, becomes this one by :class:`InfoMasks`.

A ``VecEnv`` with a ``Discrete`` action space may have an attribute ``forced_actions``: an array
(n,) of the actions that the next step plays whatever actions it is given, -1 where the policy is
free. HeadPPO and HeadA2C store the actions that are played. Forced actions are not the policy's
choice: the critic learns from them, the policy does not.
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
from gymnasium.spaces import Discrete
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from catnat.numerics import can_branch_on

METHOD = "action_masks"
Env = VecEnv | gymnasium.Env[Any, Any]


def has_masks(env: Env) -> bool:
    """Whether an environment, or all environments of a ``VecEnv``, have ``action_masks()``."""
    return env.has_attr(METHOD) if isinstance(env, VecEnv) else env.has_wrapper_attr(METHOD)


def masks_of(env: Env) -> NDArray[np.bool_]:
    """The present masks of an environment (C,), or of all environments of a ``VecEnv`` (n, C)."""
    if isinstance(env, VecEnv):
        return np.stack([_booleans(mask) for mask in env.env_method(METHOD)])
    return _booleans(env.get_wrapper_attr(METHOD)())


def forced_actions_of(env: VecEnv) -> NDArray[np.int64] | None:
    """The attribute ``forced_actions`` of an environment, None if it is not an array.

    Raises:
        ValueError: actions are not ``Discrete``, or there is not one for each environment.
    """
    forced_actions = getattr(env, "forced_actions", None)
    if not isinstance(forced_actions, np.ndarray):
        return None
    if not isinstance(env.action_space, Discrete) or forced_actions.shape != (env.num_envs,):
        raise ValueError(
            f"forced_actions need the shape ({env.num_envs},) and a Discrete action space, got "
            f"{forced_actions.shape} and {env.action_space}"
        )
    return forced_actions


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
    get_distribution: Any = policy.get_distribution
    obstacle = ""
    if not has_masks(env):
        obstacle = "the environment has no method action_masks()"
    elif METHOD not in inspect.signature(get_distribution).parameters:
        obstacle = f"{type(policy).__name__} takes no action_masks"
        if not wanted:
            warnings.warn(f"actions are not masked: {obstacle}", stacklevel=2)
    if wanted and obstacle:
        raise ValueError(f"masks is True, but {obstacle}")
    return not obstacle


def warn_of_evaluation(callback: BaseCallback) -> None:
    """Warn where an EvalCallback would play forbidden actions in an environment with masks."""
    for child in getattr(callback, "callbacks", ()):
        warn_of_evaluation(child)
    if not isinstance(callback, EvalCallback) or getattr(callback, "use_masking", False):
        return
    if has_masks(callback.eval_env):
        warnings.warn(
            f"{type(callback).__name__} plays forbidden actions: it asks for no masks; use "
            "sb3_contrib.common.maskable.callbacks.MaskableEvalCallback",
            stacklevel=2,
        )


def split_masks(
    masks: Any, sizes: Sequence[int], batch: Sequence[int], name: str = "state"
) -> list[Tensor]:
    """A mask (*, K) for each action, from masks of all choices in a row.

    A row that allows no choice raises a ValueError, where the masks are on the host. Elsewhere the
    head makes the probabilities of the row NaN.

    Args:
        masks: array, tensor or list with prod(batch) rows of sum(sizes) entries, in any shape.
        sizes: K of each action.
        batch: the shape *.
        name: what a row belongs to, for the error.
    """
    on_device = isinstance(masks, Tensor) and not can_branch_on(masks)
    allowed: Tensor = masks.bool() if on_device else torch.from_numpy(_booleans(masks))
    shape = (*batch, sum(sizes))
    if allowed.numel() != math.prod(shape):
        raise ValueError(
            f"masks need {sum(sizes)} entries for each of {math.prod(batch)} {name}s, got shape "
            f"{tuple(allowed.shape)}"
        )
    parts = allowed.reshape(shape).split(list(sizes), -1)
    for number, part in enumerate(parts):
        if not on_device and not bool(part.any(-1).all()):
            row = int((~part.any(-1)).flatten().nonzero()[0])
            action = f"choice of action {number}" if len(sizes) > 1 else "action"
            raise ValueError(f"the mask of {name} {row} allows no {action}")
    return list(parts)


class InfoMasks(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives ``action_masks()`` to an environment that has its masks in ``info["action_mask"]``.

    ``make_vec_env("Taxi-v4", 8, wrapper_class=InfoMasks)``.
    """

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode, and keep the mask of its first action."""
        observation, info = self.env.reset(**kwargs)
        self._mask = info["action_mask"]
        return observation, info

    def step(self, action: Any) -> Any:
        """Play, and keep the mask of the next action, if there is one."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            self._mask = info["action_mask"]
        return observation, reward, terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """The actions that are allowed now."""
        return _booleans(self._mask)


class MaskedPlayer:
    """Plays with a model, and asks the environment for masks before each action.

    Args:
        model: its ``predict`` takes ``action_masks``: HeadPPO, MaskablePPO, or a policy of theirs.
        env: the environment that is played in.
    """

    def __init__(self, model: BaseAlgorithm | BasePolicy, env: Env) -> None:
        if not has_masks(env):
            raise ValueError(f"the environment {env} has no method action_masks()")
        self.model: Any = model
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
