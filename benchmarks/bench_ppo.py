"""Steps per second of Atari: the environments alone, and PPO with the paper's settings.

Backends are the wrappers of Stable-Baselines3 and ale_py's C++ threads; algorithms are the PPO of
Stable-Baselines3 and ours, without and with replayed CUDA graphs. Ratios are against
the first of their kind: the wrappers with the PPO of Stable-Baselines3, and the fewest
environments asked for.

    python benchmarks/bench_ppo.py --envs 8 16
    python benchmarks/bench_ppo.py --envs 8 16 64 128 --device cuda --csv FILE
    python benchmarks/bench_ppo.py --returns 60     # scores of random play, backend by backend
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from catnat.datamodules import make_atari_vec_env
from catnat.sb3 import HeadActorCriticCnnPolicy, HeadPPO

STEPS, MINIBATCHES, EPOCHS = 128, 4, 4
ALGORITHMS: dict[str, tuple[str, type[PPO], dict[str, Any]]] = {
    "SB3's PPO": ("sb3", PPO, {}),
    "SB3's PPO, native": ("native", PPO, {}),
    "HeadPPO, plain": ("native", HeadPPO, {"capture": False}),
    "HeadPPO": ("native", HeadPPO, {}),
}


class Clock(BaseCallback):
    """Steps per second over whole rollouts, without the first ones; stops when time is up."""

    def __init__(self, seconds: float, skip: int = 2) -> None:
        super().__init__()
        self.seconds, self.skip = seconds, skip
        self.marks: list[tuple[float, int]] = []

    def _on_rollout_start(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), self.model.num_timesteps))

    def _on_step(self) -> bool:
        enough = len(self.marks) > self.skip + 1
        return not (enough and self.marks[-1][0] - self.marks[self.skip][0] > self.seconds)

    def rate(self) -> float:
        """Steps per second."""
        (began, first), (ended, last) = self.marks[self.skip], self.marks[-1]
        return (last - first) / (ended - began)


def environment_rate(env: VecEnv, seconds: float) -> float:
    """Steps per second under random actions."""
    n = env.num_envs
    actions = np.random.default_rng(0).integers(env.action_space.n, size=(1000, n))
    env.reset()
    for t in range(20):
        env.step(actions[t])
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        env.step(actions[done % 1000])
        done += 1
    return done * n / (time.perf_counter() - began)


def ppo_rate(name: str, env: VecEnv, args: argparse.Namespace) -> float:
    """Steps per second of learning."""
    _, algorithm, options = ALGORITHMS[name]
    model = algorithm(
        HeadActorCriticCnnPolicy,
        env,
        learning_rate=2.5e-4,
        n_steps=STEPS,
        batch_size=STEPS * env.num_envs // MINIBATCHES,
        n_epochs=EPOCHS,
        clip_range=0.1,
        ent_coef=0.01,
        vf_coef=0.25,
        policy_kwargs={"head": args.head},
        device=args.device,
        seed=0,
        **options,
    )
    clock = Clock(args.seconds)
    model.learn(10**9, clock)
    return clock.rate()


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the table."""
    bases: dict[str, float] = {}
    jobs = [("environment alone", "sb3"), ("environment alone", "native")]
    jobs += [(name, backend) for name, (backend, *_) in ALGORITHMS.items()]
    jobs = [job for job in jobs if not args.only or job[0] in args.only]
    for num_envs in sorted(args.envs):
        for name, backend in jobs:
            if backend == "sb3" and num_envs > min(args.envs):
                continue  # all games of this backend run in one process: more are not faster
            env = make_atari_vec_env(args.game, num_envs, backend)
            alone = name == "environment alone"
            rate = environment_rate(env, args.seconds) if alone else ppo_rate(name, env, args)
            env.close()
            base = bases.setdefault("environment" if alone else "ppo", rate)
            row = {"what": name, "backend": backend, "envs": num_envs}
            yield row | {"steps_per_second": round(rate), "ratio": round(rate / base, 2)}


def scores(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Mean scores of a uniformly random policy on both backends, and their standard errors."""
    for backend in ("sb3", "native"):
        env = make_atari_vec_env(args.game, 10, backend)
        env.reset()
        rng = np.random.default_rng(0)
        wanted = -(-args.returns // 10)  # games of each environment: short ones count no more
        found: list[list[float]] = [[] for _ in range(10)]
        while min(map(len, found)) < wanted:
            _, _, _, infos = env.step(rng.integers(env.action_space.n, size=10))
            for games, info in zip(found, infos, strict=True):
                if "episode" in info and len(games) < wanted:
                    games.append(info["episode"]["r"])
        env.close()
        values = np.array(found).ravel()
        error = values.std(ddof=1) / len(values) ** 0.5
        row = {"game": args.game, "backend": backend, "games": len(values)}
        yield row | {"mean": round(values.mean(), 3), "standard_error": round(error, 3)}


def show(row: dict[str, Any], first: bool) -> None:
    if first:
        print("  ".join(f"{key:>17}" for key in row))
    print("  ".join(f"{value!s:>17}" for value in row.values()), flush=True)


def main() -> None:
    """Print the table and write it as CSV where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--game", default="Breakout")
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--head", default="natural")
    parser.add_argument("--seconds", type=float, default=15, help="of each measurement")
    parser.add_argument("--returns", type=int, help="compare scores over so many games instead")
    parser.add_argument(
        "--only", nargs="+", choices=("environment alone", *ALGORITHMS), help="of the measurements"
    )
    parser.add_argument("--csv", type=Path, help="also write the table here")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device; choose cpu")
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{args.game}, torch {torch.__version__}, {where}, {torch.get_num_threads()} threads")
    table: list[dict[str, Any]] = []
    for row in scores(args) if args.returns else measure(args):
        show(row, not table)
        table.append(row)
        if args.csv:  # row by row: the time on a device may end before the last one
            args.csv.parent.mkdir(parents=True, exist_ok=True)
            with args.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(row))
                writer.writeheader()
                writer.writerows(table)


if __name__ == "__main__":
    main()
