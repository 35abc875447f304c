"""The options of PPO. Names are those of CleanRL and of the paper's sweep; so are the defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from catnat.callbacks import FisherMonitorSB3
from catnat.datamodules.atari import Backend
from catnat.datamodules.environments import is_atari, make_env
from catnat.training import options as cli

HELP = """\
usage: python train.py [fit | test] --model ppo --head HEAD [options]

Trains a policy and plays (fit, the default), or only plays a checkpoint.

  --head HEAD          {heads}
  --env ENV            an Atari game (Breakout), or a Gymnasium id (CartPole-v1)
  --total_steps N      of Atari {steps:,} if there is an accelerator, else
                       {few:,}; of other environments {elsewhere:,}
  --num_envs N --num_steps N       games side by side, steps in a rollout
  --learning_rate X --ent_coef X --clip_coef X --update_epochs N ...
  --eval_games N       to play at the end, and ten times on the way
  --device D           auto, cpu, cuda, cuda:1 ...
  --seed N             of weights, actions and games
  --ckpt_path PATH     continue (or play) a checkpoint: a file, last or best
  --save_every N       steps between checkpoints
  --config FILE        options from a YAML file; other options win
  --print_config       print all options as such a file, and stop
  --import MODULE      import it first: heads and environments it defines

Full names are --model.X, --data.X, --trainer.X, --fisher.X; the first three
groups can be left out. To list them: --help model, data, trainer or fisher.
Runs lie in runs/ppo/<head>/version_<k>: tensorboard --logdir runs
"""
GROUPS = ("model", "data", "trainer", "fisher")
STEPS, STEPS_ON_CPU, STEPS_ELSEWHERE = 8_000_000, 30_000, 50_000
# The defaults below are CleanRL's for Atari, and the paper's. These are for everything else.
ELSEWHERE = {
    "model.learning_rate": 1e-3,
    "model.num_steps": 32,
    "model.num_minibatches": 1,
    "model.update_epochs": 20,
    "model.clip_coef": 0.2,
    "model.ent_coef": 0.0,
    "model.gamma": 0.98,
    "model.gae_lambda": 0.8,
    "model.vf_coef": 1.0,
    "model.value_loss": "sb3",
    "trainer.eval_deterministic": True,
}


@dataclass
class Algorithm:
    """PPO and the head.

    Args:
        head: name of the head.
        head_options: options of the head.
        learning_rate: of Adam, at the beginning.
        anneal_lr: let it fall linearly to 0 at the last step.
        num_steps: steps of a rollout, in each environment.
        num_minibatches: parts a rollout is learned from in.
        update_epochs: how often it is learned from.
        gamma: discount.
        gae_lambda: of the advantage estimation.
        clip_coef: how far the ratio of probabilities counts.
        ent_coef: weight of the entropy.
        vf_coef: weight of the value loss, which is half the squared error.
        max_grad_norm: longest gradient.
        value_loss: the larger error of clipped and unclipped values ("cleanrl"), or that of the
            values as they are ("sb3").
        capture: replay rollouts and updates as CUDA graphs; by default where possible.
    """

    head: str = "natural"
    head_options: dict[str, Any] | None = None
    learning_rate: float = 2.5e-4
    anneal_lr: bool = True
    num_steps: int = 128
    num_minibatches: int = 4
    update_epochs: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.1
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    value_loss: Literal["cleanrl", "sb3"] = "cleanrl"
    capture: bool | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip_coef", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("ent_coef", "vf_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("num_steps", "num_minibatches", "update_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {getattr(self, name)}")


@dataclass
class Environments:
    """What is played.

    Args:
        env: an Atari game, or a Gymnasium id.
        num_envs: how many side by side.
        backend: of Atari games: C++ threads, or the wrappers of Stable-Baselines3.
        num_actions: if given, an environment's actions are taken modulo their number.
        normalize: learn from observations and rewards scaled by their running moments.
    """

    env: str = "Breakout"
    num_envs: int = 8
    backend: Backend = "native"
    num_actions: int | None = None
    normalize: bool = False

    def make(
        self, num_envs: int, seed: int, gamma: float, backend: Backend | None = None
    ) -> VecEnv:
        """So many of them; rewards are scaled by the spread of returns with discount gamma."""
        if self.normalize and is_atari(self.env):
            raise ValueError("normalize is not for Atari games: their pixels are scaled anyway")
        env = make_env(self.env, num_envs, backend or self.backend, seed, self.num_actions)
        return VecNormalize(env, gamma=gamma) if self.normalize else env


@dataclass
class Training:
    """How long, where, and how it is looked at.

    Args:
        total_steps: steps of all environments together, also --max_steps; by default see --help.
        device: auto is CUDA for pictures, else the CPU.
        eval_games: games of an evaluation.
        eval_every: steps between evaluations; by default a tenth of all, 0 for none.
        eval_deterministic: play the likeliest actions then, do not sample.
        gif: write a GIF of a game at the end.
        enable_progress_bar: show progress.
        default_root_dir: where runs go.
    """

    total_steps: int | float | None = None
    device: str = "auto"
    eval_games: int = 10
    eval_every: int | float | None = None
    eval_deterministic: bool = False
    gif: bool = True
    enable_progress_bar: bool = True
    default_root_dir: str = "runs"

    def __post_init__(self) -> None:
        for name, least in (("total_steps", 1), ("eval_games", 1), ("eval_every", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.device != "auto":
            check_device(self.device)

    @property
    def steps(self) -> int:
        """All steps, once the default is known."""
        assert isinstance(self.total_steps, int)
        return self.total_steps


def whole(name: str, value: float | None) -> int | None:
    """A number of steps, which may have been written as 1e6."""
    if value is None or isinstance(value, int):
        return value
    if not value.is_integer():
        raise ValueError(f"{name} must be a whole number, got {value}")
    return int(value)


def check_device(name: str) -> None:
    """Raise unless there is such a device; Stable-Baselines3 would take the CPU in its place."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        choices = "auto, cpu, cuda, cuda:0 and the like"
        raise ValueError(f"unknown device {name!r}; choose from {choices}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {name!r} here")


def build_parser() -> ArgumentParser:
    """All options, with the defaults for Atari."""
    parser = cli.base_parser("ppo", save_every=25_000)
    parser.add_class_arguments(Algorithm, "model")
    parser.add_class_arguments(Environments, "data")
    parser.add_class_arguments(Training, "trainer")
    parser.add_class_arguments(FisherMonitorSB3, "fisher", fail_untyped=False)
    return parser
