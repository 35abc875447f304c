"""HeadPPO: the PPO of Stable-Baselines3 with rollout, policy and update on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.utils import explained_variance
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from catnat.checks import require_choice
from catnat.cuda_graph import (
    StepGraph,
    make_capturable,
    make_portable,
    portable_state,
    set_learning_rate,
    why_not_captured,
)
from catnat.sb3.action_distributions import categories_of, unchecked
from catnat.sb3.buffers import DeviceRolloutBuffer, Observation, map_observations
from catnat.sb3.masks import (
    decide,
    forced_actions_of,
    masks_of,
    split_masks,
    warn_of_evaluation,
)
from catnat.sb3.objective import ValueLoss, value_error
from catnat.sb3.policies import POLICIES, HeadPolicy, NonFinite, Snapshot

STATISTICS = (
    "policy_gradient_loss",
    "value_loss",
    "entropy_loss",
    "approx_kl",
    "clip_fraction",
    "loss",
    "grad_norm",
)
_KL = STATISTICS.index("approx_kl")


class HeadPPO(PPO):
    """PPO for policies with a categorical head (and others over the same action spaces).

    With the default options it takes the steps that ``stable_baselines3.PPO`` takes, and each of
    the two loads the zips that the other saves (``stable_baselines3.PPO`` ignores ``value_loss``).
    HeadPPO is made for a GPU: the rollout stays there, pictures as bytes; logged values are read
    once per update; the policy and the update are replayed as CUDA graphs.

    A loss, KL divergence or gradient that is not finite raises :class:`NonFinite` at the end of
    the update, with policy and optimizer put back to where they were before it. An action that
    was played and has become impossible does not raise: its term in the KL divergence is 1000.

    Args:
        policy: a class, or "MlpPolicy", "CnnPolicy", "MultiInputPolicy", which are here the
            policies with a head.
        env: the environment, or its name.
        args: as for ``stable_baselines3.PPO``: learning_rate, n_steps, batch_size, n_epochs, gamma,
            gae_lambda, clip_range, clip_range_vf, normalize_advantage, ent_coef, vf_coef,
            max_grad_norm, use_sde, sde_sample_freq, rollout_buffer_class, rollout_buffer_kwargs,
            target_kl, stats_window_size, tensorboard_log, policy_kwargs, verbose, seed, device.
        value_loss: "sb3", or "cleanrl" for the larger one of the errors of clipped and unclipped
            values, where ``clip_range_vf`` is the same as ``clip_range`` unless given. Neither has
            a factor 1/2: CleanRL's ``vf_coef`` of 0.5 is 0.25 here.
        capture: replay the policy and the update as CUDA graphs. None: wherever that is possible.
            False: never. True: as None, with a warning that says why where it is not possible.
        masks: use the masks that an environment's ``action_masks()`` gives, as sb3-contrib's
            MaskablePPO does, see :mod:`catnat.sb3.masks`. None: where the environment and the
            policy have them. True: an environment or a policy without them is an error. False:
            never.
        kwargs: as ``args``, by name.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = POLICIES
    rollout_buffer: DeviceRolloutBuffer
    stores_played_actions = True  # where an environment forces actions
    # Whether masks are used, decided when a model is made and when it begins to learn. Asking the
    # environment later would fail: it may be closed, or in the middle of a step.
    uses_masks: bool = False

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str | None,
        *args: Any,
        value_loss: ValueLoss = "sb3",
        capture: bool | None = None,
        masks: bool | None = None,
        **kwargs: Any,
    ) -> None:
        require_choice(get_args(ValueLoss), value_loss=value_loss)
        self.value_loss, self.capture, self.masks = value_loss, capture, masks
        self._baked: tuple[Any, ...] | None = None
        super().__init__(policy, env, *args, **kwargs)  # type: ignore[arg-type]

    # -- rollouts --------------------------------------------------------------------------------

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: Any,
        n_rollout_steps: int,
    ) -> bool:
        """Play one rollout; return False if a callback stopped it.

        Callbacks see the local variables that they see in Stable-Baselines3.
        """
        assert self._last_obs is not None and self._last_episode_starts is not None
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        callback.on_rollout_start()
        for _ in range(n_rollout_steps):
            n_steps = rollout_buffer.pos
            obs_tensor = rollout_buffer.send(self._last_obs)
            actions, values, log_probs = self._choose(env, obs_tensor)
            clipped_actions = actions  # for the callbacks, as n_steps
            new_obs, rewards, dones, infos = env.step(actions)
            self.num_timesteps += env.num_envs
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            self._update_info_buffer(infos, dones)
            self._bootstrap(rewards, dones, infos)
            rollout_buffer.receive(rewards, self._last_episode_starts)
            self._last_obs, self._last_episode_starts = new_obs, dones  # type: ignore[assignment]
        n_steps, values = n_rollout_steps, self._values_of(new_obs)
        rollout_buffer.upload(dones)
        self._estimate(values.flatten())
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _choose(self, env: VecEnv, shown: Observation) -> tuple[NDArray[Any], Tensor, Tensor]:
        """Actions on the host, values and log-probabilities; the buffer gets all of them."""
        batch = list(shown.values()) if isinstance(shown, dict) else [shown]
        masks = told = None
        if self.uses_masks:
            sizes = categories_of(self.action_space)
            parts = split_masks(masks_of(env), sizes, (env.num_envs,), "environment")
            masks = torch.cat(parts, -1).to(self.device, non_blocking=True)
            batch.append(masks)
        forced = forced_actions_of(env)
        if forced is not None:
            batch.append(torch.from_numpy(forced).to(self.device, non_blocking=True))
            told = batch[-1] >= 0
        actions, values, log_probs = self._act(batch)
        buffer, step = self.rollout_buffer, self.rollout_buffer.pos
        buffer.write(actions, values, log_probs, told, masks)
        # What the next step does not overwrite, unlike the output of a graph.
        values, log_probs = buffer.tensors.values[step, :, None], buffer.tensors.log_probs[step]
        return actions.cpu().numpy(), values, log_probs

    @torch.no_grad()
    def _forward(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, values and log-probabilities, without any work on the host.

        Args:
            batch: the observation, or all entries of a dict observation; then the masks, if they
                are used; then the forced actions, if the environment has any.
        """
        places = self.rollout_buffer.tensors.observations
        count = len(places) if isinstance(places, dict) else 1
        shown = dict(zip(places, batch, strict=False)) if isinstance(places, dict) else batch[0]
        rest = list(batch[count:])
        masks = {"action_masks": rest.pop(0)} if self.uses_masks else {}
        with unchecked(self.policy):
            actions, values, log_probs = self.policy(shown, **masks)
        for forced in rest:
            actions = torch.where(forced >= 0, forced, actions)
            log_probs = self.policy.action_dist.log_prob(actions)  # as self.policy(shown) set it
        return actions, values, log_probs

    @torch.no_grad()
    def _values_of(self, observations: Observation) -> Tensor:
        """The policy's values (B, 1) of observations on the host."""
        return self.policy.predict_values(self.policy.obs_to_tensor(observations)[0])

    def _bootstrap(self, rewards: NDArray[Any], dones: NDArray[Any], infos: list[Any]) -> None:
        """Add the value of the last observation where an episode was cut off, not ended."""
        shown = {int(i): infos[i].get("terminal_observation") for i in np.flatnonzero(dones)}
        cut = [i for i in shown if infos[i].get("TimeLimit.truncated") and shown[i] is not None]
        if cut:
            stacked = map_observations(lambda *each: np.stack(each), *(shown[i] for i in cut))
            rewards[cut] += self.gamma * self._values_of(stacked).flatten().cpu().numpy()

    # -- updates ---------------------------------------------------------------------------------

    def train(self) -> None:
        """Learn from the rollout."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        clips = self._set_numbers()
        before = Snapshot(self.policy)
        epochs: list[list[Tensor]] = []
        for _ in range(self.n_epochs):
            epochs.append([])
            self._n_updates += 1
            if not self._train_epoch(epochs[-1]):
                break
        self._log(epochs, clips, before)

    def _train_epoch(self, rows: list[Tensor]) -> bool:
        """Add the statistics of each minibatch; False if the policy has moved far enough."""
        for indices in self.rollout_buffer.shuffled(self.batch_size):
            if self.target_kl is None:
                rows.append(self._optimize(indices).clone())  # replays write to the same place
                continue
            loss, statistics = self._loss(indices)
            if statistics[_KL] > 1.5 * self.target_kl:
                rows.append(torch.cat([statistics, statistics.new_zeros(1)]))
                if self.verbose >= 1:
                    print(f"Early stopping due to reaching max kl: {statistics[_KL]:.2f}")
                return False
            rows.append(self._descend(loss, statistics))
        return True

    def _minimize(self, indices: Tensor) -> Tensor:
        """One step of the optimizer, on the device alone; returns ``STATISTICS``."""
        return self._descend(*self._loss(indices))

    def _loss(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a minibatch, and all ``STATISTICS`` but the last.

        The policy's loss is -E min(r A, clip(r) A), r the new probability of an action over the
        old one. The KL divergence is E (r - 1 - log r).
        """
        batch = self.rollout_buffer.take(indices)
        low, high, clip, clip_value, entropy_share, value_share = self._numbers.unbind()
        masks = {} if batch.masks is None else {"action_masks": batch.masks}
        action_shape = self.action_space.shape or ()
        with unchecked(self.policy):
            values, log_prob, entropy = self.policy.evaluate_actions(
                batch.observations, batch.actions.reshape(len(indices), *action_shape), **masks
            )
        advantages = batch.advantages
        if self.normalize_advantage and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        # A forced action was not chosen by the policy, so it has no part in the ratios.
        log_ratio = torch.where(batch.forced, 0.0, log_prob - batch.log_probs)
        ratio = log_ratio.exp()
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(low, high)).mean()
        value_loss = value_error(
            values.flatten(),
            batch.values,
            batch.returns,
            clip_value if self._clips_values else None,
            self.value_loss,
        )
        entropy_loss = -(-log_prob if entropy is None else entropy).mean()
        loss = policy_loss + entropy_share * entropy_loss + value_share * value_loss
        with torch.no_grad():
            kl = (ratio - 1 - log_ratio).mean()
            clipped = ((ratio - 1).abs() > clip).float().mean()
        parts = (policy_loss, value_loss, entropy_loss, kl, clipped, loss)
        return loss, torch.stack([part.detach() for part in parts])

    def _descend(self, loss: Tensor, statistics: Tensor) -> Tensor:
        self.policy.optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()
        return torch.cat([statistics, norm.detach()[None]])

    def _log(self, epochs: list[list[Tensor]], clips: dict[str, float], before: Snapshot) -> None:
        """Read the statistics of the update from the device, all at once, and log them."""
        table = torch.stack([row for rows in epochs for row in rows]).cpu()
        if not table.isfinite().all():
            before.restore()
            self._prepare()
            row, column = (~table.isfinite()).nonzero()[0].tolist()
            raise NonFinite(
                f"{STATISTICS[column]} is {table[row, column].item()} in the update after "
                f"{self.num_timesteps} steps; the policy is as it was before that update"
            )
        record = dict(zip(STATISTICS, table.double().mean(0).tolist(), strict=True))
        record["approx_kl"] = float(table[-len(epochs[-1]) :, _KL].double().mean())
        record["loss"] = float(table[-1, STATISTICS.index("loss")])
        buffer = self.rollout_buffer
        explained = explained_variance(buffer.values.flatten(), buffer.returns.flatten())
        record["explained_variance"] = float(explained)
        for name, value in (record | clips).items():
            self.logger.record(f"train/{name}", value)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _set_numbers(self) -> dict[str, float]:
        """Copy numbers that may change between updates to the device; return the logged ones."""
        remaining = self._current_progress_remaining
        clip = self.clip_range(remaining)  # type: ignore[operator]
        own = self.clip_range_vf
        clip_value = clip if own is None else own(remaining)  # type: ignore[operator]
        numbers = (1 - clip, 1 + clip, clip, clip_value, self.ent_coef, self.vf_coef)
        self._numbers.copy_(torch.tensor(numbers))
        baked = (self.max_grad_norm, self.normalize_advantage, self.value_loss, own is None)
        if self._captured and baked != self._baked:
            self._optimize.reset()  # type: ignore[attr-defined]
        self._baked = baked
        return {"clip_range": clip} | ({"clip_range_vf": clip_value} if self._clips_values else {})

    @property
    def _clips_values(self) -> bool:
        return self.clip_range_vf is not None or self.value_loss == "cleanrl"

    def _update_learning_rate(self, optimizers: list[Optimizer] | Optimizer) -> None:
        """Set the learning rate, in place where it lies on the device."""
        rate = self.lr_schedule(self._current_progress_remaining)
        self.logger.record("train/learning_rate", rate)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            for group in optimizer.param_groups:
                set_learning_rate(group, rate, self.device if self._captured else None)

    # -- setting up, saving, playing -------------------------------------------------------------

    def _setup_model(self) -> None:
        categories_of(self.action_space)
        # A zip of stable_baselines3.PPO or MaskablePPO brings the name of its own buffer.
        given = self.rollout_buffer_class or RolloutBuffer
        stock = given in (RolloutBuffer, DictRolloutBuffer)
        stock |= given.__module__ == "sb3_contrib.common.maskable.buffers"
        self.rollout_buffer_class = DeviceRolloutBuffer if stock else given
        if not issubclass(self.rollout_buffer_class, DeviceRolloutBuffer):
            raise ValueError(
                "HeadPPO keeps rollouts in a DeviceRolloutBuffer, it cannot use "
                f"{self.rollout_buffer_class.__name__}"
            )
        super()._setup_model()
        self._numbers = torch.zeros(6, device=self.device)
        self._captured = False
        self.uses_masks = self._decide_masks()  # raises if masks are asked for and cannot be had

    def _maybe_recommend_cpu(self, mlp_class_name: str = "HeadActorCriticPolicy") -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    def learn(self, *args: Any, **kwargs: Any) -> HeadPPO:
        """As in Stable-Baselines3, with the model's device as the current one."""
        device = self.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return super().learn(*args, **kwargs)

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        self.uses_masks = self._decide_masks()  # there may be another environment
        self._prepare()
        total, callback = super()._setup_learn(*args, **kwargs)
        if self.uses_masks:
            warn_of_evaluation(callback)
        return total, callback

    def _prepare(self) -> None:
        """Decide whether CUDA graphs are replayed, and begin with new graphs."""
        reason = why_not(self)
        if self.capture and reason:
            warnings.warn(f"nothing is replayed as a CUDA graph: {reason}", stacklevel=2)
        self._captured = reason is None
        replay: Callable[[Any], Any] = StepGraph if self._captured else lambda step: step
        if self._captured:
            make_capturable(self.policy.optimizer, self.device)
        else:
            make_portable(self.policy.optimizer)
        buffer = self.rollout_buffer
        buffer.hold_masks(sum(categories_of(self.action_space)) if self.uses_masks else 0)
        self._act: Callable[[Sequence[Tensor]], Any] = replay(self._forward)
        self._optimize: Callable[[Tensor], Tensor] = replay(self._minimize)
        self._estimate: Callable[[Tensor], Tensor] = replay(buffer.estimate_advantages)

    def _decide_masks(self) -> bool:
        return self.env is not None and decide(self.masks, self.policy, self.env)

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[Any, Any]:
        """Actions, only allowed ones if there are masks; see :class:`MaskedPlayer`."""
        masks = {} if action_masks is None else {"action_masks": action_masks}
        return self.policy.predict(observation, state, episode_start, deterministic, **masks)

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """All parameters, those of the optimizer in a form that any device understands."""
        parameters = super().get_parameters()
        parameters["policy.optimizer"] = portable_state(parameters["policy.optimizer"])
        return parameters

    def set_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Load parameters; graphs that were captured are forgotten."""
        super().set_parameters(*args, **kwargs)
        if self._captured:
            self._prepare()

    def _excluded_save_params(self) -> list[str]:
        made_anew = ["_act", "_optimize", "_estimate", "_numbers", "_captured", "_baked"]
        made_anew += ["uses_masks"]
        if self.rollout_buffer_class is DeviceRolloutBuffer:  # each PPO that loads has its own
            made_anew.append("rollout_buffer_class")
        return [*super()._excluded_save_params(), *made_anew]


def why_not(model: HeadPPO) -> str | None:
    """Why the policy and the update of a model are not replayed; None if they are."""
    optimizer = model.policy.optimizer
    obstacles = {
        "target_kl looks at each minibatch before the step": model.target_kl is not None,
        "the policy has no head, and may wait for the device": not isinstance(
            model.policy, HeadPolicy
        ),
        f"{type(optimizer).__name__} cannot be captured": "capturable" not in optimizer.defaults,
    }
    return why_not_captured(model.capture, model.device, obstacles)
