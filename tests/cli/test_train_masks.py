"""train.py with an environment that has masks of actions."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import train

FOLDER = Path("runs/ppo/natural/version_0")
QUICK = [
    "--env=Corridor-v0",
    "--num_envs=2",
    "--n_steps=16",
    "--n_epochs=1",
    "--total_steps=64",
    "--eval_games=2",
    "--eval_every=32",
]


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
def _workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(gymnasium.registry, "Corridor-v0", None)
    del gymnasium.registry["Corridor-v0"]
    gymnasium.register("Corridor-v0", Corridor)
    monkeypatch.setattr(Corridor, "forbidden", 0)


def run(*argv, model="ppo", command=()):
    return train.main([*command, f"--model={model}", "--head=natural", *QUICK, *argv])


def test_masks_are_used_and_said_in_one_line(capfd):
    assert run() == 0
    out, err = capfd.readouterr()
    assert out.count("actions are masked: Corridor-v0 has action_masks()\n") == 1 and err == ""
    assert Corridor.forbidden == 0, "also in evaluations"
    assert run("--ckpt_path=last", command=["test"]) == 0
    assert run("--total_steps=128", "--ckpt_path=last") == 0
    assert Corridor.forbidden == 0
    state = torch.load(FOLDER / "checkpoints/last.ckpt", weights_only=True)
    assert state["global_step"] == 128


def test_masks_that_are_not_used(capfd):
    assert run("--masks=false") == 0
    assert Corridor.forbidden > 0
    capfd.readouterr()
    assert train.main(["--model=a2c", *(word for word in QUICK if "epochs" not in word)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "HeadA2C does not mask actions" in line
    assert not Path("runs/a2c").exists()


def test_copies_of_actions_have_no_masks(capfd):
    assert run("--num_actions=7") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "masks need 7 entries for each of 2 states" in line
