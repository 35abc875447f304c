"""HeadA2C: the A2C of Stable-Baselines3, with the policies that have a categorical head."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.policies import BasePolicy

from catnat.sb3.masks import forced_actions_of, has_masks
from catnat.sb3.policies import POLICIES, NonFinite, Snapshot


class HeadA2C(A2C):
    """A2C for policies with a categorical head; the steps are those of ``stable_baselines3.A2C``.

    Weights that are not finite after an update raise :class:`NonFinite`, with policy and optimizer
    put back to where they were before that update. Actions are never masked. Where an environment
    forces actions (see :mod:`catnat.sb3.masks`), the rollout has the actions that were played: the
    critic learns from them, the policy does not. The arguments are those of
    ``stable_baselines3.A2C``; "MlpPolicy", "CnnPolicy" and "MultiInputPolicy" are the policies
    with a head.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = POLICIES
    stores_played_actions = True  # where an environment forces actions

    def learn(self, *args: Any, **kwargs: Any) -> Self:
        """As in Stable-Baselines3, with a warning where masks of the environment are not used."""
        if self.env is not None and has_masks(self.env):
            warnings.warn("actions are not masked: HeadA2C takes no action_masks", stacklevel=2)
        return super().learn(*args, **kwargs)

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        total, callback = super()._setup_learn(*args, **kwargs)
        assert self.env is not None
        if forced_actions_of(self.env) is not None:
            callback = CallbackList([_ForcedActions(), callback])
            callback.init_callback(self)
        return total, callback

    def train(self) -> None:
        """Learn from the rollout."""
        before = Snapshot(self.policy)
        with np.errstate(over="ignore", invalid="ignore"):  # the error below says it in one line
            super().train()
        finite: Any = torch.stack([weight.isfinite().all() for weight in self.policy.parameters()])
        if not finite.all():
            before.restore()
            raise NonFinite(
                f"weights are not finite in the update after {self.num_timesteps} steps; the "
                "policy is as it was before that update"
            )

    def _maybe_recommend_cpu(self, mlp_class_name: str = "HeadActorCriticPolicy") -> None:
        super()._maybe_recommend_cpu(mlp_class_name)


class _ForcedActions(BaseCallback):
    """Puts the actions that an environment forced into the rollout, in place of the policy's."""

    def _on_rollout_start(self) -> None:
        self._forced: list[NDArray[np.bool_]] = []
        self._next: Any = forced_actions_of(self.training_env)

    def _on_step(self) -> bool:
        forced = self._next >= 0
        self.locals["actions"][forced] = self._next[forced]  # they are stored after this
        self._forced.append(forced)
        self._next = forced_actions_of(self.training_env)
        return True

    def _on_rollout_end(self) -> None:
        """No advantage, no gradient: the policy did not choose these actions."""
        self.model.rollout_buffer.advantages[np.stack(self._forced)] = 0  # type: ignore[attr-defined]
