"""Policies with a categorical head for MaskablePPO and RecurrentPPO of sb3-contrib.

HeadPPO takes masks with its own policies and needs none of these.
"""

from __future__ import annotations

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


class HeadMaskableActorCriticPolicy(HeadPolicy, MaskableActorCriticPolicy):  # type: ignore[misc]
    """A multilayer perceptron with a head and action masks."""


class HeadMaskableActorCriticCnnPolicy(HeadPolicy, MaskableActorCriticCnnPolicy):  # type: ignore[misc]
    """The Nature CNN with a head and action masks."""


class HeadMaskableMultiInputActorCriticPolicy(  # type: ignore[misc]
    HeadPolicy, MaskableMultiInputActorCriticPolicy
):
    """For ``Dict`` observations, with a head and action masks."""


class HeadRecurrentActorCriticPolicy(HeadPolicy, RecurrentActorCriticPolicy):  # type: ignore[misc]
    """An LSTM with a head."""


class HeadRecurrentActorCriticCnnPolicy(HeadPolicy, RecurrentActorCriticCnnPolicy):  # type: ignore[misc]
    """The Nature CNN and an LSTM with a head."""


class HeadRecurrentMultiInputActorCriticPolicy(  # type: ignore[misc]
    HeadPolicy, RecurrentMultiInputActorCriticPolicy
):
    """For ``Dict`` observations, an LSTM with a head."""
