"""Policies with a categorical head for the MaskablePPO of sb3-contrib, which must be installed."""

from __future__ import annotations

from sb3_contrib.common.maskable.policies import (
    MaskableActorCriticCnnPolicy,
    MaskableActorCriticPolicy,
    MaskableMultiInputActorCriticPolicy,
)

from catnat.sb3.policies import HeadPolicy


class HeadMaskableActorCriticPolicy(HeadPolicy, MaskableActorCriticPolicy):  # type: ignore[misc]
    """A multilayer perceptron with a head and action masks, see :class:`HeadPolicy`."""


class HeadMaskableActorCriticCnnPolicy(HeadPolicy, MaskableActorCriticCnnPolicy):  # type: ignore[misc]
    """The Nature CNN with a head and action masks, see :class:`HeadPolicy`."""


class HeadMaskableMultiInputActorCriticPolicy(  # type: ignore[misc]
    HeadPolicy, MaskableMultiInputActorCriticPolicy
):
    """For ``Dict`` observations, with a head and action masks, see :class:`HeadPolicy`."""
