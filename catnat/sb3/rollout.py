"""Collector: a policy plays rollouts in vector environments, and fills a buffer with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from torch import Tensor

from catnat.replay import send
from catnat.sb3.action_distributions import categories_of, unchecked
from catnat.sb3.buffers import DeviceRolloutBuffer, Observation, map_observations
from catnat.sb3.masks import masks_of, split_masks

Act = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor, Tensor]]


class Step(NamedTuple):
    """The results of one step of all environments."""

    new_obs: Observation
    actions: NDArray[Any]
    rewards: NDArray[Any]
    dones: NDArray[np.bool_]
    infos: list[dict[str, Any]]


@dataclass
class _Part:
    """Some of the environments, which step together."""

    env: VecEnv
    envs: slice  # their places among all environments
    act: Act
    observations: Observation = None  # the latest ones; None while a step is played
    dones: NDArray[np.bool_] | None = None  # ends of episodes with the latest step
    actions: NDArray[Any] | None = None  # actions of the step that is played


class Collector:
    """Plays rollouts with a policy, and stores them in a buffer.

    A ``VecEnv`` may have two attributes that the collector uses:

    - ``halves``: two ``VecEnv`` of its first and its last environments, which can be stepped
      separately. While one half plays, the policy computes the actions of the other. The attribute
      must belong to the environment itself: a wrapper might change observations or actions, and
      its ``halves`` would not;
    - ``forced_actions``: an array (n,) of the actions that the next step plays whatever actions it
      is given, -1 where the policy is free. The buffer stores the actions that are played. Forced
      actions are not the policy's choice: the critic learns from them, the policy does not.

    Args:
        policy: the policy that acts.
        buffer: the buffer to fill.
        env: all environments.
        overlap: use ``halves``.
        replay: wraps the policy's forward pass, for example to replay it as a CUDA graph.
        masked: ask the environments for masks of actions before each step.
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        buffer: DeviceRolloutBuffer,
        env: VecEnv,
        overlap: bool = True,
        replay: Callable[[Act], Act] = lambda act: act,
        masked: bool = False,
    ) -> None:
        self.policy, self.buffer, self.masked = policy, buffer, masked
        self.parts: list[_Part] = []
        first = 0
        for each in _parts_of(env) if overlap else (env,):
            envs = slice(first, first + each.num_envs)
            self.parts.append(_Part(each, envs, replay(self._act)))
            first = envs.stop

    def steps(self, observations: Observation, starts: NDArray[np.bool_]) -> Generator[Step]:
        """Play a rollout; yields after each step, while the first half already plays the next one.

        The buffer gets observations, actions, values and log-probabilities here. The caller stores
        rewards and ends of episodes.

        Args:
            observations: the present observations of all environments.
            starts: which environments begin an episode with them.
        """
        for part in self.parts:
            part.observations = map_observations(lambda x, envs=part.envs: x[envs], observations)
            part.dones = starts[part.envs]
        first, *others = self.parts
        last = self.buffer.buffer_size - 1
        try:
            self._send(first, 0)
            for step in range(last + 1):
                for part in others:
                    self._send(part, step)
                done = [self._receive(first)]
                if others and step < last:
                    self._send(first, step + 1)
                done += [self._receive(part) for part in others]
                yield Step(self.observations(), *_join(done))
                if not others and step < last:
                    self._send(first, step + 1)
        finally:  # a caller may stop halfway: no environment is left amid a step
            for part in self.parts:
                if part.actions is not None:
                    self._receive(part)

    def observations(self) -> Observation:
        """The present observations of all environments; None if a step was interrupted."""
        if any(part.observations is None for part in self.parts):
            return None
        return map_observations(_concatenate, *(part.observations for part in self.parts))

    def dones(self) -> NDArray[np.bool_]:
        """Which environments begin an episode with their present observation."""
        done: NDArray[np.bool_] = _concatenate(*(part.dones for part in self.parts))
        return done

    def last_values(self) -> Tensor:
        """The policy's values (n, 1) of the present observations."""
        with torch.no_grad():
            values: Tensor = self.policy.predict_values(
                self.policy.obs_to_tensor(self.observations())[0]
            )
            return values

    def bootstrap(self, step: Step) -> None:
        """Add the value of the last observation where an episode was cut off, not ended."""
        cut = [int(i) for i in np.flatnonzero(step.dones) if _is_cut_off(step.infos[i])]
        if not cut:
            return
        shown = [step.infos[i]["terminal_observation"] for i in cut]
        with torch.no_grad():
            stacked = map_observations(lambda *each: np.stack(each), *shown)
            values = self.policy.predict_values(self.policy.obs_to_tensor(stacked)[0])
        self.buffer.bootstrap(cut, values)

    @torch.no_grad()
    def _act(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, values and log-probabilities, without any work on the host.

        Args:
            batch: the observation, or all entries of a dict observation; then the masks, if there
                are any; then the forced actions, if the environment has any.
        """
        places = self.buffer.tensors.observations
        if isinstance(places, dict):
            shown: Observation = dict(zip(places, batch, strict=False))
            rest = list(batch[len(places) :])
        else:
            shown, *rest = batch
        masks = {"action_masks": rest.pop(0)} if self.masked else {}
        with unchecked(self.policy):
            actions, values, log_probs = self.policy(shown, **masks)
        if rest:
            (forced,) = rest
            actions = torch.where(forced >= 0, forced, actions)
            log_probs = self.policy.action_dist.log_prob(actions)  # as self.policy(shown) set it
        return actions, values, log_probs

    def _send(self, part: _Part, step: int) -> None:
        """Choose actions and let the environments begin to play them."""
        shown = self.buffer.send(step, part.envs, part.observations)
        batch = list(shown.values()) if isinstance(shown, dict) else [shown]
        masks = self._masks(part) if self.masked else None
        forced = getattr(part.env, "forced_actions", None)
        if masks is not None:
            batch.append(masks)
        if forced is not None:
            forced = torch.from_numpy(forced).to(self.buffer.device, non_blocking=True)
            batch.append(forced)
        actions, values, log_probs = part.act(batch)
        told = None if forced is None else forced >= 0
        self.buffer.write(step, part.envs, actions, values, log_probs, told, masks)
        part.actions = send(actions)().numpy()
        part.env.step_async(part.actions)

    def _masks(self, part: _Part) -> Tensor:
        """The present masks of some environments, checked on the host, then on the device."""
        sizes = categories_of(self.buffer.action_space)
        count, first = part.env.num_envs, part.envs.start
        parts = split_masks(masks_of(part.env), sizes, (count,), "environment", first)
        return torch.cat(parts, -1).to(self.buffer.device, non_blocking=True)

    def _receive(self, part: _Part) -> tuple[Any, ...]:
        """Wait for the environments; returns actions, rewards, dones and infos."""
        actions, part.actions = part.actions, None  # step_wait may raise: do not wait again
        part.observations = None
        part.observations, rewards, part.dones, infos = part.env.step_wait()
        return actions, rewards, part.dones, infos


def _parts_of(env: VecEnv) -> Sequence[VecEnv]:
    halves = None if isinstance(env, VecEnvWrapper) else getattr(env, "halves", None)
    return halves or (env,)


def _is_cut_off(info: dict[str, Any]) -> bool:
    cut = info.get("TimeLimit.truncated", False)
    return bool(cut) and info.get("terminal_observation") is not None


def _join(parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    if len(parts) == 1:
        return parts[0]
    *arrays, infos = zip(*parts, strict=True)
    return *(np.concatenate(each) for each in arrays), [info for each in infos for info in each]


def _concatenate(*parts: Any) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
