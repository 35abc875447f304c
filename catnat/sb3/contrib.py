"""Policies with a categorical head for algorithms of sb3-contrib, which must be installed.

HeadPPO takes the ``HeadMaskable...`` policies too, and takes masks with all other policies that
have a head. The ``HeadRecurrent...`` policies are for RecurrentPPO.
"""

from __future__ import annotations

from typing import Any

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

from catnat.sb3.policies import HeadPolicy


class _Maskable(HeadPolicy):
    """Accepts what PPO gives to every policy, and sb3-contrib's policies do not know."""

    def __init__(self, *args: Any, use_sde: bool = False, **kwargs: Any) -> None:
        if use_sde:
            raise ValueError("use_sde is for continuous actions, not for a categorical head")
        super().__init__(*args, **kwargs)


class HeadMaskableActorCriticPolicy(_Maskable, MaskableActorCriticPolicy):  # type: ignore[misc]
    """A multilayer perceptron with a head and action masks, see :class:`HeadPolicy`."""


class HeadMaskableActorCriticCnnPolicy(_Maskable, MaskableActorCriticCnnPolicy):  # type: ignore[misc]
    """The Nature CNN with a head and action masks, see :class:`HeadPolicy`."""


class HeadMaskableMultiInputActorCriticPolicy(  # type: ignore[misc]
    _Maskable, MaskableMultiInputActorCriticPolicy
):
    """For ``Dict`` observations, with a head and action masks, see :class:`HeadPolicy`."""


class HeadRecurrentActorCriticPolicy(HeadPolicy, RecurrentActorCriticPolicy):  # type: ignore[misc]
    """An LSTM with a head, see :class:`HeadPolicy`."""


class HeadRecurrentActorCriticCnnPolicy(HeadPolicy, RecurrentActorCriticCnnPolicy):  # type: ignore[misc]
    """The Nature CNN and an LSTM with a head, see :class:`HeadPolicy`."""


class HeadRecurrentMultiInputActorCriticPolicy(  # type: ignore[misc]
    HeadPolicy, RecurrentMultiInputActorCriticPolicy
):
    """For ``Dict`` observations, an LSTM with a head, see :class:`HeadPolicy`."""
