"""Environments by name."""

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.monitor import Monitor

from catnat.datamodules.environments import is_atari, make_env


class Counted(gymnasium.Env):
    """Its infos say which action was played; over after five steps."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode=None):
        pass

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 5, False, {"played": action}


@pytest.fixture(autouse=True)
def _registered():
    gymnasium.register("Counted-v0", Counted)
    yield
    gymnasium.registry.pop("Counted-v0")


@pytest.mark.parametrize(
    ("name", "atari"),
    [
        ("Breakout", True),
        ("ALE/Pong-v5", True),
        ("Blackjack", True),
        ("Blackjack-v1", False),
        ("CartPole-v1", False),
        ("some_package:Game-v0", False),
    ],
)
def test_what_is_an_atari_game(name, atari):
    assert is_atari(name) is atari


def test_environments_have_a_monitor_and_play_the_actions_they_are_given():
    env = make_env("Counted-v0", 3)
    env.reset()
    infos = env.step(np.arange(3))[3]
    assert [info["played"] for info in infos] == [0, 1, 2]
    assert env.env_is_wrapped(Monitor) == [True] * 3
    env.close()


def test_seeds_count_on():
    one, other = (make_env("CartPole-v1", 3, seed=seed).reset() for seed in (5, 6))
    assert np.array_equal(one[1:], other[:-1])
