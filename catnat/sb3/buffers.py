"""A rollout buffer that lives where the policy does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.utils import get_device
from torch import Tensor

Observation = Any  # an array or a tensor, or a dict of them


class Minibatch(NamedTuple):
    """Transitions, (B, ...) each."""

    observations: Observation
    actions: Tensor
    values: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    forced: Tensor


class DeviceRolloutBuffer:
    """A rollout of T steps in n environments, as tensors on the policy's device.

    Observations keep the dtype of their space, so pictures stay bytes. All tensors are made once
    and keep their place in memory, as captured CUDA graphs need it. What the host knows first
    (rewards, ends of episodes) stays there until the rollout is complete, and travels at once.

    Args:
        buffer_size: T.
        observation_space: of one environment; ``Dict`` spaces of arrays too.
        action_space: ``Discrete`` or ``MultiDiscrete``.
        device: of the policy.
        gae_lambda: lambda of the generalized advantage estimation.
        gamma: discount.
        n_envs: n.

    Shapes:
        ``observations`` (T, n, ...); ``actions`` (T, n) or (T, n, A); all others (T, n).
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        gae_lambda: float = 1.0,
        gamma: float = 0.99,
        n_envs: int = 1,
    ) -> None:
        self.buffer_size, self.n_envs = buffer_size, n_envs
        self.gae_lambda, self.gamma = gae_lambda, gamma
        self.device = get_device(device)
        shape = (buffer_size, n_envs)
        self.on_device = self.device.type != "cuda" or _fits(shape, observation_space, self.device)
        place = self.device if self.on_device else torch.device("cpu")
        self.observations = _zeros(observation_space, shape, place)
        # The host's end of the copies. A GPU reads pinned memory by itself.
        pinned = self.device.type == "cuda"
        self._sent = _zeros(observation_space, (n_envs,), torch.device("cpu"), pinned)
        actions = action_space.shape or ()
        self.actions = torch.zeros(*shape, *actions, dtype=torch.int64, device=self.device)
        self.values, self.log_probs, self.advantages, self.returns, self.rewards, self.continues = (
            torch.zeros(shape, device=self.device) for _ in range(6)
        )
        self.forced = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.host_rewards = np.zeros(shape, np.float32)
        self.host_dones = np.zeros(shape, np.bool_)
        self._bootstraps: list[tuple[int, list[int], Tensor]] = []

    def reset(self) -> None:
        """Begin a new rollout."""
        self._bootstraps = []
        self.forced.zero_()

    def send(self, step: int, envs: slice, observations: Observation) -> Observation:
        """Store the host's observations of some environments; returns them on the device.

        Not to be called again for the same environments until the device is known to have
        worked on them (their actions have arrived).
        """

        def send_one(host: Tensor, place: Tensor, given: Any) -> Tensor:
            host[envs].numpy()[...] = given
            slot = place[step, envs]
            slot.copy_(host[envs], non_blocking=True)
            return slot if self.on_device else slot.to(self.device)

        return map_observations(send_one, self._sent, self.observations, observations)

    def write(
        self,
        step: int,
        envs: slice,
        actions: Tensor,
        values: Tensor,
        log_probs: Tensor,
        forced: Tensor | None = None,
    ) -> None:
        """Store what the policy made of them, and which actions were not its choice."""
        self.actions[step, envs].copy_(actions)
        self.values[step, envs].copy_(values.flatten())
        self.log_probs[step, envs].copy_(log_probs)
        if forced is not None:
            self.forced[step, envs].copy_(forced)

    def bootstrap(self, step: int, envs: list[int], values: Tensor) -> None:
        """Let environments go on, worth these values, that were cut off after a step."""
        self._bootstraps.append((step, envs, values.flatten()))

    def upload(self) -> None:
        """Bring the host's part of the rollout to the device."""
        self.rewards.copy_(torch.from_numpy(self.host_rewards))
        self.continues.copy_(torch.from_numpy(1 - self.host_dones.astype(np.float32)))
        for step, envs, values in self._bootstraps:
            self.rewards[step, envs] += self.gamma * values

    def estimate_advantages(self, last_values: Tensor) -> Tensor:
        r"""Advantages and returns, from the values (n,) of what follows the last step.

        .. math:: A_t = r_t + \gamma c_t v_{t+1} - v_t + \gamma \lambda c_t A_{t+1}, R_t = A_t + v_t

        with c_t = 0 where an episode ends and 1 elsewhere. Returns the advantages.
        """
        advantage = torch.zeros_like(last_values)
        following = last_values
        for step in reversed(range(self.buffer_size)):
            goes_on, value = self.continues[step], self.values[step]
            delta = self.rewards[step] + self.gamma * following * goes_on - value
            advantage = delta + self.gamma * self.gae_lambda * goes_on * advantage
            self.advantages[step] = advantage
            following = value
        torch.add(self.advantages, self.values, out=self.returns)
        return self.advantages

    def shuffled(self, batch_size: int) -> Iterator[Tensor]:
        """Indices of minibatches, (B,) each, on the device: every transition once.

        The order is the one in which Stable-Baselines3 would take them.
        """
        order = np.random.permutation(self.buffer_size * self.n_envs)
        envs, steps = np.divmod(order, self.buffer_size)  # there, environments come first
        indices = torch.from_numpy(steps * self.n_envs + envs)
        if self.device.type == "cuda":
            indices = indices.pin_memory()
        yield from indices.to(self.device, non_blocking=True).split(batch_size)

    def take(self, indices: Tensor) -> Minibatch:
        """The transitions with these indices (B,) among all T n of them."""
        own = indices if self.on_device else indices.cpu()
        observations = map_observations(
            lambda x: x.flatten(0, 1).index_select(0, own).to(self.device), self.observations
        )
        rest = (getattr(self, name) for name in Minibatch._fields[1:])
        return Minibatch(observations, *(x.flatten(0, 1).index_select(0, indices) for x in rest))


def map_observations(function: Callable[..., Any], *observations: Observation) -> Observation:
    """Apply a function to arrays, or to each entry of dicts of arrays."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: function(*(each[key] for each in observations)) for key in first}
    return function(*observations)


def _zeros(
    space: spaces.Space[Any], shape: tuple[int, ...], device: torch.device, pinned: bool = False
) -> Observation:
    if isinstance(space, spaces.Dict):
        return {key: _zeros(each, shape, device, pinned) for key, each in space.spaces.items()}
    dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
    return torch.zeros(
        (*shape, *(space.shape or ())), dtype=dtype, device=device, pin_memory=pinned
    )


def _fits(shape: tuple[int, ...], space: spaces.Space[Any], device: torch.device) -> bool:
    """Whether half of the memory that is free on a device has room for observations."""
    needed = _bytes(space) * int(np.prod(shape))
    return bool(needed <= torch.cuda.mem_get_info(device)[0] / 2)


def _bytes(space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Dict):
        return sum(_bytes(each) for each in space.spaces.values())
    return int(np.dtype(space.dtype).itemsize * np.prod(space.shape or ()))
