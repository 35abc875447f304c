"""HeadA2C, and the base of HeadPPO and HeadA2C: forced actions and the state of a run."""

from numbers import Real
from typing import Any

import numpy as np
import torch
from stable_baselines3 import A2C
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor
from torch.utils._pytree import tree_leaves

from catnat.rng import State, random_states, set_random_states
from catnat.sb3.policies import (
    HeadActorCriticCnnPolicy,
    HeadActorCriticPolicy,
    HeadMultiInputActorCriticPolicy,
    HeadPolicy,
)
from catnat.sb3.sb3_compat import OpenAlgorithm, set_counts, updates_of


class NonFinite(FloatingPointError):  # noqa: N818 - the name describes the numbers
    """A loss, a gradient, a weight, a reward or an observation is not a finite number."""


def require_finite(model: OnPolicyAlgorithm, **arrays: Any) -> None:
    """Raise an error if an environment returned a number that is not finite.

    Args:
        model: algorithm that plays.
        arrays: rewards, observations, by name.
    """
    for name, tree in arrays.items():
        for array in tree_leaves(tree):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonFinite(
                    f"the environment gave {name} that are not finite, after "
                    f"{model.num_timesteps} steps"
                )


def require_finite_weights(model: OnPolicyAlgorithm) -> None:
    """Raise an error if a weight of the policy is not finite."""
    if not all(weight.isfinite().all() for weight in model.policy.parameters()):
        raise NonFinite(f"weights are not finite in the update after {model.num_timesteps} steps")


def forces_actions(env: VecEnv) -> bool:
    """Whether an environment may force actions, see :mod:`catnat.sb3.masks`."""
    return isinstance(getattr(env, "forced_actions", None), np.ndarray)


class HeadAlgorithm(OpenAlgorithm):
    """An algorithm for policies with a head; the first of two base classes.

    Where an environment forces actions (see :mod:`catnat.sb3.masks`), the rollout has the actions
    that were played. Advantages are normalized over all steps, if at all; then the critic learns
    from all steps, and the policy only from those that were not forced.
    """

    policy_aliases = {
        "MlpPolicy": HeadActorCriticPolicy,
        "CnnPolicy": HeadActorCriticCnnPolicy,
        "MultiInputPolicy": HeadMultiInputActorCriticPolicy,
    }
    rollout_buffer: Any  # which also says what actions were forced (T, n), and has the masks

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: Any,
        rollout_buffer: Any,
        n_rollout_steps: int,
    ) -> bool:
        """Play one rollout; return False if a callback stopped it.

        The loop is that of Stable-Baselines3, and callbacks find its local variables; the actions
        come from :meth:`_act`, and some may be forced.
        """
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        rollout_buffer.forced = np.zeros((n_rollout_steps, env.num_envs), bool)
        rollout_buffer.action_masks = None  # the name is that of sb3-contrib's buffers
        is_forcing = forces_actions(env)
        callback.on_rollout_start()
        require_finite(self, observations=self.last_observations)
        for n_steps in range(n_rollout_steps):
            with torch.no_grad():
                obs_tensor = obs_as_tensor(self.last_observations, self.device)
                actions, values, log_probs = self._act(env, obs_tensor)
            actions = actions.cpu().numpy()
            if is_forcing:
                forced_actions = env.forced_actions  # type: ignore[attr-defined]
                rollout_buffer.forced[n_steps] = forced_actions >= 0
                actions = np.where(forced_actions >= 0, forced_actions, actions)
            new_obs, rewards, dones, infos = env.step(actions)
            self.num_timesteps += env.num_envs
            require_finite(self, rewards=rewards, observations=new_obs)
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            self.count_games(infos, dones)
            for index in np.flatnonzero(dones):  # a game that was cut off has a value
                terminal_obs = infos[index].get("terminal_observation")
                if terminal_obs is not None and infos[index].get("TimeLimit.truncated"):
                    last_obs, _ = self.policy.obs_to_tensor(terminal_obs)
                    with torch.no_grad():
                        terminal_value = self.policy.predict_values(last_obs)[0]
                    rewards[index] += self.gamma * terminal_value
            rollout_buffer.add(
                self.last_observations,
                actions,
                rewards,
                self.episode_starts,
                values,
                log_probs,
            )
            self.keep_last(new_obs, dones)
        with torch.no_grad():
            values = self.policy.predict_values(obs_as_tensor(new_obs, self.device))  # type: ignore[arg-type]
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def after_setup(self) -> None:
        """Check that the policy has a head."""
        if not isinstance(self.policy, HeadPolicy):
            raise ValueError(
                f"{type(self).__name__} needs a policy with a head, got {self.policy_class}"
            )

    def _act(self, env: VecEnv, obs_tensor: Any) -> Any:
        """Actions, values and log-probabilities of the policy."""
        return self.policy(obs_tensor)


