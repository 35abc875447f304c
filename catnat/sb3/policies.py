"""Policies of Stable-Baselines3 whose actions come from a categorical head.

``PPO(HeadActorCriticCnnPolicy, env, policy_kwargs={"head": "natural"})``; A2C takes them too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium import spaces
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from catnat.checks import require_name, require_within
from catnat.heads import CategoricalHead, SparsemaxHead, make_head
from catnat.sb3.action_distributions import OnlyChoice, categories_of, make_distribution

SPARSEMAX_MIX = 1e-3  # default of uniform_mix for sparsemax

if TYPE_CHECKING:
    _Base = BasePolicy
else:
    _Base = object


class HeadPolicy(_Base):
    """Gives a policy class of Stable-Baselines3 a categorical head; the first of two base classes.

    The heads are in ``policy.heads``: one, or one for each action of a ``MultiDiscrete`` space. An
    action with one choice only has an :class:`OnlyChoice` instead of a head. A probability that is
    NaN raises a ValueError, as in the policies of Stable-Baselines3. The deterministic action is
    the likeliest of all categories; a tree does not decide it split by split.

    Calling the policy, ``evaluate_actions``, ``get_distribution`` and ``predict`` take
    ``action_masks``, see :mod:`catnat.sb3.masks`. The heads themselves take the masks: with scores
    of zero the allowed actions are equally likely, and the Fisher matrix of a masked tree stays
    diagonal.

    Args:
        observation_space: the space of the environment.
        action_space: ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``.
        lr_schedule: learning rate as a function of the progress that remains.
        args: further arguments of the policy.
        head: a name from :func:`catnat.head_names`.
        head_options: options of the head, such as ``{"amplitude": 6.0}``.
        uniform_mix: another name of the head's option ``mix``, the share of the uniform
            distribution in the policy. By default 0.001 for sparsemax and 0 for all others. A share
            above 0 keeps every allowed action possible. At 0, an action that was taken can become
            impossible: its KL divergence is infinite, and it gets no gradient and stays impossible.
        kwargs: further arguments of the policy.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lr_schedule: Schedule,
        *args: Any,
        head: str = "softmax",
        head_options: dict[str, Any] | None = None,
        uniform_mix: float | None = None,
        **kwargs: Any,
    ) -> None:
        require_name(head=head)
        if uniform_mix is not None:
            require_within(0, 1, "[)", uniform_mix=uniform_mix)
            if "mix" in (head_options or {}):
                raise ValueError("uniform_mix is the head's option mix: give one of the two")
        categories_of(action_space)  # before anything is built
        self._head_arguments: dict[str, Any] = {
            "head": head,
            "head_options": dict(head_options or {}),
            "uniform_mix": uniform_mix,
        }
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        """Put the head where Stable-Baselines3 expects its own distribution, then build."""
        given = self._head_arguments
        sizes = categories_of(self.action_space)
        options = _with_mix(**given)
        heads = [OnlyChoice() if K == 1 else make_head(given["head"], K, **options) for K in sizes]
        for head in heads:
            if isinstance(head, CategoricalHead):
                head.validate_args = False  # the policy itself checks for NaN
        self.heads = nn.ModuleList(heads)
        self.action_dist = make_distribution(heads, self.action_space)
        super()._build(lr_schedule)  # type: ignore[misc]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return super()._get_constructor_parameters() | self._head_arguments

    # -- the methods of Stable-Baselines3, with masks ----------------------------------------------

    def forward(self, *args: Any, action_masks: Any = None, **kwargs: Any) -> Any:
        """Actions, values and log-probabilities; masks as in :mod:`catnat.sb3.masks`."""
        with self.action_dist.allowing(action_masks):
            return super().forward(*args, **kwargs)

    def evaluate_actions(self, *args: Any, action_masks: Any = None, **kwargs: Any) -> Any:
        """Values, log-probabilities of actions, and entropies."""
        with self.action_dist.allowing(action_masks):
            return super().evaluate_actions(*args, **kwargs)  # type: ignore[misc]

    def get_distribution(self, *args: Any, action_masks: Any = None, **kwargs: Any) -> Any:
        """The distribution over actions."""
        with self.action_dist.allowing(action_masks):
            return super().get_distribution(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, action_masks: Any = None, **kwargs: Any) -> tuple[Any, Any]:
        """Actions for observations of the environment."""
        with self.action_dist.allowing(action_masks):
            return super().predict(*args, **kwargs)


class HeadActorCriticPolicy(HeadPolicy, ActorCriticPolicy):  # type: ignore[misc]
    """A multilayer perceptron with a categorical head, see :class:`HeadPolicy`."""


class HeadActorCriticCnnPolicy(HeadPolicy, ActorCriticCnnPolicy):  # type: ignore[misc]
    """The Nature CNN with a categorical head, see :class:`HeadPolicy`."""


class HeadMultiInputActorCriticPolicy(HeadPolicy, MultiInputActorCriticPolicy):  # type: ignore[misc]
    """For ``Dict`` observations, with a categorical head, see :class:`HeadPolicy`."""


def _with_mix(head: str, head_options: dict[str, Any], uniform_mix: float | None) -> dict[str, Any]:
    """The options of a head and its mix; raises for a wrong option."""
    made = make_head(head, 2, **head_options)
    if uniform_mix is None and isinstance(made, SparsemaxHead) and "mix" not in head_options:
        uniform_mix = SPARSEMAX_MIX
    return head_options | ({} if uniform_mix is None else {"mix": uniform_mix})


class Snapshot:
    """A copy of the weights of a policy and of the state of its optimizer."""

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
        """Put the policy and its optimizer back to where they were when the copy was made."""
        self.policy.load_state_dict(self._weights)
        self.policy.optimizer.state.clear()
        self.policy.optimizer.state.update(self._state)
