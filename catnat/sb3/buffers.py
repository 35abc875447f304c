"""DeviceRolloutBuffer: a rollout as tensors on the device of the policy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from stable_baselines3.common.utils import get_device
from torch import Tensor

Observation = Any  # an array or a tensor, or a dict of them


class Rollout(NamedTuple):
    """Tensors of T steps in n environments, (T, n, ...) each, or of a minibatch, (B, ...)."""

    observations: Observation
    actions: Tensor  # (T, n, A), A = 1 for a Discrete space
    values: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    rewards: Tensor
    continues: Tensor  # 0 where an episode ends with the step, 1 elsewhere
    forced: Tensor  # whether the action was not the policy's choice
    masks: Tensor | None = None  # (T, n, choices of all actions) bool, True = allowed


class _Array:
    """An attribute of Stable-Baselines3's buffer: one of the tensors as a NumPy array.

    Assigning an array copies it to the tensor. On the CPU the array and the tensor share their
    memory. On another device the array is a copy, and read-only: writing to it would not change
    the tensor.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, buffer: DeviceRolloutBuffer | None, owner: type) -> Any:
        return self if buffer is None else map_observations(_as_array, self._of(buffer))

    def __set__(self, buffer: DeviceRolloutBuffer, value: Any) -> None:
        map_observations(lambda x, y: x.copy_(torch.as_tensor(y)), self._of(buffer), value)

    def _of(self, buffer: DeviceRolloutBuffer) -> Observation:
        return getattr(buffer.tensors, self.name)


