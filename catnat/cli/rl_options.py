"""Options of reinforcement learning: algorithms with Stable-Baselines3's own options, training.

A new algorithm is a subclass of :class:`Algorithm` with a method ``make``, and a name in
``names.RL_MODELS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from catnat.checks import require_at_least, require_positive, require_within
from catnat.sb3 import HeadA2C, HeadPPO, cleanrl_schedule


class Algorithm:
    """An algorithm of Stable-Baselines3, which is made when its environments are.

    Args:
        head: name of the head.
        head_options: options of the head.
        policy_kwargs: other arguments of the policy, such as net_arch.
        learning_rate: of the optimizer, at the beginning.
        anneal_lr: let it fall linearly to 0 at the last step.
        kwargs: options of the algorithm itself.
    """

    atari: ClassVar[dict[str, Any]] = {}  # the recipe for Atari games
    not_atari: ClassVar[dict[str, Any]] = {}  # the recipe for other environments
    # Rollouts between two rows of the log, and at most between two looks of the Fisher monitor.
    every: ClassVar[int] = 1

    def __init__(
        self,
        head: str = "natural",
        head_options: dict[str, Any] | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        learning_rate: float = 7e-4,
        anneal_lr: bool = False,
        **kwargs: Any,
    ) -> None:
        def numbers(*names: str) -> dict[str, Any]:
            given = {name: kwargs.get(name) for name in names}
            return {name: x for name, x in given.items() if isinstance(x, int | float)}

        require_positive(learning_rate=learning_rate)
        require_positive(**numbers("clip_range", "max_grad_norm", "rms_prop_eps"))
        require_positive(or_zero=True, **numbers("ent_coef", "vf_coef"))
        require_at_least(1, **numbers("n_steps", "n_epochs"))
        require_within(0, 1, **numbers("gamma", "gae_lambda"))
        self.policy_kwargs = {"head": head, "head_options": head_options} | (policy_kwargs or {})
        self.learning_rate, self.anneal_lr = learning_rate, anneal_lr
        self.kwargs = kwargs

    def rate(self, env: VecEnv, steps: int) -> Any:
        """The learning rate, or its schedule."""
        if not self.anneal_lr:
            return self.learning_rate
        return cleanrl_schedule(self.learning_rate, steps, self.kwargs["n_steps"] * env.num_envs)


class PPO(Algorithm):
    """PPO; for Atari games with CleanRL's settings, which are the paper's."""

    # CleanRL's value loss has a factor 1/2, so that its vf_coef is 0.5.
    atari: ClassVar[dict[str, Any]] = {
        "learning_rate": 2.5e-4, "anneal_lr": True, "n_steps": 128, "batch_size": 256,
        "n_epochs": 4, "clip_range": 0.1, "ent_coef": 0.01, "vf_coef": 0.25,
        "value_loss": "cleanrl",
    }  # fmt: skip
    not_atari: ClassVar[dict[str, Any]] = {
        "learning_rate": 1e-3, "anneal_lr": True, "n_steps": 32, "batch_size": 256,
        "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8,
    }  # fmt: skip

    def make(self, policy: Any, env: VecEnv, steps: int, seed: int, device: str) -> HeadPPO:
        """The model, which learns for so many steps of all environments together."""
        return HeadPPO(
            policy, env, learning_rate=self.rate(env, steps), policy_kwargs=self.policy_kwargs,
            seed=seed, device=device, **self.kwargs,
        )  # fmt: skip


class A2C(Algorithm):
    """A2C with the defaults of Stable-Baselines3."""

    every = 100  # rollouts are short

    def make(self, policy: Any, env: VecEnv, steps: int, seed: int, device: str) -> HeadA2C:
        """The model, as that of PPO."""
        return HeadA2C(
            policy, env, learning_rate=self.rate(env, steps), policy_kwargs=self.policy_kwargs,
            seed=seed, device=device, **self.kwargs,
        )  # fmt: skip


@dataclass
class Training:
    """How long training takes, on which device, and how it is evaluated.

    Args:
        total_steps: steps of all environments together, also --max_steps. By default 50,000; of
            Atari games 8,000,000 with an accelerator, else 30,000.
        device: auto is CUDA for pictures, else the CPU.
        eval_games: games of an evaluation. A game that has no time limit ends after 10,000 steps.
        eval_every: steps between evaluations; by default a tenth of all, 0 for none.
        eval_deterministic: evaluate with the likeliest actions, do not sample.
        callbacks: callbacks of Stable-Baselines3.
        enable_progress_bar: show progress.
        default_root_dir: where runs go.
    """

    total_steps: int | None = None
    device: str = "auto"
    eval_games: int = 10
    eval_every: int | None = None
    eval_deterministic: bool = False
    callbacks: list[BaseCallback] | None = None
    enable_progress_bar: bool = True
    default_root_dir: str = "runs"

    def __post_init__(self) -> None:
        for name, least in (("total_steps", 1), ("eval_games", 1), ("eval_every", 0)):
            if (value := getattr(self, name)) is not None:
                require_at_least(least, **{name: value})
        # Stable-Baselines3 would take the CPU in place of a GPU that is not there.
        kind, _, number = self.device.partition(":")
        if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no device {self.device!r} here")
