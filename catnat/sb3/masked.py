"""Policies with a categorical head for the MaskablePPO of sb3-contrib, which must be installed.

HeadPPO takes them too, and takes masks with all other policies that have a head.
"""

from __future__ import annotations

from typing import Any

from sb3_contrib.common.maskable.policies import (
    MaskableActorCriticCnnPolicy,
    MaskableActorCriticPolicy,
    MaskableMultiInputActorCriticPolicy,
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
