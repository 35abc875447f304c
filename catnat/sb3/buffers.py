"""DeviceRolloutBuffer: a rollout as tensors on the device of the policy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
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
    masks: Tensor | None


class Rollout(NamedTuple):
    """Tensors of T steps in n environments: (T, n) each, with more dimensions where noted."""

    observations: Observation  # (T, n, ...)
    actions: Tensor  # (T, n), or (T, n, A) of a MultiDiscrete space
    forced: Tensor  # whether the action was not the policy's choice
    values: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    rewards: Tensor
    continues: Tensor  # 0 where an episode ends with the step, 1 elsewhere
    masks: Tensor | None = None  # (T, n, choices of all actions) bool, True = allowed


class _Array:
    """An attribute of Stable-Baselines3's buffer: one of the tensors as a NumPy array.

    On the CPU the array and the tensor share their memory. On another device the array is a copy,
    and read-only: writing to it would not change the tensor.
    """

    def __init__(self, shape: str = "") -> None:
        self.shape = shape  # name of the buffer's attribute with the shape of one entry

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, buffer: DeviceRolloutBuffer | None, owner: type) -> Any:
        if buffer is None:
            return self
        shape = getattr(buffer, self.shape) if self.shape else ()
        tensors = getattr(buffer.tensors, self.name)
        if isinstance(tensors, dict):
            return {key: _as_array(each, shape[key]) for key, each in tensors.items()}
        return _as_array(tensors, (shape,) if isinstance(shape, int) else shape)


class DeviceRolloutBuffer(RolloutBuffer):
    """A rollout of T steps in n environments, as tensors on the policy's device.

    It is a ``RolloutBuffer`` of Stable-Baselines3, with the same attributes as NumPy arrays and the
    same methods ``add``, ``compute_returns_and_advantage`` and ``get``. HeadPPO uses ``tensors``
    and the other methods, which copy nothing back to the host.

    Observations keep the dtype of their space, so pictures stay bytes. All tensors are made once
    and keep their place in memory, because captured CUDA graphs need that. Rewards and ends of
    episodes, which the host knows first, stay on the host until the rollout is complete, and are
    then copied to the device together.

    Args:
        buffer_size: T.
        observation_space: of one environment; ``Dict`` spaces of arrays too.
        action_space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``.
        device: of the policy.
        gae_lambda: lambda of the generalized advantage estimation.
        gamma: discount.
        n_envs: n.
    """

    observations = _Array("obs_shape")
    actions = _Array("action_dim")
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
        self.on_device = device.type != "cuda" or _fits(shape, observation_space, device)
        place = device if self.on_device else torch.device("cpu")
        size = (*shape, *(action_space.shape or ()))
        numbers = (torch.zeros(shape, device=device) for _ in range(6))
        self.tensors = Rollout(
            _zeros(observation_space, shape, place),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
            *numbers,
        )
        # Observations are copied to the device from here; a GPU reads pinned memory by itself.
        pinned = device.type == "cuda"
        self._sent = _zeros(observation_space, (n_envs,), torch.device("cpu"), pinned)
        own = self.tensors.rewards.numpy() if device.type == "cpu" else None
        self.host_rewards = np.zeros(shape, np.float32) if own is None else own
        self.episode_starts = np.zeros(shape, np.float32)
        self._bootstraps: list[tuple[int, list[int], Tensor]] = []
        super().__init__(
            buffer_size, observation_space, action_space, device, gae_lambda, gamma, n_envs
        )

    # -- as in Stable-Baselines3 -----------------------------------------------------------------

    def reset(self) -> None:
        """Begin a new rollout."""
        self.pos, self.full = 0, False
        self._bootstraps = []
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
        step, envs = self.pos, slice(0, self.n_envs)
        shapes = map_observations(lambda x: x.shape, self._sent)
        self.send(step, envs, map_observations(lambda x, shape: x.reshape(shape), obs, shapes))
        chosen = torch.as_tensor(action).reshape(self.tensors.actions.shape[1:])
        self.write(step, envs, chosen, value, log_prob.reshape(-1))
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
            actions = batch.actions.reshape(len(indices), -1).float()
            yield kind(batch.observations, actions, *batch[2:6])

    # -- as HeadPPO fills it -----------------------------------------------------------------------

    def hold_masks(self, choices: int) -> None:
        """From now on store masks of so many choices with each step; 0 for no masks."""
        own = self.tensors
        if choices != (0 if own.masks is None else own.masks.shape[-1]):
            shape = (*own.values.shape, choices)
            masks = torch.ones(shape, dtype=torch.bool, device=self.device) if choices else None
            self.tensors = own._replace(masks=masks)

    def send(self, step: int, envs: slice, observations: Observation) -> Observation:
        """Store the host's observations of some environments; returns them on the device.

        Call it again for the same environments only after their actions have arrived: before, the
        device may still be reading the observations.
        """

        def send_one(host: Tensor, place: Tensor, given: Any) -> Tensor:
            host[envs].numpy()[...] = given
            slot = place[step, envs]
            slot.copy_(host[envs], non_blocking=True)
            return slot if self.on_device else slot.to(self.device)

        return map_observations(send_one, self._sent, self.tensors.observations, observations)

    def write(
        self,
        step: int,
        envs: slice,
        actions: Tensor,
        values: Tensor,
        log_probs: Tensor,
        forced: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> None:
        """Store the policy's actions, values and log-probabilities for the observations sent.

        ``forced`` says which actions were not the policy's choice, ``masks`` which were allowed.
        """
        self.tensors.actions[step, envs].copy_(actions)
        self.tensors.values[step, envs].copy_(values.flatten())
        self.tensors.log_probs[step, envs].copy_(log_probs)
        if forced is not None:
            self.tensors.forced[step, envs].copy_(forced)
        if masks is not None:
            assert self.tensors.masks is not None, "call hold_masks before"
            self.tensors.masks[step, envs].copy_(masks)

    def at(self, step: int) -> tuple[Observation, Tensor, Tensor]:
        """Observations, values (n, 1) and log-probabilities (n,) of a step, on the device.

        They share the buffer's memory: the next rollout overwrites them.
        """
        own = self.tensors
        shown = map_observations(lambda x: x[step].to(self.device), own.observations)
        return shown, own.values[step, :, None], own.log_probs[step]

    def receive(self, rewards: NDArray[Any], starts: NDArray[Any]) -> None:
        """Store the rewards (n,) of a step and which episodes began with it; go on to the next."""
        self.host_rewards[self.pos], self.episode_starts[self.pos] = rewards, starts
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def bootstrap(self, envs: list[int], values: Tensor) -> None:
        """Add to the rewards of this step the values of environments that were cut off after it."""
        self._bootstraps.append((self.pos, envs, values.flatten()))

    def upload(self, dones: NDArray[Any]) -> None:
        """Copy rewards and ends of episodes to the device; ``dones``: ends with the last step."""
        rewards = self.tensors.rewards
        rewards.copy_(torch.from_numpy(self.host_rewards))
        for step, envs, values in self._bootstraps:
            rewards[step, envs] += self.gamma * values
        if self.device.type == "cpu":  # host_rewards share this memory, and now include the values
            self._bootstraps = []
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

    def take(self, indices: Tensor) -> Minibatch:
        """The transitions with these indices (B,) among all T n of them."""
        own = indices if self.on_device else indices.cpu()
        observations = map_observations(
            lambda x: x.flatten(0, 1).index_select(0, own).to(self.device),
            self.tensors.observations,
        )
        rest = (getattr(self.tensors, name) for name in Minibatch._fields[1:])
        taken: Any = (x if x is None else x.flatten(0, 1).index_select(0, indices) for x in rest)
        return Minibatch(observations, *taken)


def map_observations(function: Callable[..., Any], *observations: Observation) -> Observation:
    """Apply a function to arrays, or to each entry of dicts of arrays."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: function(*(each[key] for each in observations)) for key in first}
    return function(*observations)


def _as_array(tensor: Tensor, shape: tuple[int, ...]) -> NDArray[Any]:
    """A tensor (T, n, ...) as an array (T, n, *shape), see :class:`_Array`."""
    array: NDArray[Any] = tensor.cpu().numpy().reshape(*tensor.shape[:2], *shape)
    array.flags.writeable = tensor.device.type == "cpu"
    return array


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
    """Whether the observations fit into half of the free memory of a device."""
    needed = _bytes(space) * int(np.prod(shape))
    return bool(needed <= torch.cuda.mem_get_info(device)[0] / 2)


def _bytes(space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Dict):
        return sum(_bytes(each) for each in space.spaces.values())
    return int(np.dtype(space.dtype).itemsize * np.prod(space.shape or ()))
