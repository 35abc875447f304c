"""The state of a run of Stable-Baselines3, as tensors and plain values that load without code."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.running_mean_std import RunningMeanStd

from catnat.rng import random_states, set_random_states


def state_of(model: OnPolicyAlgorithm) -> dict[str, Any]:
    """Everything that a run continues from, except environments: they begin new episodes."""
    parameters = model.get_parameters()
    return {
        "state_dict": parameters["policy"],
        "optimizer": parameters["policy.optimizer"],
        "global_step": model.num_timesteps,
        "updates": model._n_updates,
        "games": [{k: float(v) for k, v in game.items()} for game in model.ep_info_buffer or ()],
        "normalizer": {
            name: {part: torch.as_tensor(value) for part, value in vars(moments).items()}
            for name, moments in _moments(model).items()
        },
        "random": random_states(model.device),
    }


def load_state(model: OnPolicyAlgorithm, state: dict[str, Any]) -> None:
    """Put a model into a state that :func:`state_of` gave."""
    model.set_parameters({"policy": state["state_dict"], "policy.optimizer": state["optimizer"]})
    model.num_timesteps = state["global_step"]
    model._n_updates = state["updates"]
    model.ep_info_buffer = deque(state["games"], maxlen=model._stats_window_size)
    model.ep_success_buffer = deque(maxlen=model._stats_window_size)
    for name, moments in _moments(model).items():
        for part, value in state["normalizer"][name].items():
            setattr(moments, part, value.item() if part == "count" else value.numpy().copy())
    set_random_states(state["random"], model.device)


def _moments(model: OnPolicyAlgorithm) -> dict[str, RunningMeanStd]:
    """The running moments that observations and rewards are scaled by, if they are."""
    normalizer = model.get_vec_normalize_env()
    if normalizer is None:
        return {}
    seen = normalizer.obs_rms
    named = seen if isinstance(seen, dict) else {"": seen}
    return {f"obs.{key}": moments for key, moments in named.items()} | {"ret": normalizer.ret_rms}
