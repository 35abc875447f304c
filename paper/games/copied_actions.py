"""CartPole with copies of its actions, for the plan ppo_cartpole.

--env copied_actions:CopiedCartPole-v1 --env_kwargs.num_actions 18
"""

from typing import Any

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Discrete
from gymnasium.wrappers import TransformAction


def make_env(num_actions: int, **options: Any) -> gymnasium.Env[Any, Any]:
    """CartPole where action a plays a mod 2."""
    return TransformAction(CartPoleEnv(**options), lambda action: action % 2, Discrete(num_actions))


gymnasium.register("CopiedCartPole-v1", make_env, max_episode_steps=500)
