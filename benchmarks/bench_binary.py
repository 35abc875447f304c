"""Speed of PPO with many binary actions, against the Bernoulli policy of Stable-Baselines3.

CPU seconds of learning and of playing: the fastest of several rounds, which the models take in
turn. A ratio below 1 is faster than Stable-Baselines3.

    python benchmarks/bench_binary.py
    python benchmarks/bench_binary.py --bits 32 128 --heads softmax natural --rounds 9
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from catnat.sb3 import HeadActorCriticPolicy, HeadPPO


class Bits(gymnasium.Env):
    """Shows random bits; the reward is the share of them that the action repeats."""

    def __init__(self, bits: int) -> None:
        self.action_space = spaces.MultiBinary(bits)
        self.observation_space = spaces.Box(0, 1, (bits,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        super().reset(seed=seed)
        self.steps = 0
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        """Compare the action with the bits."""
        reward = float((action == self.shown).mean())
        self.steps += 1
        return self._shown(), reward, self.steps == 64, False, {}

    def _shown(self) -> Any:
        self.shown = self.np_random.integers(2, size=self.action_space.n)
        return self.shown.astype(np.float32)


def make(algorithm: type[PPO], head: str | None, bits: int) -> PPO:
    env = make_vec_env(Bits, 8, seed=0, env_kwargs={"bits": bits})
    policy: Any = HeadActorCriticPolicy if head else "MlpPolicy"
    kwargs = {"head": head} if head else {}
    options: dict[str, Any] = {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "seed": 0}
    return algorithm(policy, env, policy_kwargs=kwargs, device="cpu", **options)


def seconds(model: PPO, what: str) -> float:
    """CPU seconds of two rollouts with their updates, or of 500 predictions."""
    shown = model.get_env().reset()
    began = time.process_time()
    if what == "learn":
        model.learn(2048, reset_num_timesteps=False)
    else:
        for _ in range(500):
            model.predict(shown)
    return time.process_time() - began


def measure(args: argparse.Namespace) -> Iterator[tuple[int, str, str, float, float]]:
    for bits in args.bits:
        models = {"SB3's policy": make(PPO, None, bits)}
        for head in args.heads:
            models[f"PPO, {head}"] = make(PPO, head, bits)
            models[f"HeadPPO, {head}"] = make(HeadPPO, head, bits)
        for what in ("learn", "predict"):
            rounds: dict[str, list[float]] = {name: [] for name in models}
            for _ in range(args.rounds + 1):
                for name, model in models.items():
                    rounds[name].append(seconds(model, what))
            stock, *_ = rounds.values()
            for name, times in rounds.items():
                yield bits, what, name, min(times[1:]), min(times[1:]) / min(stock[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[32])
    parser.add_argument("--heads", nargs="+", default=["softmax", "sigmoid", "natural"])
    parser.add_argument("--rounds", type=int, default=5)
    torch.set_num_threads(1)
    print(f"{'bits':>4} {'what':8} {'model':20} {'seconds':>8} {'ratio':>6}")
    for bits, what, name, took, ratio in measure(parser.parse_args()):
        print(f"{bits:4} {what:8} {name:20} {took:8.3f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