class HeadA2C(HeadAlgorithm, A2C):
    """A2C for policies with a categorical head; its steps equal those of ``stable_baselines3.A2C``.

    If weights are not finite after an update, it raises :class:`NonFinite`. It does not support
    masks, so an environment with masks raises an error. If an environment forces actions (see
    :mod:`catnat.sb3.masks`), the rollout contains the actions that were played. The critic learns
    from them, and the policy does not. The arguments are those of ``stable_baselines3.A2C``;
    "MlpPolicy", "CnnPolicy" and "MultiInputPolicy" select the policies with a head.
    """

    def after_setup(self) -> None:
        """Refuse environments that mask actions."""
        super().after_setup()
        self._refuse_masks(self.env)

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        """Play in another environment, which has no masks."""
        super().set_env(env, force_reset)
        self._refuse_masks(self.env)

    def _refuse_masks(self, env: VecEnv | None) -> None:
        if env is not None and env.has_attr("action_masks"):
            raise ValueError("HeadA2C does not mask actions, the environment does: use HeadPPO")

    def train(self) -> None:
        """Learn from the rollout."""
        buffer = self.rollout_buffer
        normalize_advantage = self.normalize_advantage
        if buffer.forced.any():  # with an advantage of 0 a step has no part in the policy's loss
            if normalize_advantage:
                buffer.advantages = normalized(torch.from_numpy(buffer.advantages)).numpy()
            buffer.advantages[buffer.forced] = 0
            self.normalize_advantage = False
        super().train()
        self.normalize_advantage = normalize_advantage
        require_finite_weights(self)


def normalized(advantages: Tensor) -> Tensor:
    """Advantages with mean 0 and standard deviation 1."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


# -- the state of a run, as tensors and plain values that load without code ------------------------


def state_of(model: OnPolicyAlgorithm) -> State:
    """Everything that a run resumes from, except environments: they begin new episodes."""
    parameters = model.get_parameters()
    logger = model.logger
    return {
        "state_dict": parameters["policy"],
        "optimizer": parameters["policy.optimizer"],
        "global_step": model.num_timesteps,
        "updates": updates_of(model),
        "games": [{k: float(v) for k, v in game.items()} for game in model.ep_info_buffer or ()],
        "successes": [float(success) for success in model.ep_success_buffer or ()],
        "normalizer": {
            index: {
                part: torch.as_tensor(value, dtype=torch.float64)
                for part, value in vars(moments).items()
            }
            for index, moments in enumerate(_moments(model))
        },
        # Values of the latest update, which are written with the row of the next rollout.
        "logged": {
            name: (float(value), logger.name_to_excluded[name])
            for name, value in logger.name_to_value.items()
            if isinstance(value, Real)
        },
        "random": random_states(model.device),
    }


def load_state(model: OnPolicyAlgorithm, state: State) -> None:
    """Put a model that has a logger into a state that :func:`state_of` returned."""
    model.set_parameters({"policy": state["state_dict"], "policy.optimizer": state["optimizer"]})
    model.num_timesteps = state["global_step"]
    # Earlier versions saved no successes.
    set_counts(model, state["updates"], state["games"], state.get("successes", ()))
    for moments, parts in zip(_moments(model), state["normalizer"].values(), strict=True):
        for part, value in parts.items():
            setattr(moments, part, value.numpy())
    for name, (value, excluded) in state["logged"].items():
        model.logger.record(name, value, exclude=excluded)
    set_random_states(state["random"], model.device)


def _moments(model: OnPolicyAlgorithm) -> list[Any]:
    """The running moments that observations and rewards are scaled by, if they are."""
    normalizer = model.get_vec_normalize_env()
    return tree_leaves([normalizer.obs_rms, normalizer.ret_rms]) if normalizer else []
