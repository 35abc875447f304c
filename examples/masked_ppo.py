"""Find short routes on a road map with PPO, with and without action masks.

Each of 32 towns has roads to a few other towns. An action selects the next town. If there is no
road to it, the step is lost. An episode ends at the last town or after 40 steps. HeadPPO calls
``action_masks()``, which returns the towns that a road reaches. The picture shows the returns.
"""

import argparse
from pathlib import Path

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env

from catnat.sb3 import HeadPPO

TOWNS, LONGEST, ROLLOUT = 32, 40, 512


def road_map():
    """Roads (32, 32) between neighboring towns, and from each town to a random town."""
    roads = np.eye(TOWNS, k=1, dtype=bool)
    roads[np.arange(TOWNS), np.random.default_rng(0).integers(TOWNS, size=TOWNS)] = True
    return (roads | roads.T) & ~np.eye(TOWNS, dtype=bool)


class Roads(gymnasium.Env):
    """Each step costs 1 until the agent reaches the last town."""

    observation_space, action_space = spaces.Box(0, 1, (TOWNS,)), spaces.Discrete(TOWNS)
    roads = road_map()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.town, self.steps = int(self.np_random.integers(TOWNS - 1)), 0
        return np.eye(TOWNS, dtype=np.float32)[self.town], {}

    def step(self, action):
        self.town = int(action) if self.roads[self.town, action] else self.town
        shown, self.steps = np.eye(TOWNS, dtype=np.float32)[self.town], self.steps + 1
        return shown, -1.0, self.town == TOWNS - 1, self.steps == LONGEST, {}

    def action_masks(self):
        return self.roads[self.town]


def learn(head, masks, steps):
    """Number of steps and mean return of the last 100 episodes, after each rollout."""
    options = {"policy_kwargs": {"head": head}, "n_steps": ROLLOUT // 8, "learning_rate": 1e-3}
    games, returns = make_vec_env(Roads, 8, seed=0), []
    model = HeadPPO("MlpPolicy", games, masks=masks, seed=0, device="cpu", **options)
    while model.num_timesteps < steps:
        model.learn(ROLLOUT, reset_num_timesteps=False)
        returns.append((model.num_timesteps, np.mean([game["r"] for game in model.ep_info_buffer])))
    return np.array(returns).T


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="total number of steps")
    parser.add_argument("--out", default="masked_ppo.png", help="picture file")
    args = parser.parse_args()
    out = args.out
    if not (Path(out).parent.is_dir() and out.endswith((".png", ".pdf", ".svg"))):
        parser.error(f"--out must be a .png, .pdf or .svg in a folder that exists, got {out!r}")
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    torch.set_num_threads(1)  # small matrices
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for head, color in (("softmax", "#c51b7d"), ("natural", "#276419")):
        for masks, line, no in ((True, "-", ""), (False, ":", "no ")):
            (steps, returns), label = learn(head, masks, args.steps), f"{head}, {no}masks"
            print(f"{label:20} return {returns[0]:6.1f} at first, {returns[-1]:6.1f} at the end")
            axes.plot(steps, returns, line, color=color, label=label)
    axes.set(xlabel="steps", ylabel="return")
    axes.legend()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
