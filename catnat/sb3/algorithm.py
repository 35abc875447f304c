"""What HeadPPO and HeadA2C share: names of policies, forced actions, and what they raise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv

from catnat.sb3.masks import forced_actions_of
from catnat.sb3.policies import POLICIES


class HeadAlgorithm(OnPolicyAlgorithm):
    """An algorithm for policies with a head; the first of two base classes.

    Where an environment forces actions (see :mod:`catnat.sb3.masks`), the rollout has the actions
    that were played.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = POLICIES
    _forced: NDArray[np.bool_]  # (T, n), which actions of the rollout were forced
    _step: int  # of the rollout

    def collect_rollouts(self, env: VecEnv, *args: Any, **kwargs: Any) -> bool:
        """As in Stable-Baselines3, which calls the policy: here that asks the environment, too."""
        self._forced = np.zeros((self.n_steps, env.num_envs), bool)
        self.policy.forward = partial(self._choose, env, self.num_timesteps)  # type: ignore[method-assign]
        try:
            return super().collect_rollouts(env, *args, **kwargs)
        finally:
            del self.policy.forward

    def _choose(self, env: VecEnv, began: int, *args: Any, **kwargs: Any) -> Any:
        """Actions, values and log-probabilities of the policy, or the actions that are forced."""
        self._step = (self.num_timesteps - began) // env.num_envs
        if self._step == self.n_steps or len(args) + len(kwargs) > 1:  # a callback asks
            return self._own_forward(*args, **kwargs)
        actions, values, log_probs = self._act(env, *args)
        forced = forced_actions_of(env)
        if forced is not None:
            told = torch.from_numpy(forced).to(self.device)
            actions = torch.where(told >= 0, told, actions)
            self._forced[self._step] = forced >= 0
        return actions, values, log_probs

    def _act(self, env: VecEnv, shown: Any) -> Any:
        return self._own_forward(shown)

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.policy).forward(self.policy, *args, **kwargs)

    def _maybe_recommend_cpu(self, mlp_class_name: str = "HeadActorCriticPolicy") -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_forced", "_step"]


class NonFinite(RuntimeError):  # noqa: N818 - reads as what it says
    """A loss, a KL divergence, a gradient or a weight is not a finite number any more."""


def map_arrays(function: Callable[..., Any], *arrays: Any) -> Any:
    """Apply a function to arrays, or to each entry of dicts of arrays."""
    if isinstance(arrays[0], dict):
        return {key: map_arrays(function, *(x[key] for x in arrays)) for key in arrays[0]}
    return function(*arrays)
