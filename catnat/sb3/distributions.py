"""Action distributions of Stable-Baselines3, made by heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    MultiCategoricalDistribution,
)
from torch import Tensor, nn

from catnat._numerics import LOG_ZERO
from catnat.distributions import HeadCategorical
from catnat.heads import CategoricalHead, SparsemaxHead

SPARSEMAX_MIX = 1e-3  # what sparsemax gives to the uniform distribution, unless told otherwise


class HeadDistribution(CategoricalDistribution):
    """The actions of a ``Discrete`` space, distributed as a head says.

    Args:
        head: called as a module, so that probes see its scores.
        uniform_mix: share of the uniform distribution that is mixed in, see :func:`mixed`.
    """

    distribution: HeadCategorical

    def __init__(self, head: CategoricalHead, uniform_mix: float = 0.0) -> None:
        super().__init__(head.num_categories)
        self.head, self.uniform_mix = head, uniform_mix

    def proba_distribution_net(self, latent_dim: int) -> nn.Module:
        """The layer that gives the scores."""
        return nn.Linear(latent_dim, self.head.num_scores)

    def proba_distribution(self, action_logits: Tensor) -> HeadDistribution:
        """Take up scores (B, S)."""
        self.distribution = mixed(self.head(action_logits), self.uniform_mix)
        return self

    def apply_masking(self, masks: Any) -> None:
        """Forbid actions, see :func:`masked`."""
        if masks is not None:
            self.distribution = masked(self.distribution, masks)

    def sample(self) -> Tensor:
        """Random actions (B,)."""
        return draw(self.distribution)

    def mode(self) -> Tensor:
        """The likeliest actions (B,)."""
        return self.distribution.logits.argmax(-1)


class HeadMultiDistribution(MultiCategoricalDistribution):
    """The actions of a ``MultiDiscrete`` space, each distributed as a head of its own says.

    Args:
        heads: one for each action.
        uniform_mix: share of the uniform distribution that is mixed in, see :func:`mixed`.
    """

    distribution: list[HeadCategorical]  # type: ignore[assignment]

    def __init__(self, heads: Sequence[CategoricalHead], uniform_mix: float = 0.0) -> None:
        super().__init__([head.num_categories for head in heads])
        self.heads, self.uniform_mix = heads, uniform_mix

    def proba_distribution_net(self, latent_dim: int) -> nn.Module:
        """The layer that gives the scores of all actions."""
        return nn.Linear(latent_dim, sum(head.num_scores for head in self.heads))

    def proba_distribution(self, action_logits: Tensor) -> HeadMultiDistribution:
        """Take up scores (B, sum of S)."""
        parts = action_logits.split([head.num_scores for head in self.heads], -1)
        self.distribution = [
            mixed(head(scores), self.uniform_mix)
            for head, scores in zip(self.heads, parts, strict=True)
        ]
        return self

    def apply_masking(self, masks: Any) -> None:
        """Forbid actions by masks (B, sum of K), see :func:`masked`."""
        if masks is None:
            return
        masks = torch.as_tensor(masks).reshape(-1, sum(self.action_dims))
        parts = masks.split(list(self.action_dims), -1)
        self.distribution = [
            masked(each, mask) for each, mask in zip(self.distribution, parts, strict=True)
        ]

    def sample(self) -> Tensor:
        """Random actions (B, A)."""
        return torch.stack([draw(each) for each in self.distribution], -1)

    def mode(self) -> Tensor:
        """The likeliest actions (B, A)."""
        return torch.stack([each.logits.argmax(-1) for each in self.distribution], -1)


def make_distribution(
    heads: Sequence[CategoricalHead], action_space: spaces.Space[Any], uniform_mix: float | None
) -> HeadDistribution | HeadMultiDistribution:
    """The distribution over an action space; without ``uniform_mix``, the head's usual one."""
    if uniform_mix is None:
        uniform_mix = SPARSEMAX_MIX if isinstance(heads[0], SparsemaxHead) else 0.0
    if isinstance(action_space, spaces.Discrete):
        return HeadDistribution(heads[0], uniform_mix)
    return HeadMultiDistribution(heads, uniform_mix)


def categories_of(action_space: spaces.Space[Any]) -> list[int]:
    """K of each action in a space; raises ValueError for spaces that heads do not fit."""
    if isinstance(action_space, spaces.Discrete):
        sizes = [int(action_space.n)]
    elif isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim == 1:
        sizes = [int(n) for n in action_space.nvec]
    else:
        sizes = []
    if not sizes or min(sizes) < 2:
        raise ValueError(
            f"a categorical head needs a Discrete or a one-dimensional MultiDiscrete action space "
            f"with at least 2 choices, got {action_space}"
        )
    return sizes


def draw(distribution: HeadCategorical) -> Tensor:
    """Samples (B,): the first of K exponential clocks with rates p to ring.

    The same draws as torch.multinomial's from the same generator state, but the device is never
    waited for, and a category of probability 0 is never drawn.
    """
    p = distribution.probs.detach()
    clocks = torch.empty_like(p).exponential_().clamp_min_(torch.finfo(p.dtype).tiny)
    return (p / clocks).argmax(-1)


def mixed(distribution: HeadCategorical, share: float) -> HeadCategorical:
    """(1 - share) p + share / K.

    Keeps every action possible. PPO compares the probabilities of an action before and after an
    update: where the latter is 0, as sparsemax likes it, the KL divergence is infinite and the
    action gets no gradient that could bring it back.
    """
    log_p = distribution.logits
    if share:
        floor = math.log(share / log_p.shape[-1])
        log_p = torch.logaddexp(log_p + math.log1p(-share), torch.full_like(log_p, floor))
    return HeadCategorical(log_p, validate_args=False)


def masked(distribution: HeadCategorical, masks: Any) -> HeadCategorical:
    """The distribution given that the action is an allowed one (True in the mask).

    Forbidden actions get probability exactly 0, however unlikely the allowed ones are. A row that
    allows nothing is taken to allow everything.
    """
    log_p = distribution.logits
    allowed = torch.as_tensor(masks, dtype=torch.bool, device=log_p.device).reshape(log_p.shape)
    allowed = allowed | ~allowed.any(-1, keepdim=True)
    log_p = torch.where(allowed, log_p, -torch.inf).log_softmax(-1)
    return HeadCategorical(torch.where(allowed, log_p, LOG_ZERO), validate_args=False)
