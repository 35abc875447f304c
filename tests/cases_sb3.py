"""What the tests of Stable-Baselines3's side share: small environments and short runs."""

import gymnasium as gym
import numpy as np
import torch
from cases import HEADS
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

from catnat.sb3 import HeadPPO
from catnat.sb3.policies import HeadMaskableActorCriticPolicy as HeadMaskablePolicy
from catnat.sb3.policies import HeadRecurrentActorCriticPolicy as HeadLstmPolicy

__all__ = ["HeadLstmPolicy", "HeadMaskablePolicy", "HeadPPO"]  # beside what is defined here
BOX = spaces.Box(-1, 1, (3,))
PICTURE = spaces.Box(0, 255, (4, 36, 36), np.uint8)
SMALL = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 0, "device": "cpu"}
SATURATED = [0.0, 3.1415, 3.2, -3.2, 40.0, -40.0, 1e4, -1e9, 1e20, -1e38]  # scores
BOTH = spaces.Dict({"picture": PICTURE, "number": spaces.Discrete(3)})


def every_head_with(first, *others):
    """Every head with the first case, natural with the others."""
    return [(head, first) for head in HEADS] + [("natural", case) for case in others]


class Guess(gym.Env):
    """Reward 1 for the action that the observation asks for; some actions are forbidden."""

    def __init__(self, action_space=None, observation_space=BOX):
        self.action_space = action_space or spaces.Discrete(5)
        self.observation_space = observation_space
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.count += 1
        return (
            self.observation_space.sample(),
            float(np.sum(action) == 1),
            self.count == 8,
            False,
            {},
        )

    def action_masks(self):
        """Even choices before even steps, odd ones before odd steps."""
        sizes = choices(self.action_space)
        return np.concatenate([np.arange(n) % 2 == self.count % min(n, 2) for n in sizes])


class Unmasked(Guess):
    """The same environment without masks."""

    action_masks = property()


def choices(space):
    """K of each action of a space."""
    if isinstance(space, spaces.MultiBinary):
        return [2] * space.n
    return [space.n] if isinstance(space, spaces.Discrete) else list(space.nvec)


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def distance(one, other):
    """The largest difference between the weights of two models."""
    pairs = zip(one.policy.parameters(), other.policy.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


class Rows(KVWriter):
    """Keeps what is logged, by step."""

    def __init__(self):
        self.rows = {}

    def write(self, key_values, key_excluded, step=0):
        assert set(key_values) == set(key_excluded)
        self.rows.setdefault(step, {}).update(key_values)

    def close(self):
        pass


def cartpole(count=4):
    return make_vec_env("CartPole-v1", count, seed=0, env_kwargs={"max_episode_steps": 30})


def learn(algorithm=HeadPPO, env=None, kind="MlpPolicy", head="natural", rollouts=2, **options):
    policy = HeadPPO.policy_aliases[kind]
    arguments = SMALL | {"policy_kwargs": {"head": head}} | options
    model = algorithm(policy, env or cartpole(), **arguments)
    rows = Rows()
    model.set_logger(Logger(None, [rows]))
    model.learn(rollouts * model.n_steps * model.n_envs)
    return model


class Spoil(BaseCallback):
    """Puts a number that is none into a transition of the last rollout."""

    def __init__(self, name, value):
        super().__init__()
        self.name, self.value = name, value

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        if self.num_timesteps == 96:
            getattr(self.model.rollout_buffer, self.name)[3, 1] = self.value


class Count(gym.Env):
    """Shows (number, steps); the reward tells the number, the step and the action played."""

    action_space, observation_space = spaces.Discrete(4), spaces.Box(0, 1e4, (2,))

    def __init__(self, number, length=7):
        self.number, self.steps, self.length = number, 0, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.number, self.steps], np.float32), {}

    def step(self, action):
        reward = 1000.0 * self.number + 10 * self.steps + action
        self.steps += 1
        cut = self.steps % self.length == 0
        return np.array([self.number, self.steps], np.float32), reward, False, cut, {}


class Forcing(DummyVecEnv):
    """Plays action 2 in every third environment, whatever it is given."""

    def __init__(self, count=4):
        super().__init__([lambda number=number: Count(number) for number in range(count)])
        self.count = 0

    @property
    def forced_actions(self):
        return np.where((self.count + np.arange(self.num_envs)) % 3 == 0, 2, -1)

    def step_async(self, actions):
        forced = self.forced_actions
        super().step_async(np.where(forced >= 0, forced, actions))

    def step_wait(self):
        self.count += 1
        return super().step_wait()
