"""Optimizers whose steps can be captured in a CUDA graph, and saved for any device."""

from __future__ import annotations

from typing import Any

import torch
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor
from torch.optim import Optimizer

# What a captured optimizer needs: its state on the device, and one kernel for all parameters.
CAPTURED: dict[str, bool] = {"capturable": True, "fused": True}


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Move everything that a step depends on to the device, the learning rate too."""
    for group in optimizer.param_groups:
        group |= {name: on for name, on in CAPTURED.items() if name in group}
        group["lr"] = torch.tensor(float(group["lr"]), device=device)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)


def make_portable(optimizer: Optimizer) -> None:
    """Undo :func:`make_capturable`; other optimizers stay as they are."""
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        optimizer.load_state_dict(portable_state(optimizer.state_dict()))


def portable_state(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as it is without capturing."""
    if not any(isinstance(group["lr"], Tensor) for group in state["param_groups"]):
        return state
    groups = []
    for group in state["param_groups"]:
        plain = {"capturable": False, "fused": None, "lr": float(group["lr"])}
        groups.append({name: plain.get(name, value) for name, value in group.items()})
    states = {
        key: {name: x.cpu() if name == "step" else x for name, x in each.items()}
        for key, each in state["state"].items()
    }
    return {**state, "state": states, "param_groups": groups}


class Snapshot:
    """A policy and its optimizer as they are now, for :meth:`restore`."""

    def __init__(self, policy: BasePolicy) -> None:
        self.policy = policy
        self._weights = {name: x.clone() for name, x in policy.state_dict().items()}
        self._state = {
            parameter: {
                name: x.clone() if isinstance(x, Tensor) else x for name, x in state.items()
            }
            for parameter, state in policy.optimizer.state.items()
        }

    def restore(self) -> None:
        """Go back."""
        self.policy.load_state_dict(self._weights)
        self.policy.optimizer.state.clear()
        self.policy.optimizer.state.update(self._state)
