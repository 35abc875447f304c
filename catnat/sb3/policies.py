"""Policies of Stable-Baselines3 whose actions come from a categorical head.

``PPO(HeadActorCriticCnnPolicy, env, policy_kwargs={"head": "natural"})``; A2C accepts them as well.
To add a head to another policy, inherit from :class:`HeadPolicy` and this policy, as the classes
for sb3-contrib at the end of this file do.
"""

import json
from typing import Any, get_args

from gymnasium import spaces
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    MultiInputActorCriticPolicy,
)
from torch import nn

from catnat.checks import require_choice, require_name
from catnat.heads.base import CategoricalHead
from catnat.heads.registry import make_head
from catnat.sb3.distributions import (
    HeadDistribution,
    HeadMultiDistribution,
    MaskMode,
    OneChoice,
)
from catnat.sb3.masks import categories_of
from catnat.sb3.sb3_compat import OpenPolicy

SPARSEMAX_MIX = 1e-3  # default of the option mix of sparsemax


def _as_text(options: dict[str, Any]) -> str:
    """Options as JSON, equal for equal values."""
    return json.dumps(options, sort_keys=True, default=lambda x: getattr(x, "tolist", x.__repr__)())


def _write_head(policy: Any, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Put the head's name and options into the metadata of a state_dict."""
    metadata["head"] = policy._head_name
    metadata["head_options"] = _as_text(policy._head_options)


def _check_head(policy: Any, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Raise an error if a state_dict belongs to another head, or to other options of it."""
    saved = metadata.get("head"), metadata.get("head_options")
    own = policy._head_name, _as_text(policy._head_options)
    if saved[0] is not None and saved != own:  # earlier versions saved no head
        raise ValueError(
            f"the weights belong to head {saved[0]} with options {saved[1]}, the policy has head "
            f"{own[0]} with options {own[1]}"
        )


def _with_masks(name: str) -> Any:
    """A method of the policies of Stable-Baselines3, which also takes masks."""

    def method(self: Any, *args: Any, action_masks: Any = None, **kwargs: Any) -> Any:
        inherited = getattr(super(HeadPolicy, self), name)
        if action_masks is None:  # a method that has called this one may have masks
            return inherited(*args, **kwargs)
        with self.action_dist.using(masks=action_masks):
            return inherited(*args, **kwargs)

    method.__name__ = name
    return method


class HeadPolicy(OpenPolicy):
    """Gives a policy class of Stable-Baselines3 a categorical head; the first of two base classes.

    ``policy.heads`` contains the heads. Actions of a ``MultiDiscrete`` or ``MultiBinary`` space
    with equally many choices share a head and are computed together, unless the head has weights.
    An action with one choice has a head without scores. A probability that is NaN raises a
    ValueError, as in the policies of Stable-Baselines3. The deterministic action is the likeliest
    of all categories; a tree does not choose it node by node.

    The metadata of ``state_dict()`` contains the name and the options of the head. Loading weights
    of another head, or of other options, raises a ValueError.

    ``forward``, ``evaluate_actions``, ``get_distribution`` and ``predict`` accept ``action_masks``,
    see :mod:`catnat.sb3.masks`.

    Args:
        args: arguments of the policy: observation_space, action_space (``Discrete``,
            ``MultiDiscrete`` or ``MultiBinary``), lr_schedule, ...
        head: a name from :func:`catnat.head_names`.
        head_options: options of the head, such as ``{"amplitude": 6.0}``. The option ``mix`` is the
            share of the uniform distribution in the policy, here 0.001 for sparsemax unless given.
            A share above 0 keeps every allowed action possible. At 0, an action that was taken can
            become impossible: its KL divergence is infinite, and it gets no gradient and stays
            impossible.
        mask_mode: "renormalize", the default of trees: the probabilities of allowed actions are
            divided by their sum. "prune", the default of other heads: the heads apply the masks.
            Zero scores then make the allowed actions equally likely, and the Fisher matrix of a
            masked tree stays diagonal. Trees learned faster with "renormalize" when masks changed
            from state to state (paper/masks).
        kwargs: further arguments of the policy.
    """

    def __init__(
        self,
        *args: Any,
        head: str = "softmax",
        head_options: dict[str, Any] | None = None,
        mask_mode: MaskMode | None = None,
        **kwargs: Any,
    ) -> None:
        require_name(head=head)
        if mask_mode is not None:
            require_choice(get_args(MaskMode), mask_mode=mask_mode)
        options = dict(head_options or {})
        if head == "sparsemax":
            options.setdefault("mix", SPARSEMAX_MIX)
        self._head_name = head
        self._head_options = options
        self._mask_mode = mask_mode
        super().__init__(*args, **kwargs)
        self.register_state_dict_post_hook(_write_head)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_check_head)  # type: ignore[no-untyped-call]

    def make_distribution(self) -> None:
        """Put the heads where Stable-Baselines3 expects its own distribution."""
        heads = self._make_heads()
        self.heads = nn.ModuleList(dict.fromkeys(heads))
        is_single = isinstance(self.action_space, spaces.Discrete)
        kind: Any = HeadDistribution if is_single else HeadMultiDistribution
        self.action_dist = kind(heads, self._mask_mode)

    def _make_heads(self) -> list[CategoricalHead | OneChoice]:
        """The head of each action; actions with equally many choices share one without weights."""
        shared: dict[int, CategoricalHead | OneChoice] = {1: OneChoice()}
        heads = []
        for K in categories_of(self.action_space):
            head = shared.get(K)
            if head is None:
                head = make_head(self._head_name, K, **self._head_options)
                head.validate_args = False  # the policy itself checks for NaN
                if not any(True for _ in head.parameters()):
                    shared[K] = head
            heads.append(head)
        return heads

    def own_parameters(self) -> dict[str, Any]:
        """Arguments of the constructor that concern the head."""
        return {
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
    """A policy for ``Dict`` observations with a categorical head, see :class:`HeadPolicy`."""


# -- policies for MaskablePPO and RecurrentPPO, where sb3-contrib is installed ---------------------

try:
    from sb3_contrib.common.maskable.policies import (
        MaskableActorCriticCnnPolicy,
        MaskableActorCriticPolicy,
        MaskableMultiInputActorCriticPolicy,
    )
    from sb3_contrib.common.recurrent.policies import (
        RecurrentActorCriticCnnPolicy,
        RecurrentActorCriticPolicy,
        RecurrentMultiInputActorCriticPolicy,
    )
except ImportError:
    pass
else:

    class HeadMaskableActorCriticPolicy(HeadPolicy, MaskableActorCriticPolicy):
        """A multilayer perceptron with a head, for MaskablePPO; HeadPPO does not need it."""

    class HeadMaskableActorCriticCnnPolicy(HeadPolicy, MaskableActorCriticCnnPolicy):
        """The Nature CNN with a head, for MaskablePPO."""

    class HeadMaskableMultiInputActorCriticPolicy(HeadPolicy, MaskableMultiInputActorCriticPolicy):
        """For ``Dict`` observations, with a head, for MaskablePPO."""

    class HeadRecurrentActorCriticPolicy(HeadPolicy, RecurrentActorCriticPolicy):
        """An LSTM with a head, for RecurrentPPO."""

    class HeadRecurrentActorCriticCnnPolicy(HeadPolicy, RecurrentActorCriticCnnPolicy):
        """The Nature CNN and an LSTM with a head, for RecurrentPPO."""

    class HeadRecurrentMultiInputActorCriticPolicy(
        HeadPolicy, RecurrentMultiInputActorCriticPolicy
    ):
        """For ``Dict`` observations, an LSTM with a head, for RecurrentPPO."""
