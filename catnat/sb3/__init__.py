"""Stable-Baselines3 with categorical heads: policies for its algorithms, and a faster PPO."""

from catnat.sb3.algorithms import HeadA2C, NonFinite
from catnat.sb3.masks import MaskedPlayer
from catnat.sb3.policies import (
    HeadActorCriticCnnPolicy,
    HeadActorCriticPolicy,
    HeadMultiInputActorCriticPolicy,
    HeadPolicy,
)
from catnat.sb3.ppo import HeadPPO, cleanrl_schedule

__all__ = [
    "HeadA2C",
    "HeadActorCriticCnnPolicy",
    "HeadActorCriticPolicy",
    "HeadMultiInputActorCriticPolicy",
    "HeadPPO",
    "HeadPolicy",
    "MaskedPlayer",
    "NonFinite",
    "cleanrl_schedule",
]
