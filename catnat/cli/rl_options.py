"""Options of reinforcement learning: algorithms, environments, training. Names are CleanRL's.

A new algorithm is a subclass of :class:`Algorithm` with a class ``kind``, and a name in
``names.RL_MODELS``.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecNormalize

from catnat.checks import require_at_least, require_positive, require_within
from catnat.datamodules.atari import Backend
from catnat.datamodules.environments import is_atari, make_env
from catnat.sb3 import HeadA2C, HeadPPO, cleanrl_schedule


@dataclass
class Algorithm(ABC):
    """Options that all algorithms have; each class adds its own.

    Args:
        head: name of the head.
        head_options: options of the head.
        learning_rate: of the optimizer, at the beginning.
        anneal_lr: let it fall linearly to 0 at the last step.
        num_steps: steps of a rollout, in each environment.
        gamma: discount.
        gae_lambda: of the advantage estimation; 1 is the classic advantage.
        ent_coef: weight of the entropy.
        vf_coef: weight of the value loss, which is the squared error.
        max_grad_norm: longest gradient.
        policy_kwargs: other arguments of the policy, such as net_arch.
    """

    kind: ClassVar[Any]  # the algorithm of Stable-Baselines3
    log_interval: ClassVar[int] = 1  # rollouts between two rows of the log
    monitor_every: ClassVar[int] = 1  # most rollouts between two looks of the Fisher monitor
    not_atari: ClassVar[dict[str, Any]] = {}  # defaults for environments other than Atari games

    head: str = "natural"
    head_options: dict[str, Any] | None = None
    learning_rate: float = 1e-3
    anneal_lr: bool = True
    num_steps: int = 128
    gamma: float = 0.99
    gae_lambda: float = 0.95
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    policy_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        require_positive(learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm)
        require_positive(or_zero=True, ent_coef=self.ent_coef, vf_coef=self.vf_coef)
        require_at_least(1, num_steps=self.num_steps)
        require_within(0, 1, gamma=self.gamma, gae_lambda=self.gae_lambda)

    def arguments(self, env: VecEnv, steps: int) -> dict[str, Any]:
        """The options by the names of Stable-Baselines3.

        Args:
            env: the environments.
            steps: of all environments together, in the whole run.
        """
        options = asdict(self)
        options["n_steps"] = options.pop("num_steps")
        policy = {name: options.pop(name) for name in ("head", "head_options")}
        policy |= options.pop("policy_kwargs") or {}
        if options.pop("anneal_lr"):
            rollout = self.num_steps * env.num_envs
            options["learning_rate"] = cleanrl_schedule(self.learning_rate, steps, rollout)
        return options | {"policy_kwargs": policy}


@dataclass
class PPO(Algorithm):
    """PPO with CleanRL's options for Atari, which are the paper's.

    Args:
        vf_coef: weight of the value loss, which is half the squared error.
        num_minibatches: parts a rollout is learned from in.
        update_epochs: how often it is learned from.
        clip_coef: how far the ratio of probabilities counts.
        value_loss: the larger error of clipped and unclipped values ("cleanrl"), or that of the
            values as they are ("sb3").
        target_kl: end an update once the policy has moved so far; by default never.
        capture: replay rollouts and updates as CUDA graphs; by default where possible.
        masks: use an environment's action_masks(); by default where it has them.
    """

    kind: ClassVar[Any] = HeadPPO
    not_atari: ClassVar[dict[str, Any]] = {
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

    learning_rate: float = 2.5e-4
    ent_coef: float = 0.01
    num_minibatches: int = 4
    update_epochs: int = 4
    clip_coef: float = 0.1
    value_loss: Literal["cleanrl", "sb3"] = "cleanrl"
    target_kl: float | None = None
    capture: bool | None = None
    masks: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(clip_coef=self.clip_coef)
        require_at_least(1, num_minibatches=self.num_minibatches, update_epochs=self.update_epochs)

    def arguments(self, env: VecEnv, steps: int) -> dict[str, Any]:
        """The options by the names of Stable-Baselines3."""
        options = super().arguments(env, steps)
        parts, rollout = options.pop("num_minibatches"), self.num_steps * env.num_envs
        if rollout // parts < 2:
            raise ValueError(
                f"num_minibatches {parts} leaves less than two steps to each: a rollout has "
                f"{rollout} (num_envs times num_steps)"
            )
        options["batch_size"] = rollout // parts
        options["n_epochs"] = options.pop("update_epochs")
        options["clip_range"] = options.pop("clip_coef")
        return options | {"vf_coef": self.vf_coef / 2}


@dataclass
class A2C(Algorithm):
    """A2C with the defaults of Stable-Baselines3.

    Args:
        use_rms_prop: RMSprop is the optimizer, else Adam.
        rms_prop_eps: epsilon of RMSprop.
        normalize_advantage: scale the advantages of a rollout to mean 0 and deviation 1.
    """

    kind: ClassVar[Any] = HeadA2C
    log_interval: ClassVar[int] = 100  # rollouts are short
    monitor_every: ClassVar[int] = 100
    not_atari: ClassVar[dict[str, Any]] = {"trainer.eval_deterministic": True}

    learning_rate: float = 7e-4
    anneal_lr: bool = False
    num_steps: int = 5
    gae_lambda: float = 1.0
    use_rms_prop: bool = True
    rms_prop_eps: float = 1e-5
    normalize_advantage: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(rms_prop_eps=self.rms_prop_eps)


@dataclass
class Environments:
    """The environments that the policy plays in.

    Args:
        env: an Atari game, or a Gymnasium id.
        num_envs: how many side by side.
        backend: of Atari games: C++ threads, or the wrappers of Stable-Baselines3.
        num_actions: if given, an environment's actions are taken modulo their number.
        normalize: learn from observations and rewards scaled by their running moments.
        env_kwargs: arguments of the environment; not of Atari games.
        subprocesses: play each environment in a process of its own; not Atari games.
    """

    env: str = "Breakout"
    num_envs: int = 8
    backend: Backend = "native"
    num_actions: int | None = None
    normalize: bool = False
    env_kwargs: dict[str, Any] | None = None
    subprocesses: bool = False

    def make(
        self,
        num_envs: int,
        seed: int,
        gamma: float,
        longest: int | None = None,
        backend: Backend | None = None,
    ) -> VecEnv:
        """Make environments.

        Args:
            num_envs: how many.
            seed: of the first; the others count on from it.
            gamma: discount of the returns whose spread scales the rewards, with ``normalize``.
            longest: steps of the longest game, in place of the environment's own limit.
            backend: of Atari games, in place of the option.
        """
        options: dict[str, Any] = {"env_kwargs": self.env_kwargs} if self.env_kwargs else {}
        if longest is not None:
            options["env_kwargs"] = {**(self.env_kwargs or {}), "max_episode_steps": longest}
        if self.subprocesses:
            options["vec_env_cls"] = SubprocVecEnv
        if is_atari(self.env) and (self.normalize or options):
            raise ValueError(
                "normalize, env_kwargs, subprocesses and eval_max_steps are not for Atari games: "
                "their pixels are scaled anyway, they play in threads, and have a time limit"
            )
        backend = backend or self.backend
        env = make_env(self.env, num_envs, backend, seed, self.num_actions, **options)
        return VecNormalize(env, gamma=gamma) if self.normalize else env


@dataclass
class Training:
    """How long training takes, on which device, and how it is evaluated.

    Args:
        total_steps: steps of all environments together, also --max_steps. By default 50,000; of
            Atari games 8,000,000 with an accelerator, else 30,000.
        device: auto is CUDA for pictures, else the CPU.
        eval_games: games of an evaluation.
        eval_every: steps between evaluations; by default a tenth of all, 0 for none.
        eval_deterministic: evaluate with the likeliest actions, do not sample.
        eval_max_steps: steps of the longest game of an evaluation; by default 10,000 where the
            environment has no time limit. Games that are not finished then count as they are.
        gif: write a GIF of a game at the end.
        callbacks: callbacks of Stable-Baselines3.
        log_formats: of Stable-Baselines3's log beside TensorBoard's: csv, json, log, stdout.
        enable_progress_bar: show progress.
        default_root_dir: where runs go.
    """

    total_steps: int | float | None = None
    device: str = "auto"
    eval_games: int = 10
    eval_every: int | float | None = None
    eval_deterministic: bool = False
    eval_max_steps: int | None = None
    gif: bool = True
    callbacks: list[BaseCallback] | None = None
    log_formats: list[Literal["csv", "json", "log", "stdout"]] | None = None
    enable_progress_bar: bool = True
    default_root_dir: str = "runs"

    def __post_init__(self) -> None:
        for name, least in (("total_steps", 1), ("eval_games", 1), ("eval_every", 0)):
            value = getattr(self, name)
            if value is not None and not (value >= least and float(value).is_integer()):
                raise ValueError(f"{name} must be a whole number from {least} on, got {value}")
            setattr(self, name, None if value is None else int(value))  # it may be 1e6
        kind, _, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda"):
            raise ValueError(f"unknown device {self.device!r}; choose from auto, cpu, cuda, cuda:1")
        # Stable-Baselines3 would take the CPU in its place.
        if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no device {self.device!r} here")
