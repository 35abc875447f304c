"""What the tests of ``train.py --model ppo`` share: short runs, and what they leave."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import train
from catnat.callbacks.sb3_run import RunSB3

FOLDER = Path("runs/ppo/natural/version_0")
QUICK = [
    "--env=CartPole-v1",
    "--num_envs=4",
    "--n_steps=16",
    "--n_epochs=1",
    "--total_steps=128",
    "--eval_games=1",
    "--eval_every=64",
    "--fisher.image_every_n_rollouts=0",
]
# Its episodes last as long as a rollout and always begin alike: so nothing of them is lost when a
# run stops between two rollouts, and what follows must be the same to the last bit.
CLOCK = """
import gymnasium, numpy as np

class Clock(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (16,))
    action_space = gymnasium.spaces.Discrete(3)
    seeds = []
    def _show(self):
        return np.eye(16, dtype=np.float32)[self.t % 16]
    def reset(self, *, seed=None, options=None):
        self.t = 0
        self.seeds += [] if seed is None else [seed]
        return self._show(), {}
    def step(self, action):
        self.t += 1
        return self._show(), float(action == self.t % 3), self.t == 16, False, {}

gymnasium.register("Clock-v0", lambda: Clock())
"""


@pytest.fixture(autouse=True)
def _workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """Options of a run in an environment of the user's own."""
    Path("clock_env.py").write_text(CLOCK)
    monkeypatch.syspath_prepend(os.getcwd())
    sys.modules.pop("clock_env", None)
    return [*QUICK, "--import=clock_env", "--env=Clock-v0", "--total_steps=256"]


@pytest.fixture
def interrupted(monkeypatch):
    """Sends SIGTERM to the first run at its hundredth step, in the second of four rollouts."""
    sent = []

    def step(self):
        if self.model.num_timesteps == 100 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return True

    monkeypatch.setattr(RunSB3, "_on_step", step)


def run(*argv, head="natural", model="ppo"):
    words = [word for word in map(str, argv) if model == "ppo" or "epochs" not in word]
    return train.main([f"--model={model}", f"--head={head}", *words])


def last(folder=FOLDER, name="last"):
    return torch.load(f"{folder}/checkpoints/{name}.ckpt", weights_only=True)


def same(one, other):
    """Whether two checkpoints have the same weights, moments and random states."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def same_run(one, other):
    keys = ("state_dict", "optimizer", "random", "global_step", "updates")
    return all(same(one[key], other[key]) for key in keys)
