"""Action distributions of Stable-Baselines3, made by heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    MultiCategoricalDistribution,
)
from torch import Tensor, nn

from catnat.distributions import HeadCategorical
from catnat.heads import CategoricalHead, SparsemaxHead
from catnat.numerics import LOG_ZERO, is_plain

SPARSEMAX_MIX = 1e-3  # default of uniform_mix for sparsemax


class OnlyChoice(nn.Module):
    """Replaces a head for an action with one category only: softmax of one score."""

    num_categories = num_scores = 1

    def forward(self, scores: Tensor) -> HeadCategorical:
        """The one category is certain, whatever its score: (*, 1) -> (*, 1)."""
        return HeadCategorical(scores.log_softmax(-1), validate_args=False)


Head = CategoricalHead | OnlyChoice


class HeadDistribution(CategoricalDistribution):
    """The distribution of a head over the actions of a ``Discrete`` space.

    Args:
        head: called as a module, so that probes see its scores.
        uniform_mix: share of the uniform distribution that is mixed in, see :func:`mixed`.
    """

    distribution: HeadCategorical
    validate_args = True  # raise ValueError where a probability is NaN

    def __init__(self, head: Head, uniform_mix: float = 0.0) -> None:
        super().__init__(head.num_categories)
        self.head, self.uniform_mix = head, uniform_mix

    def proba_distribution_net(self, latent_dim: int) -> nn.Module:
        """The layer that gives the scores."""
        return nn.Linear(latent_dim, self.head.num_scores)

    def proba_distribution(self, action_logits: Tensor) -> HeadDistribution:
        """Set the distribution from scores (B, S)."""
        self._unmasked = mixed(self.head(action_logits), self.uniform_mix)
        self.distribution = self._unmasked
        if self.validate_args:
            check(self.distribution)
        return self

    def apply_masking(self, masks: Any) -> None:
        """Forbid actions, see :func:`masked`; None allows all of them again."""
        free = self._unmasked
        self.distribution = free if masks is None else masked(free, masks)

    def sample(self) -> Tensor:
        """Random actions (B,)."""
        return draw(self.distribution)

    def mode(self) -> Tensor:
        """The likeliest actions (B,)."""
        return self.distribution.logits.argmax(-1)


class HeadMultiDistribution(MultiCategoricalDistribution):
    """Distributions over the actions of ``MultiDiscrete`` or ``MultiBinary``, one head for each.

    Args:
        heads: one for each action.
        uniform_mix: share of the uniform distribution that is mixed in, see :func:`mixed`.
    """

    distribution: list[HeadCategorical]  # type: ignore[assignment]
    validate_args = True  # raise ValueError where a probability is NaN

    def __init__(self, heads: Sequence[Head], uniform_mix: float = 0.0) -> None:
        super().__init__([head.num_categories for head in heads])
        self.heads, self.uniform_mix = heads, uniform_mix

    def proba_distribution_net(self, latent_dim: int) -> nn.Module:
        """The layer that gives the scores of all actions."""
        return nn.Linear(latent_dim, sum(head.num_scores for head in self.heads))

    def proba_distribution(self, action_logits: Tensor) -> HeadMultiDistribution:
        """Set the distributions from scores (B, sum of S)."""
        parts = action_logits.split([head.num_scores for head in self.heads], -1)
        self._unmasked = [
            mixed(head(scores), self.uniform_mix)
            for head, scores in zip(self.heads, parts, strict=True)
        ]
        self.distribution = self._unmasked
        if self.validate_args:
            check(*self.distribution)
        return self

    def apply_masking(self, masks: Any) -> None:
        """Forbid actions by masks (B, sum of K), see :func:`masked`; None allows all again."""
        self.distribution = self._unmasked
        if masks is None:
            return
        masks = torch.as_tensor(masks).reshape(-1, sum(self.action_dims))
        parts = masks.split(list(self.action_dims), -1)
        self.distribution = [
            masked(each, mask) for each, mask in zip(self._unmasked, parts, strict=True)
        ]

    def sample(self) -> Tensor:
        """Random actions (B, A)."""
        return torch.stack([draw(each) for each in self.distribution], -1)

    def mode(self) -> Tensor:
        """The likeliest actions (B, A)."""
        return torch.stack([each.logits.argmax(-1) for each in self.distribution], -1)


def check(*distributions: HeadCategorical) -> None:
    """Raise ValueError if a probability is NaN, as Stable-Baselines3's own policies do.

    The host waits for the device here. See :func:`unchecked` for code that must not wait.
    """
    for each in distributions:
        # Log-probabilities are finite or NaN, so their sum is NaN if and only if one of them is.
        if is_plain(each.logits) and bool(each.logits.sum().isnan()):
            lost = each.logits.isnan().any(-1).flatten()
            raise ValueError(
                f"the policy's probabilities are NaN in {int(lost.sum())} of {len(lost)} states: "
                "look for NaN in the observations and in the policy's parameters"
            )


@contextmanager
def unchecked(policy: nn.Module) -> Iterator[None]:
    """Within this context a policy does not check for NaN, and so does not wait for the device."""
    distribution = getattr(policy, "action_dist", None)
    if not isinstance(distribution, (HeadDistribution, HeadMultiDistribution)):
        yield
        return
    before, distribution.validate_args = distribution.validate_args, False
    try:
        yield
    finally:
        distribution.validate_args = before


def make_distribution(
    heads: Sequence[Head], action_space: spaces.Space[Any], uniform_mix: float | None
) -> HeadDistribution | HeadMultiDistribution:
    """The distribution over an action space; ``uniform_mix`` None is the default of the head."""
    if uniform_mix is None:
        sparse = any(isinstance(head, SparsemaxHead) for head in heads)
        uniform_mix = SPARSEMAX_MIX if sparse else 0.0
    if isinstance(action_space, spaces.Discrete):
        return HeadDistribution(heads[0], uniform_mix)
    return HeadMultiDistribution(heads, uniform_mix)


def categories_of(action_space: spaces.Space[Any]) -> list[int]:
    """K of each action of a space; ValueError for a space whose actions are not categories."""
    if isinstance(action_space, spaces.Discrete):
        sizes = [int(action_space.n)]
    elif isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim == 1:
        sizes = [int(n) for n in action_space.nvec]
    elif isinstance(action_space, spaces.MultiBinary) and isinstance(action_space.n, int):
        sizes = [2] * action_space.n
    else:
        raise ValueError(
            "a categorical head needs a Discrete action space, or a one-dimensional MultiDiscrete "
            f"or MultiBinary one, got {action_space}"
        )
    return sizes


def draw(distribution: HeadCategorical) -> Tensor:
    """Samples (B,): the first of K exponential clocks with rates p to ring.

    The draws equal those of torch.multinomial from the same generator state. The host does not
    wait for the device, and a category of probability 0 is never drawn.
    """
    p = distribution.probs.detach()
    clocks = torch.empty_like(p).exponential_().clamp_min_(torch.finfo(p.dtype).tiny)
    return (p / clocks).argmax(-1)


def mixed(distribution: HeadCategorical, share: float) -> HeadCategorical:
    """(1 - share) p + share / K.

    Every action stays possible. PPO compares the probabilities of an action before and after an
    update. If the second is 0, as often with sparsemax, the KL divergence is infinite, and the
    action gets no gradient and stays impossible.
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