class DeviceRolloutBuffer(RolloutBuffer):
    """A rollout of T steps in n environments, as tensors on the policy's device.

    It is a ``RolloutBuffer`` of Stable-Baselines3, with the same attributes as NumPy arrays and the
    same methods. HeadPPO uses ``tensors`` and the methods that Stable-Baselines3 does not have,
    which copy nothing back to the host.

    Observations keep the dtype of their space, so pictures stay bytes. All tensors are made once
    and keep their place in memory, because captured CUDA graphs need that. Rewards and ends of
    episodes, which the host knows first, stay on the host until the rollout is complete.

    Args:
        buffer_size: T.
        observation_space: of one environment; ``Dict`` spaces of arrays too.
        action_space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``.
        device: of the policy.
        gae_lambda: lambda of the generalized advantage estimation.
        gamma: discount.
        n_envs: n.
    """

    observations = _Array()
    actions = _Array()
    values = _Array()
    log_probs = _Array()
    advantages = _Array()
    returns = _Array()
    rewards = _Array()

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
        device = get_device(device)
        shape = (buffer_size, n_envs)
        size = (*shape, get_action_dim(action_space))
        shown = _zeros(observation_space, shape, device)
        actions = torch.zeros(size, dtype=torch.int64, device=device)
        numbers = [torch.zeros(shape, device=device) for _ in range(6)]
        forced = torch.zeros(shape, dtype=torch.bool, device=device)
        self.tensors = Rollout._make([shown, actions, *numbers, forced, None])
        # Observations are copied to the device from here; a GPU reads pinned memory by itself.
        pinned = device.type == "cuda"
        self._sent = _zeros(observation_space, (n_envs,), torch.device("cpu"), pinned)
        self._host_rewards = self.tensors.rewards.cpu().numpy()  # on the CPU the same memory
        self.episode_starts = np.zeros(shape, np.float32)
        super().__init__(
            buffer_size, observation_space, action_space, device, gae_lambda, gamma, n_envs
        )

    # -- as in Stable-Baselines3 -----------------------------------------------------------------

    def reset(self) -> None:
        """Begin a new rollout."""
        self.pos, self.full = 0, False
        self.tensors.forced.zero_()

    def add(
        self,
        obs: Observation,
        action: NDArray[Any],
        reward: NDArray[Any],
        episode_start: NDArray[Any],
        value: Tensor,
        log_prob: Tensor,
    ) -> None:
        """Store the next step of all environments."""
        self.send(obs)
        self.write(torch.as_tensor(action), value, log_prob)
        self.receive(reward, episode_start)

    def compute_returns_and_advantage(self, last_values: Tensor, dones: NDArray[Any]) -> None:
        """Advantages and returns, from what follows the last step."""
        self.upload(dones)
        self.estimate_advantages(last_values.detach().to(self.device).flatten())

    def get(self, batch_size: int | None = None) -> Generator[Any]:
        """Minibatches in random order, as samples of Stable-Baselines3."""
        assert self.full, "the rollout is not complete"
        for indices in self.shuffled(batch_size or self.buffer_size * self.n_envs):
            batch = self.take(indices)
            of_dicts = isinstance(batch.observations, dict)
            kind: Any = DictRolloutBufferSamples if of_dicts else RolloutBufferSamples
            yield kind(batch.observations, batch.actions.float(), *batch[2:6])

    # -- as HeadPPO fills it -----------------------------------------------------------------------

    def hold_masks(self, choices: int) -> None:
        """From now on store masks of so many choices with each step; 0 for no masks."""
        own = self.tensors
        if choices != (0 if own.masks is None else own.masks.shape[-1]):
            shape = (*own.values.shape, choices)
            masks = torch.ones(shape, dtype=torch.bool, device=self.device) if choices else None
            self.tensors = own._replace(masks=masks)

    def send(self, observations: Observation) -> Observation:
        """Store the host's observations of the present step; returns them on the device.

        Call it again only after the actions have arrived: before, the device may still be reading
        the observations.
        """

        def send_one(host: Tensor, place: Tensor, given: Any) -> Tensor:
            host.numpy()[...] = np.reshape(given, host.shape)
            return place[self.pos].copy_(host, non_blocking=True)

        return map_observations(send_one, self._sent, self.tensors.observations, observations)

    def write(
        self,
        actions: Tensor,
        values: Tensor,
        log_probs: Tensor,
        forced: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> None:
        """Store the policy's actions, values and log-probabilities for the observations sent.

        ``forced`` says which actions were not the policy's choice, ``masks`` which were allowed.
        """
        own, step = self.tensors, self.pos
        for places, given in (
            (own.actions, actions),
            (own.values, values),
            (own.log_probs, log_probs),
            (own.forced, forced),
            (own.masks, masks),
        ):
            if places is not None and given is not None:
                places[step].copy_(given.reshape(places.shape[1:]))

    def receive(self, rewards: NDArray[Any], starts: NDArray[Any]) -> None:
        """Store the rewards (n,) of a step and which episodes began with it; go on to the next."""
        self._host_rewards[self.pos], self.episode_starts[self.pos] = rewards, starts
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def upload(self, dones: NDArray[Any]) -> None:
        """Copy rewards and ends of episodes to the device; ``dones``: ends with the last step."""
        self.tensors.rewards.copy_(torch.from_numpy(self._host_rewards))
        ends = np.concatenate([self.episode_starts[1:], np.asarray(dones, np.float32)[None]])
        self.tensors.continues.copy_(torch.from_numpy(1 - ends))

    def estimate_advantages(self, last_values: Tensor) -> Tensor:
        r"""Advantages and returns, from the values (n,) of what follows the last step.

        .. math:: A_t = r_t + \gamma c_t v_{t+1} - v_t + \gamma \lambda c_t A_{t+1}, R_t = A_t + v_t

        with c_t = 0 where an episode ends and 1 elsewhere. Returns the advantages.
        """
        own = self.tensors
        advantage = torch.zeros_like(last_values)
        following = last_values
        for step in reversed(range(self.buffer_size)):
            goes_on, value = own.continues[step], own.values[step]
            delta = own.rewards[step] + self.gamma * following * goes_on - value
            advantage = delta + self.gamma * self.gae_lambda * goes_on * advantage
            own.advantages[step] = advantage
            following = value
        torch.add(own.advantages, own.values, out=own.returns)
        return own.advantages

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

    def take(self, indices: Tensor) -> Rollout:
        """The transitions with these indices (B,) among all T n of them."""

        def pick(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, indices)

        observations, *rest = self.tensors
        picked = (None if x is None else pick(x) for x in rest)
        return Rollout(map_observations(pick, observations), *picked)  # type: ignore[arg-type]


def map_observations(function: Callable[..., Any], *observations: Observation) -> Observation:
    """Apply a function to arrays, or to each entry of dicts of arrays."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: function(*(each[key] for each in observations)) for key in first}
    return function(*observations)


def _as_array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.cpu().numpy()
    if tensor.device.type != "cpu":
        array.flags.writeable = False
    return array


def _zeros(
    space: spaces.Space[Any], shape: tuple[int, ...], device: torch.device, pinned: bool = False
) -> Observation:
    if isinstance(space, spaces.Dict):
        return {key: _zeros(each, shape, device, pinned) for key, each in space.spaces.items()}
    dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
    size = (*shape, *get_obs_shape(space))
    return torch.zeros(size, dtype=dtype, device=device, pin_memory=pinned)
