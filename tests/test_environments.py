"""Environments by name, more actions than there are, and films of games."""

import gymnasium
import numpy as np
import pytest
from PIL import Image
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from catnat.datamodules.environments import (
    is_atari,
    make_env,
    modulo_actions,
    write_gif,
)


class Striped(gymnasium.Env):
    """Draws stripes that say which action was played; over after five steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = self.played = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        self.played = action
        return np.zeros(1, np.float32), 1.0, self.t == 5, False, {"played": action}

    def render(self):
        frame = np.zeros((12, 30, 3), np.uint8)
        frame[:, 10 * self.played : 10 * self.played + 10] = 255
        return frame


@pytest.fixture(autouse=True)
def _registered():
    gymnasium.register("Striped-v0", Striped)
    yield
    gymnasium.registry.pop("Striped-v0")


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


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Brekout", {}, "nor registered with Gymnasium; did you mean Breakout?"),
        ("CartPole-v9", {}, "did you mean CartPole-v1?"),
        ("CartPole-v1", {"num_envs": 0}, "num_envs must be at least 1, got 0"),
        ("Pendulum-v1", {"num_actions": 4}, "Discrete action spaces, not for Box"),
        ("Breakout", {"num_actions": 18}, "other than Atari games, not Breakout"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_said(name, options, words):
    with pytest.raises(ValueError) as error:
        make_env(name, **{"num_envs": 1} | options)
    assert words in str(error.value)


def test_more_actions_than_there_are():
    env = make_env("Striped-v0", 7, num_actions=7)
    env.reset()
    infos = env.step(np.arange(7))[3]
    assert [info["played"] for info in infos] == [0, 1, 2, 0, 1, 2, 0]
    assert env.action_space == gymnasium.spaces.Discrete(7)
    assert env.env_is_wrapped(Monitor) == [True] * 7
    env.close()


def test_it_keeps_the_rules_of_gymnasium():
    check_env(modulo_actions(gymnasium.make("CartPole-v1"), 18), skip_render_check=True)


def test_seeds_count_on():
    one, other = (make_env("CartPole-v1", 3, seed=seed).reset() for seed in (5, 6))
    assert np.array_equal(one[1:], other[:-1])


class Counting:
    """Plays 0, 1, 2, 0, ..."""

    def __init__(self):
        self.t = -1

    def predict(self, observations, *, deterministic):
        self.t += 1
        return np.full(len(observations), self.t % 3), None


def test_a_film_shows_the_game(tmp_path):
    env = make_env("Striped-v0", 1)
    path = tmp_path / "game.gif"
    assert write_gif(Counting(), env, path, deterministic=True)
    film = Image.open(path)
    stripes, durations = [], []
    for k in range(film.n_frames):
        film.seek(k)
        durations.append(film.info["duration"])
        columns = np.asarray(film.convert("L"))[6]
        stripes.append(int(columns.argmax()) // 10)
    assert film.size == (30, 12)
    assert sum(durations) == 5 * 40  # before each of five steps; equal frames may be one
    assert stripes == [0, 1, 2, 0]
    env.close()


def test_a_long_game_is_cut_and_one_that_cannot_be_drawn_leaves_no_file(tmp_path):
    path = tmp_path / "game.gif"
    assert write_gif(Counting(), make_env("Striped-v0", 1), path, True, most=4)
    assert Image.open(path).n_frames == 3  # the first two of four are equal
    blind = DummyVecEnv([Striped])
    assert not write_gif(Counting(), blind, tmp_path / "nothing.gif", True)
    assert not (tmp_path / "nothing.gif").exists()
