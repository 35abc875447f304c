"""Playing: the policy acts in vector environments, and a buffer remembers."""

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

from catnat.transfer import send

from .buffers import DeviceRolloutBuffer, Observation, map_observations

Act = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor, Tensor]]


class Step(NamedTuple):
    """What a step of all environments gave."""

    actions: NDArray[Any]
    rewards: NDArray[Any]
    dones: NDArray[np.bool_]
    infos: list[dict[str, Any]]


@dataclass
class _Part:
    """Some of the environments, which step together."""

    env: VecEnv
    envs: slice  # their places among all
    act: Act
    observations: Observation = None
    actions: NDArray[Any] | None = None  # sent and not yet answered


class Collector:
    """Plays rollouts.

    A ``VecEnv`` may have two attributes that matter here:

    - ``halves``: two ``VecEnv`` of its first and its last environments, which can be stepped
      separately. While one plays, the policy looks at the other. Seen on the environment itself
      only, not through wrappers, which might change what they see;
    - ``forced_actions``: an array (n,) of the actions that the next step will play whatever it is
      told, -1 where the policy is free. Transitions are labelled by what is played. As it was
      not the policy's choice, they teach values, and no policy gradient.

    Args:
        policy: who acts.
        buffer: who remembers.
        env: all environments.
        overlap: use ``halves``.
        replay: wraps the policy's forward pass, to replay it as a CUDA graph, say.
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        buffer: DeviceRolloutBuffer,
        env: VecEnv,
        overlap: bool = True,
        replay: Callable[[Act], Act] = lambda act: act,
    ) -> None:
        self.policy, self.buffer = policy, buffer
        self.parts: list[_Part] = []
        first = 0
        for each in _parts_of(env) if overlap else (env,):
            envs = slice(first, first + each.num_envs)
            self.parts.append(_Part(each, envs, replay(self._act)))
            first = envs.stop

    def steps(self, observations: Observation) -> Generator[Step]:
        """Fill the buffer; yields after each step, when the first of halves plays the next one."""
        for part in self.parts:
            part.observations = map_observations(lambda x, envs=part.envs: x[envs], observations)
        first, *others = self.parts
        last = self.buffer.buffer_size - 1
        try:
            self._send(first, 0)
            for step in range(last + 1):
                for part in others:
                    self._send(part, step)
                done = [self._receive(first, step)]
                if others and step < last:
                    self._send(first, step + 1)
                done += [self._receive(part, step) for part in others]
                yield _join(done)
                if not others and step < last:
                    self._send(first, step + 1)
        finally:  # whoever stops halfway leaves no environment waiting
            for part in self.parts:
                if part.actions is not None:
                    part.actions = None
                    part.observations = part.env.step_wait()[0]

    def observations(self) -> Observation:
        """What all environments show now."""
        if len(self.parts) == 1:
            return self.parts[0].observations
        join: Callable[..., Any] = lambda *parts: np.concatenate(parts)  # noqa: E731
        return map_observations(join, *(part.observations for part in self.parts))

    def last_values(self) -> Tensor:
        """The policy's values (n,) of what all environments show now."""
        with torch.no_grad():
            shown = self.policy.obs_to_tensor(self.observations())[0]
            return self.policy.predict_values(shown).flatten()

    @torch.no_grad()
    def _act(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, values and log-probabilities; device work alone.

        Args:
            batch: the observation, or the entries of one that is a dict; then, where there are
                such, the forced actions.
        """
        places = self.buffer.observations
        if isinstance(places, dict):
            shown: Observation = dict(zip(places, batch, strict=False))
        else:
            shown = batch[0]
        actions, values, log_probs = self.policy(shown)
        if len(batch) > (len(places) if isinstance(places, dict) else 1):
            actions = torch.where(batch[-1] >= 0, batch[-1], actions)
            log_probs = self.policy.action_dist.log_prob(actions)  # still that of this call
        return actions, values, log_probs

    def _send(self, part: _Part, step: int) -> None:
        """Choose actions and let the environments begin to play them."""
        shown = self.buffer.send(step, part.envs, part.observations)
        batch = list(shown.values()) if isinstance(shown, dict) else [shown]
        forced = getattr(part.env, "forced_actions", None)
        if forced is not None:
            forced = torch.from_numpy(forced).to(self.buffer.device, non_blocking=True)
            batch.append(forced)
        actions, values, log_probs = part.act(batch)
        told = None if forced is None else forced >= 0
        self.buffer.write(step, part.envs, actions, values, log_probs, told)
        part.actions = send(actions)().numpy()
        part.env.step_async(part.actions)

    def _receive(self, part: _Part, step: int) -> Step:
        """Wait for the environments."""
        actions, part.actions = part.actions, None  # whatever happens now: do not wait again
        assert actions is not None
        part.observations, rewards, dones, infos = part.env.step_wait()
        done = Step(actions, rewards, dones, infos)
        self.buffer.host_rewards[step, part.envs] = rewards
        self.buffer.host_dones[step, part.envs] = dones
        self._bootstrap(step, part.envs.start, done)
        return done

    def _bootstrap(self, step: int, first: int, done: Step) -> None:
        """An episode that was cut off, not ended, would have gone on as the policy thinks."""
        cut = [int(i) for i in np.flatnonzero(done.dones) if _is_cut_off(done.infos[i])]
        if not cut:
            return
        shown = [done.infos[i]["terminal_observation"] for i in cut]
        with torch.no_grad():
            stacked = map_observations(lambda *each: np.stack(each), *shown)
            values = self.policy.predict_values(self.policy.obs_to_tensor(stacked)[0])
        self.buffer.bootstrap(step, [first + i for i in cut], values)


def _parts_of(env: VecEnv) -> Sequence[VecEnv]:
    halves = None if isinstance(env, VecEnvWrapper) else getattr(env, "halves", None)
    return halves or (env,)


def _is_cut_off(info: dict[str, Any]) -> bool:
    cut = info.get("TimeLimit.truncated", False)
    return bool(cut) and info.get("terminal_observation") is not None


def _join(parts: list[Step]) -> Step:
    if len(parts) == 1:
        return parts[0]
    actions, rewards, dones = (np.concatenate(x) for x in list(zip(*parts, strict=True))[:3])
    return Step(actions, rewards, dones, [info for part in parts for info in part.infos])
