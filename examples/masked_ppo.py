"""PPO with masks of actions: find short ways on a road map, with and without knowing the roads.

Each of 32 towns has roads to a few others. An action names the next town; where there is no road, a
step is lost. An episode ends at the last town, or after 40 steps. ``action_masks()`` says where
roads lead; HeadPPO finds that method by itself. The picture shows the return over steps:

    python examples/masked_ppo.py --out masked_ppo.png
"""

import argparse
from typing import Any

import gymnasium
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.env_util import make_vec_env

from catnat.sb3 import HeadPPO

TOWNS, LONGEST, ROLLOUT = 32, 40, 512


def road_map() -> NDArray[np.bool_]:
    """Roads (32, 32): to the neighbours in a row, and from each town to one by chance."""
    roads = np.eye(TOWNS, k=1, dtype=bool)
    roads[np.arange(TOWNS), np.random.default_rng(0).integers(TOWNS, size=TOWNS)] = True
    return (roads | roads.T) & ~np.eye(TOWNS, dtype=bool)


class Roads(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Every step costs 1, until the last town is reached."""

    observation_space, action_space = spaces.Box(0, 1, (TOWNS,)), spaces.Discrete(TOWNS)
    roads = road_map()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin in any town but the last."""
        super().reset(seed=seed)
        self.town, self.steps = int(self.np_random.integers(TOWNS - 1)), 0
        return np.eye(TOWNS, dtype=np.float32)[self.town], {}

    def step(self, action: np.int64) -> Any:
        """Take the road to a town, if there is one."""
        self.town = int(action) if self.roads[self.town, action] else self.town
        self.steps += 1
        shown = np.eye(TOWNS, dtype=np.float32)[self.town]
        return shown, -1.0, self.town == TOWNS - 1, self.steps == LONGEST, {}

    def action_masks(self) -> NDArray[np.bool_]:
        """Where roads lead from here."""
        return self.roads[self.town]


def learn(head: str, masks: bool, steps: int) -> list[float]:
    """Mean returns of the last 100 episodes, after each rollout."""
    env = make_vec_env(Roads, 8, seed=0)
    model = HeadPPO("MlpPolicy", env, policy_kwargs={"head": head}, n_steps=ROLLOUT // 8,
                    learning_rate=1e-3, masks=masks, seed=0, device="cpu")  # fmt: skip
    returns: list[float] = []
    while model.num_timesteps < steps:
        model.learn(ROLLOUT, reset_num_timesteps=False)
        returns.append(float(np.mean([game["r"] for game in model.ep_info_buffer or ()])))
    return returns


def main() -> None:
    """Learn with two heads, with and without masks; print the returns, and draw them."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="of all environments together")
    parser.add_argument("--out", default="masked_ppo.png", help="the picture")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    torch.set_num_threads(1)  # small matrices
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for head, colour in (("softmax", "#c51b7d"), ("natural", "#276419")):
        for masks, line in ((True, "-"), (False, ":")):
            returns = learn(head, masks, args.steps)
            label = f"{head}, {'masks' if masks else 'no masks'}"
            told = f"return {returns[0]:6.1f} at first, {returns[-1]:6.1f} at the end"
            print(f"{label:20} {told}", flush=True)
            steps = ROLLOUT * np.arange(1, len(returns) + 1)
            axes.plot(steps, returns, line, color=colour, label=label)
    axes.set(xlabel="steps", ylabel="return")
    axes.legend()
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
