"""Parts of PPO that are not Stable-Baselines3's: CleanRL's value loss and learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from catnat.checks import require_at_least

ValueLoss = Literal["sb3", "cleanrl"]


def value_error(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: Tensor | None, kind: ValueLoss
) -> Tensor:
    """Mean squared error of the values, without a factor 1/2.

    Args:
        values: values of the present critic, (B,).
        old_values: values of the critic when the rollout was made, (B,).
        returns: targets of the values, (B,).
        clip: largest difference of values and old values that counts; None for no limit.
        kind: "sb3" takes the error of the clipped values; "cleanrl" takes the larger one of the
            errors of clipped and unclipped values, so that a clipped value still gets a gradient
            towards its target.
    """
    error = (returns - values).square()
    if clip is None:
        return error.mean()
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    clipped_error = (returns - clipped).square()
    return (clipped_error if kind == "sb3" else torch.max(error, clipped_error)).mean()


def cleanrl_schedule(
    learning_rate: float, total_timesteps: int, batch: int
) -> Callable[[float], float]:
    """A learning rate that falls linearly to 0, update by update as in CleanRL.

    Stable-Baselines3 counts a rollout as progress before it learns from it. With this schedule the
    first update has the full rate, and the last update the smallest rate above 0. Where ``batch``
    does not divide ``total_timesteps``, Stable-Baselines3 makes one update more than CleanRL, and
    the rate falls over that one, too.

    Args:
        learning_rate: rate of the first update.
        total_timesteps: steps of the run, as given to ``learn``.
        batch: steps of all environments per update, ``n_steps * n_envs``.

    >>> rate = cleanrl_schedule(1.0, total_timesteps=400, batch=100)
    >>> [rate(1 - steps / 400) for steps in (100, 200, 300, 400)]
    [1.0, 0.75, 0.5, 0.25]
    """
    require_at_least(1, total_timesteps=total_timesteps, batch=batch)
    rollouts, updates = total_timesteps / batch, -(-total_timesteps // batch)  # rounded up

    def rate(remaining: float) -> float:
        number = round((1 - remaining) * rollouts)  # number of the update, counted from 1
        return learning_rate * min(1.0, max(0.0, 1 - (number - 1) / updates))

    return rate
