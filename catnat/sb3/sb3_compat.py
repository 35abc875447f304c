"""All private names of Stable-Baselines3 that catnat uses; the rest of catnat uses these classes.

``tests/sb3/test_sb3_compat.py`` has a contract test for each name, and ``pyproject.toml`` the
versions for which the tests pass.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar

from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv


class OpenPolicy(BasePolicy):
    """A policy whose action distribution is made by :meth:`make_distribution`."""

    def make_distribution(self) -> None:
        """Set ``self.action_dist``, before the networks and the optimizer are made."""
        raise NotImplementedError

    def own_parameters(self) -> dict[str, Any]:
        """Arguments of the constructor that the base class does not have."""
        raise NotImplementedError

    def _build(self, lr_schedule: Any) -> None:
        self.make_distribution()
        super()._build(lr_schedule)  # type: ignore[misc]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return super()._get_constructor_parameters() | self.own_parameters()


class OpenAlgorithm(OnPolicyAlgorithm):
    """An algorithm with hooks before and after it is set up, and with the state of its rollout."""

    not_saved: ClassVar[tuple[str, ...]] = ()  # attributes that loading makes again

    def before_setup(self) -> None:
        """Called before buffer and policy are made."""

    def after_setup(self) -> None:
        """Called when buffer and policy are made."""

    def _setup_model(self) -> None:
        self.before_setup()
        super()._setup_model()
        self.after_setup()

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *self.not_saved]

    @property
    def last_observations(self) -> Any:
        """The latest observations of all environments."""
        return self._last_obs

    @property
    def episode_starts(self) -> Any:
        """Whether the latest observations begin episodes, (n,)."""
        return self._last_episode_starts

    def keep_last(self, observations: Any, episode_starts: Any) -> None:
        """Keep the latest observations for the next step."""
        self._last_obs = observations
        self._last_episode_starts = episode_starts

    def count_games(self, infos: Any, dones: Any) -> None:
        """Keep returns, lengths and successes of finished games."""
        self._update_info_buffer(infos, dones)

    @property
    def remaining(self) -> float:
        """Share of the steps that are left, from 1 to 0."""
        return self._current_progress_remaining

    def count_update(self) -> int:
        """Count one more epoch of updates, and return their number."""
        self._n_updates += 1
        return self._n_updates


def updates_of(model: OnPolicyAlgorithm) -> int:
    """The number of epochs of updates."""
    return model._n_updates


def set_counts(
    model: OnPolicyAlgorithm, updates: int, games: Iterable[Any], successes: Iterable[Any]
) -> None:
    """Set the number of updates, and the recent games that the log averages."""
    model._n_updates = updates
    model.ep_info_buffer = deque(games, maxlen=model._stats_window_size)
    model.ep_success_buffer = deque(successes, maxlen=model._stats_window_size)


def total_steps_of(model: OnPolicyAlgorithm) -> int:
    """The steps after which learning ends."""
    return model._total_timesteps


def wrap_env(env: VecEnv) -> VecEnv:
    """An environment as an algorithm wraps its own: images have their channels first."""
    return OnPolicyAlgorithm._wrap_env(env, 0)
