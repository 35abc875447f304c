"""Policies of Stable-Baselines3 whose actions come from a categorical head.

``PPO(HeadActorCriticCnnPolicy, env, policy_kwargs={"head": "natural"})``; A2C takes them too. Any
other policy gets a head by a class of two bases, as those of sb3-contrib do at the end of this
file.
"""

from typing import Any, get_args

from gymnasium import spaces
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)
from torch import nn

from catnat.checks import require_choice, require_name
from catnat.heads import make_head
from catnat.sb3.distributions import HeadDistribution, HeadMultiDistribution, MaskMode
from catnat.sb3.masks import categories_of

SPARSEMAX_MIX = 1e-3  # default of the option mix of sparsemax


def _with_masks(name: str) -> Any:
    """A method of the policies of Stable-Baselines3, which also takes masks."""

    def method(self: Any, *args: Any, action_masks: Any = None, **kwargs: Any) -> Any:
        if action_masks is None:  # a method that has called this one may have masks
            action_masks = self.action_dist.masks
        with self.action_dist.using(masks=action_masks):
            return getattr(super(HeadPolicy, self), name)(*args, **kwargs)

    method.__name__ = name
    return method


class HeadPolicy(BasePolicy):
    """Gives a policy class of Stable-Baselines3 a categorical head; the first of two base classes.

    The heads are in ``policy.heads``: one, or one for each action of a ``MultiDiscrete`` space. A
    probability that is NaN raises a ValueError, as in the
    policies of Stable-Baselines3. The deterministic action is the likeliest of all categories; a
    tree does not decide it split by split.

    Calling the policy, ``evaluate_actions``, ``get_distribution`` and ``predict`` take
    ``action_masks``, see :mod:`catnat.sb3.masks`.

    Args:
        args: arguments of the policy: observation_space, action_space (``Discrete``,
            ``MultiDiscrete`` or ``MultiBinary``), lr_schedule, ...
        head: a name from :func:`catnat.head_names`.
        head_options: options of the head, such as ``{"amplitude": 6.0}``. The option ``mix`` is the
            share of the uniform distribution in the policy, here 0.001 for sparsemax unless given.
            A share above 0 keeps every allowed action possible. At 0, an action that was taken can
            become impossible: its KL divergence is infinite, and it gets no gradient and stays
            impossible.
        mask_mode: "prune": the heads themselves take the masks; with scores of zero the allowed
            actions are equally likely, and the Fisher matrix of a masked tree stays diagonal.
            "renormalize": the probabilities of allowed actions are divided by their sum; trees
            learn faster so where other actions are forbidden at every step.
        kwargs: further arguments of the policy.
    """

    def __init__(
        self,
        *args: Any,
        head: str = "softmax",
        head_options: dict[str, Any] | None = None,
        mask_mode: MaskMode = "prune",
        **kwargs: Any,
    ) -> None:
        require_name(head=head)
        require_choice(get_args(MaskMode), mask_mode=mask_mode)
        options = dict(head_options or {})
        if head == "sparsemax":
            options.setdefault("mix", SPARSEMAX_MIX)
        self._head_name = head
        self._head_options = options
        self._mask_mode = mask_mode
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Any) -> None:
        """Put the heads where Stable-Baselines3 expects its own distribution, then build."""
        sizes = categories_of(self.action_space)
        heads = [make_head(self._head_name, K, **self._head_options) for K in sizes]
        for head in heads:
            head.validate_args = False  # the policy itself checks for NaN
        self.heads = nn.ModuleList(heads)
        is_single = isinstance(self.action_space, spaces.Discrete)
        kind: Any = HeadDistribution if is_single else HeadMultiDistribution
        self.action_dist = kind(heads, self._mask_mode)
        super()._build(lr_schedule)  # type: ignore[misc]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return super()._get_constructor_parameters() | {
            "head": self._head_name,
            "head_options": self._head_options,
            "mask_mode": self._mask_mode,
        }

    forward = _with_masks("forward")
    evaluate_actions = _with_masks("evaluate_actions")
    get_distribution = _with_masks("get_distribution")
    predict = _with_masks("predict")


class HeadActorCriticPolicy(HeadPolicy, ActorCriticPolicy):
    """A multilayer perceptron with a categorical head, see :class:`HeadPolicy`."""


class HeadActorCriticCnnPolicy(HeadPolicy, ActorCriticCnnPolicy):
    """The Nature CNN with a categorical head, see :class:`HeadPolicy`."""


class HeadMultiInputActorCriticPolicy(HeadPolicy, MultiInputActorCriticPolicy):
    """For ``Dict`` observations, with a categorical head, see :class:`HeadPolicy`."""


# -- policies for MaskablePPO and RecurrentPPO, where sb3-contrib is installed ---------------------

try:
    from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
except ImportError:
    pass
else:

    class HeadMaskableActorCriticPolicy(HeadPolicy, MaskableActorCriticPolicy):
        """A multilayer perceptron with a head, for MaskablePPO; HeadPPO does not need it."""

    class HeadRecurrentActorCriticPolicy(HeadPolicy, RecurrentActorCriticPolicy):
        """An LSTM with a head, for RecurrentPPO."""
