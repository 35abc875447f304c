"""HeadA2C: the A2C of Stable-Baselines3, with the policies that have a categorical head."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import torch
from stable_baselines3 import A2C

from catnat.sb3.algorithm import HeadAlgorithm, NonFinite
from catnat.sb3.masks import has_masks


class HeadA2C(HeadAlgorithm, A2C):
    """A2C for policies with a categorical head; the steps are those of ``stable_baselines3.A2C``.

    Weights that are not finite after an update raise :class:`NonFinite`. Actions are never masked.
    Where an environment forces actions (see :mod:`catnat.sb3.masks`), the rollout has the actions
    that were played: the critic learns from them, the policy does not. The arguments are those of
    ``stable_baselines3.A2C``; "MlpPolicy", "CnnPolicy" and "MultiInputPolicy" are the policies
    with a head.
    """

    def learn(self, *args: Any, **kwargs: Any) -> Self:
        """As in Stable-Baselines3, with a warning where masks of the environment are not used."""
        if self.env is not None and has_masks(self.env):
            warnings.warn("actions are not masked: HeadA2C takes no action_masks", stacklevel=2)
        return super().learn(*args, **kwargs)

    def train(self) -> None:
        """Learn from the rollout."""
        # No advantage, no gradient: the policy did not choose these actions.
        self.rollout_buffer.advantages[self._forced] = 0
        with np.errstate(over="ignore", invalid="ignore"):  # the error below says it in one line
            super().train()
        finite: Any = torch.stack([weight.isfinite().all() for weight in self.policy.parameters()])
        if not finite.all():
            raise NonFinite(
                f"weights are not finite in the update after {self.num_timesteps} steps"
            )
