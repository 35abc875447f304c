"""Stable-Baselines3 with categorical heads: policies for its algorithms, and a faster PPO."""

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
