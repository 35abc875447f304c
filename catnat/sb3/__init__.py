"""Stable-Baselines3 with categorical heads: policies for its algorithms, and a faster PPO.

The ``HeadMaskable...`` and ``HeadRecurrent...`` policies need sb3-contrib, and are imported when
they are asked for.
"""

from typing import Any

from catnat.sb3.algorithm import NonFinite
from catnat.sb3.head_a2c import HeadA2C
from catnat.sb3.head_ppo import HeadPPO
from catnat.sb3.masks import InfoMasks, MaskedPlayer
from catnat.sb3.objective import cleanrl_schedule
from catnat.sb3.policies import (
    HeadActorCriticCnnPolicy,
    HeadActorCriticPolicy,
    HeadCnnPolicy,
    HeadMlpPolicy,
    HeadMultiInputActorCriticPolicy,
    HeadMultiInputPolicy,
    HeadPolicy,
)

__all__ = [
    "HeadA2C",
    "HeadActorCriticCnnPolicy",
    "HeadActorCriticPolicy",
    "HeadCnnPolicy",
    "HeadMlpPolicy",
    "HeadMultiInputActorCriticPolicy",
    "HeadMultiInputPolicy",
    "HeadPPO",
    "HeadPolicy",
    "InfoMasks",
    "MaskedPlayer",
    "NonFinite",
    "cleanrl_schedule",
]


def __getattr__(name: str) -> Any:
    if not name.startswith(("HeadMaskable", "HeadRecurrent")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from catnat.sb3 import contrib
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("sb3_contrib"):
            raise
        raise ImportError(f"{name} needs sb3-contrib: pip install 'catnat[maskable]'") from None
    return getattr(contrib, name)
