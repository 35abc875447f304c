"""Options of reinforcement learning that do not depend on the algorithm. Names are CleanRL's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from catnat.callbacks import FisherMonitorSB3
from catnat.datamodules.atari import Backend
from catnat.datamodules.environments import is_atari, make_env
from catnat.training import options as cli
from catnat.training.algorithms import ALGORITHMS


@dataclass
class Environments:
    """The environments that the policy plays in.

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
        """Make environments.

        Args:
            num_envs: how many.
            seed: of the first; the others count on from it.
            gamma: discount of the returns whose spread scales the rewards, with ``normalize``.
            backend: of Atari games, in place of the option.
        """
        if self.normalize and is_atari(self.env):
            raise ValueError("normalize is not for Atari games: their pixels are scaled anyway")
        env = make_env(self.env, num_envs, backend or self.backend, seed, self.num_actions)
        return VecNormalize(env, gamma=gamma) if self.normalize else env


@dataclass
class Training:
    """How long training takes, on which device, and how it is evaluated.

    Args:
        total_steps: steps of all environments together, also --max_steps; by default see --help.
        device: auto is CUDA for pictures, else the CPU.
        devices: 1; Stable-Baselines3 trains a policy on one device.
        eval_games: games of an evaluation.
        eval_every: steps between evaluations; by default a tenth of all, 0 for none.
        eval_deterministic: evaluate with the likeliest actions, do not sample.
        gif: write a GIF of a game at the end.
        enable_progress_bar: show progress.
        default_root_dir: where runs go.
    """

    total_steps: int | float | None = None
    device: str = "auto"
    devices: int | str = 1
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
            # Whoever makes this object may write 1e6.
            setattr(self, name, whole(name, value))
        if self.device != "auto":
            check_device(self.device)
        if str(self.devices) != "1":
            raise ValueError(
                f"devices must be 1, got {self.devices}: Stable-Baselines3 trains a policy on one "
                "device (see --device); experiments/sweep.py fills several GPUs with runs (--jobs)"
            )

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


def build_parser(model: str) -> cli.Parser:
    """All options of an algorithm, with the defaults for Atari."""
    algorithm = ALGORITHMS[model]
    parser = cli.base_parser(model)
    parser.add_class_arguments(algorithm.options, "model")
    parser.add_class_arguments(Environments, "data")
    parser.add_class_arguments(Training, "trainer")
    parser.add_class_arguments(FisherMonitorSB3, "fisher", fail_untyped=False)
    parser.set_defaults(algorithm.defaults)
    return parser
