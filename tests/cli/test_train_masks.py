"""train.py with an environment that has masks of actions."""

import cases_ppo
import gymnasium
import numpy as np
import pytest
from cases_cli import one_line
from cases_ppo import (
    QUICK,
    _workspace,  # noqa: F401 - a fixture
    last,
)

import train

OPTIONS = [*QUICK, "--env=Corridor-v0", "--num_envs=2", "--total_steps=64", "--eval_every=32"]


class Corridor(gymnasium.Env):
    """Five places in a row; from an end only one of the two steps is allowed."""

    observation_space = gymnasium.spaces.Box(0, 1, (5,))
    action_space = gymnasium.spaces.Discrete(2)
    forbidden = 0  # forbidden actions that were played, in all games

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.steps = 0
        return self._show(), {}

    def step(self, action):
        Corridor.forbidden += not self.action_masks()[action]
        self.place = int(np.clip(self.place + 2 * action - 1, 0, 4))
        self.steps += 1
        return self._show(), float(self.place == 4), self.steps == 8, False, {}

    def action_masks(self):
        return np.array([self.place > 0, self.place < 4])

    def _show(self):
        return np.eye(5, dtype=np.float32)[self.place]


@pytest.fixture(autouse=True)
def _corridor(monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Corridor-v0", None)
    del gymnasium.registry["Corridor-v0"]
    gymnasium.register("Corridor-v0", Corridor)
    monkeypatch.setattr(Corridor, "forbidden", 0)


def run(*argv, **choices):
    return cases_ppo.run(*OPTIONS, *argv, **choices)


def test_masks_are_used_and_said_in_one_line(capfd):
    assert run() == 0
    out, err = capfd.readouterr()
    assert out.count("actions are masked: Corridor-v0 has action_masks()\n") == 1 and err == ""
    assert Corridor.forbidden == 0, "also in evaluations"
    assert train.main(["test", "--model=ppo", "--ckpt_path=last"]) == 0
    assert run("--total_steps=128", "--ckpt_path=last") == 0
    assert Corridor.forbidden == 0
    assert last()["global_step"] == 128


def test_masks_that_are_not_used(capfd):
    assert run("--masks=false") == 0
    assert Corridor.forbidden > 0
    assert run(model="a2c") == 2
    assert "HeadA2C does not mask actions" in one_line(capfd)


def test_masks_that_do_not_fit_the_actions(capfd, monkeypatch):
    monkeypatch.setattr(Corridor, "action_space", gymnasium.spaces.Discrete(7))
    assert run() == 2
    assert "masks need 7 entries for each of 2 states" in one_line(capfd)
