"""The algorithms of reinforcement learning that ``--model`` names, and their options.

Names are CleanRL's and those of the paper's sweep. A new algorithm is a class of options with a
method ``make``, and an entry of ``ALGORITHMS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from catnat.checks import require_at_least, require_positive, require_within
from catnat.sb3 import HeadA2C, HeadPPO, cleanrl_schedule


@dataclass
class Options(ABC):
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
    """

    log_interval: ClassVar[int] = 1  # rollouts between two rows of the log

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

    def __post_init__(self) -> None:
        require_positive(learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm)
        require_positive(or_zero=True, ent_coef=self.ent_coef, vf_coef=self.vf_coef)
        require_at_least(1, num_steps=self.num_steps)
        require_within(0, 1, gamma=self.gamma, gae_lambda=self.gae_lambda)

    @abstractmethod
    def make(self, policy: Any, env: VecEnv, steps: int, **where: Any) -> OnPolicyAlgorithm:
        """The model.

        Args:
            policy: a policy class with a head.
            env: the environments.
            steps: of all environments together, in the whole run.
            where: device and seed.
        """

    def _shared(self, env: VecEnv, steps: int) -> dict[str, Any]:
        """Arguments that all algorithms of Stable-Baselines3 take."""
        rate: Any = self.learning_rate
        if self.anneal_lr:
            rate = cleanrl_schedule(self.learning_rate, steps, self.num_steps * env.num_envs)
        return {
            "learning_rate": rate,
            "n_steps": self.num_steps,
            "gamma": self.gamma,
            "gae_lambda": self.gae_lambda,
            "ent_coef": self.ent_coef,
            "max_grad_norm": self.max_grad_norm,
            "policy_kwargs": {"head": self.head, "head_options": self.head_options},
        }


@dataclass
class PPOOptions(Options):
    """PPO with CleanRL's options for Atari, which are the paper's.

    Args:
        vf_coef: weight of the value loss, which is half the squared error.
        num_minibatches: parts a rollout is learned from in.
        update_epochs: how often it is learned from.
        clip_coef: how far the ratio of probabilities counts.
        value_loss: the larger error of clipped and unclipped values ("cleanrl"), or that of the
            values as they are ("sb3").
        capture: replay rollouts and updates as CUDA graphs; by default where possible.
        masks: use an environment's action_masks(); by default where it has them.
    """

    learning_rate: float = 2.5e-4
    ent_coef: float = 0.01
    num_minibatches: int = 4
    update_epochs: int = 4
    clip_coef: float = 0.1
    value_loss: Literal["cleanrl", "sb3"] = "cleanrl"
    capture: bool | None = None
    masks: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(clip_coef=self.clip_coef)
        require_at_least(1, num_minibatches=self.num_minibatches, update_epochs=self.update_epochs)

    def make(self, policy: Any, env: VecEnv, steps: int, **where: Any) -> HeadPPO:
        """PPO with the head."""
        batch = self.num_steps * env.num_envs
        if batch // self.num_minibatches < 2:
            raise ValueError(
                f"num_minibatches {self.num_minibatches} leaves less than two steps to each: a "
                f"rollout has {batch} (num_envs times num_steps)"
            )
        return HeadPPO(
            policy,
            env,
            batch_size=batch // self.num_minibatches,
            n_epochs=self.update_epochs,
            clip_range=self.clip_coef,
            vf_coef=self.vf_coef / 2,
            value_loss=self.value_loss,
            capture=self.capture,
            masks=self.masks,
            **self._shared(env, steps),
            **where,
        )


@dataclass
class A2COptions(Options):
    """A2C with the defaults of Stable-Baselines3.

    Args:
        use_rms_prop: RMSprop is the optimizer, else Adam.
        rms_prop_eps: epsilon of RMSprop.
        normalize_advantage: scale the advantages of a rollout to mean 0 and deviation 1.
    """

    log_interval: ClassVar[int] = 100  # rollouts are short

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

    def make(self, policy: Any, env: VecEnv, steps: int, **where: Any) -> HeadA2C:
        """A2C with the head."""
        return HeadA2C(
            policy,
            env,
            vf_coef=self.vf_coef,
            use_rms_prop=self.use_rms_prop,
            rms_prop_eps=self.rms_prop_eps,
            normalize_advantage=self.normalize_advantage,
            **self._shared(env, steps),
            **where,
        )


@dataclass(frozen=True)
class Algorithm:
    """An algorithm that ``--model`` names.

    Args:
        options: the class of its options.
        defaults: of options that are not its own.
        not_atari: defaults for environments other than Atari games.
    """

    options: type[Options]
    defaults: dict[str, Any]
    not_atari: dict[str, Any]


ALGORITHMS = {
    "ppo": Algorithm(
        PPOOptions,
        defaults={},
        not_atari={
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
        },
    ),
    "a2c": Algorithm(
        A2COptions,
        # Its rollouts are some 25 times as short as PPO's: the monitor looks at fewer of them.
        defaults={"fisher.every_n_rollouts": 100, "fisher.image_every_n_rollouts": 2_000},
        not_atari={"trainer.eval_deterministic": True},
    ),
}
