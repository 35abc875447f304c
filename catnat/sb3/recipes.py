"""PPO and A2C as ``--model`` names them: their options, and the class that learns.

A new algorithm is a subclass of :class:`Algorithm` with a method ``make``, a name in
``catnat.cli.names.RL_MODELS``, and recipes in ``catnat/recipes``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict, get_args

import stable_baselines3
import torch
from gymnasium import spaces
from jsonargparse.typing import NonNegativeInt, PositiveInt
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env import VecEnv
from torch import nn
from torch.optim import Optimizer

from catnat.checks import (
    numbers,
    require_at_least,
    require_choice,
    require_positive,
    require_within,
)
from catnat.sb3.algorithms import HeadA2C, HeadAlgorithm, forces_actions
from catnat.sb3.distributions import MaskMode
from catnat.sb3.ppo import HeadPPO, cleanrl_schedule

Options = dict[str, Any]  # by their names


_RMS_PROP_EPS = 1e-5  # default of Stable-Baselines3's A2C
# Options that have no meaning for null.
_NUMBERS = {
    "n_steps",
    "batch_size",
    "n_epochs",
    "gamma",
    "gae_lambda",
    "clip_range",
    "ent_coef",
    "vf_coef",
    "max_grad_norm",
    "rms_prop_eps",
    "stats_window_size",
}


class NetArch(TypedDict, total=False):
    """Widths of the layers of the policy and of the value function."""

    pi: list[PositiveInt]
    vf: list[PositiveInt]


class PolicyOptions(TypedDict, total=False):
    """Arguments of the policies of Stable-Baselines3, except those of the head."""

    net_arch: list[PositiveInt] | NetArch
    activation_fn: type[nn.Module]
    ortho_init: bool
    features_extractor_class: type[BaseFeaturesExtractor]
    features_extractor_kwargs: Options
    share_features_extractor: bool
    normalize_images: bool
    optimizer_class: type[Optimizer]
    optimizer_kwargs: Options
    mask_mode: MaskMode | None


AlgorithmClass = Literal["auto", "sb3", "head"]
_OF_HEAD_PPO = {"value_loss", "capture", "masks"}


class Algorithm:
    """An algorithm of Stable-Baselines3, created together with its environments.

    Args:
        head: name of the head.
        head_options: options of the head.
        policy_kwargs: other arguments of the policy, such as net_arch.
        learning_rate: learning rate at the beginning.
        anneal_lr: let the learning rate fall linearly to 0 at the last step.
        algorithm: class that learns. sb3 is that of Stable-Baselines3, head is HeadPPO or HeadA2C;
            auto is sb3 for PPO where no GPU, no mask and no option of HeadPPO needs HeadPPO.
        kwargs: options of the algorithm itself.
    """

    name: ClassVar[str]  # of its files in catnat/recipes and, for Atari games, recipes/atari
    every = 1  # rollouts between two rows of the log
    fisher_every = 10  # most rollouts between two observations of the Fisher monitor

    def __init__(
        self,
        head: str = "softmax",
        head_options: Options | None = None,
        policy_kwargs: PolicyOptions | None = None,
        learning_rate: float = 7e-4,
        anneal_lr: bool = False,
        algorithm: AlgorithmClass = "auto",
        **kwargs: Any,
    ) -> None:
        for name in sorted(_NUMBERS & kwargs.keys()):
            if kwargs[name] is None:
                raise ValueError(f"{name} must be a number, got null")
        positive = ("clip_range", "clip_range_vf", "max_grad_norm", "rms_prop_eps", "target_kl")
        at_least_1 = ("n_steps", "n_epochs", "batch_size", "stats_window_size")
        require_positive(learning_rate=learning_rate, **numbers(kwargs, *positive))
        require_at_least(1, **numbers(kwargs, *at_least_1))
        require_within(0, torch.inf, "[)", **numbers(kwargs, "ent_coef", "vf_coef"))
        require_within(0, 1, **numbers(kwargs, "gamma", "gae_lambda"))
        self.policy_kwargs = {"head": head, "head_options": head_options, **(policy_kwargs or {})}
        own_optimizer = "optimizer_class" in self.policy_kwargs
        uses_rms_prop = "use_rms_prop" in kwargs and kwargs["use_rms_prop"] and not own_optimizer
        has_eps = "rms_prop_eps" in kwargs and kwargs["rms_prop_eps"] != _RMS_PROP_EPS
        if has_eps and not uses_rms_prop:
            raise ValueError("rms_prop_eps has no effect: the optimizer is not RMSProp")
        if uses_rms_prop and "optimizer_kwargs" in self.policy_kwargs:
            raise ValueError("optimizer_kwargs need an optimizer_class, or --use_rms_prop false")
        self.learning_rate = learning_rate
        self.anneal_lr = anneal_lr
        require_choice(get_args(AlgorithmClass), algorithm=algorithm)
        self.algorithm = algorithm
        self.kwargs = kwargs

    def make(self, *run: Any) -> Any:
        """The algorithm; the arguments are those of :meth:`arguments`."""
        raise NotImplementedError

    def arguments(self, env: VecEnv, total_steps: int, device: str, seed: int) -> Options:
        """Arguments of the algorithm that follow from the run, with a policy that suits it."""
        policy = "MlpPolicy"
        if isinstance(env.observation_space, spaces.Dict):
            policy = "MultiInputPolicy"
        elif is_image_space(env.observation_space):
            policy = "CnnPolicy"
        elif device == "auto":
            device = "cpu"  # small networks are faster there
        rate: Any = self.learning_rate
        if self.anneal_lr:
            rate = cleanrl_schedule(rate, total_steps, self.kwargs["n_steps"] * env.num_envs)
        return {
            "policy": HeadAlgorithm.policy_aliases[policy],
            "env": env,
            "learning_rate": rate,
            "policy_kwargs": self.policy_kwargs,
            "device": device,
            "seed": seed,
        }


class PPO(Algorithm):
    """PPO of Stable-Baselines3, or HeadPPO."""

    name = "ppo"

    def make(self, *run: Any) -> stable_baselines3.PPO:
        """The algorithm."""
        arguments = self.arguments(*run)
        reason = self._needs_head_ppo(arguments["env"], arguments["device"])
        if self.algorithm == "sb3" and reason:
            raise ValueError(f"--algorithm sb3 does not work here: {reason}")
        if self.algorithm == "head" or reason:
            return HeadPPO(**arguments, **self.kwargs)
        options = {name: x for name, x in self.kwargs.items() if name not in _OF_HEAD_PPO}
        return stable_baselines3.PPO(**arguments, **options)

    def _needs_head_ppo(self, env: VecEnv, device: str) -> str:
        """Why the PPO of Stable-Baselines3 cannot do this; empty if it can."""
        masks = self.kwargs.get("masks")
        reasons = {
            "masks of actions need HeadPPO": masks
            or (masks is None and env.has_attr("action_masks")),
            "the value loss of CleanRL needs HeadPPO": self.kwargs.get("value_loss") == "cleanrl",
            "native Atari games force actions, which needs HeadPPO": forces_actions(env),
            "CUDA graphs need HeadPPO": self.kwargs.get("capture"),
        }
        on_cuda = get_device(device).type == "cuda"
        if self.algorithm == "auto" and on_cuda:
            reasons["HeadPPO is faster on CUDA"] = True
        return next((reason for reason, holds in reasons.items() if holds), "")


class A2C(Algorithm):
    """HeadA2C, or A2C of Stable-Baselines3."""

    name = "a2c"
    every = 100  # rollouts are short
    fisher_every = 100

    def make(self, *run: Any) -> stable_baselines3.A2C:
        """The algorithm."""
        arguments = self.arguments(*run)
        if self.algorithm != "sb3":
            return HeadA2C(**arguments, **self.kwargs)
        if forces_actions(arguments["env"]):
            raise ValueError(
                "--algorithm sb3 does not work here: native Atari games force actions, which needs "
                "HeadA2C"
            )
        return stable_baselines3.A2C(**arguments, **self.kwargs)


_SHORTEST_INTERVAL = 10_000  # steps between evaluations, unless chosen


@dataclass
class Training:
    """How long training takes, on which device, and how it is evaluated.

    Args:
        total_steps: steps of all environments together, also --max_steps. By default 50,000; of
            Atari games 8,000,000 with an accelerator, else 30,000.
        device: auto is CUDA for pictures, else the CPU.
        eval_games: games of an evaluation. A game that has no time limit ends after 10,000 steps.
        eval_every: steps between evaluations; by default a tenth of all and at least 10,000, 0 for
            none.
        eval_deterministic: evaluate with the likeliest actions, do not sample.
        callbacks: callbacks of Stable-Baselines3.
        enable_progress_bar: show progress.
        default_root_dir: where runs go.
    """

    total_steps: PositiveInt | None = None
    device: str = "auto"
    eval_games: PositiveInt = 10
    eval_every: NonNegativeInt | None = None
    eval_deterministic: bool = False
    callbacks: list[BaseCallback] | None = None
    enable_progress_bar: bool = True
    default_root_dir: str = "runs"

    def __post_init__(self) -> None:
        if self.eval_every is None and self.total_steps is not None:
            self.eval_every = max(self.total_steps // 10, _SHORTEST_INTERVAL)
        if self.device != "auto":
            try:  # Stable-Baselines3 would take the CPU in place of a device that is not there
                torch.empty(0, device=self.device).cpu()
            except (RuntimeError, AssertionError) as error:
                raise ValueError(f"there is no device {self.device!r} here: {error}") from error
