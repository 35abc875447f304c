"""A task with many actions and masks, for the plan masks: --env masked_ranks:MaskedRanks-v0."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

NUM_ACTIONS = 70
NUM_ALLOWED = 20
NUM_FEATURES = 8
_TASK = np.random.default_rng(0)
VALUES = _TASK.normal(size=(NUM_ACTIONS, NUM_FEATURES))  # of each action, linear in the state
_ALWAYS_ALLOWED = _TASK.permutation(NUM_ACTIONS)[:NUM_ALLOWED]


class MaskedRanks(gymnasium.Env[np.ndarray, int]):
    """Take the most valuable of the allowed actions.

    States are independent and normal, and do not depend on actions. The reward is the value of the
    action, shifted and scaled so that the best allowed action has reward 1, and the mean over
    allowed actions is 0.

    Args:
        changing: whether each state draws its own allowed actions; otherwise they never change.
        visible: whether observations contain the mask.
    """

    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self, changing: bool, visible: bool = False) -> None:
        self.changing = changing
        self.visible = visible
        size = NUM_FEATURES + visible * NUM_ACTIONS
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Draw the first state."""
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """The reward of an allowed action, and the next state."""
        if not self._mask[action]:
            raise ValueError(f"action {action} is not allowed")
        values = VALUES @ self._state
        allowed_values = values[self._mask]
        mean = allowed_values.mean()
        reward = (values[action] - mean) / (allowed_values.max() - mean)
        return self._draw(), float(reward), False, False, {}

    def action_masks(self) -> np.ndarray:
        """The allowed actions of the present state."""
        return self._mask

    def _draw(self) -> np.ndarray:
        rng = self.np_random
        self._state = rng.normal(size=NUM_FEATURES).astype(np.float32)
        allowed = rng.permutation(NUM_ACTIONS)[:NUM_ALLOWED] if self.changing else _ALWAYS_ALLOWED
        self._mask = np.isin(np.arange(NUM_ACTIONS), allowed)
        return np.append(self._state, np.float32(self._mask)) if self.visible else self._state


gymnasium.register("MaskedRanks-v0", MaskedRanks, max_episode_steps=100)
