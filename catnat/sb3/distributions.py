"""Action distributions of Stable-Baselines3, made by heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    MultiCategoricalDistribution,
)
from torch import Tensor, nn

from catnat.distributions import HeadCategorical
from catnat.head import CategoricalHead
from catnat.numerics import finite_log_probs, is_plain
from catnat.sb3.masks import split_masks

MaskMode = Literal["prune", "renormalize"]


class FromHeads:
    """Scores become one categorical distribution for each head; the first of two base classes."""

    heads: Sequence[CategoricalHead]
    several: ClassVar[bool]  # whether an action has several parts
    distribution: Any
    parts: list[HeadCategorical]  # the distribution of each head
    scores: Tensor  # (B, sum of S)
    validate_args = True  # raise ValueError where a probability is NaN
    mask_mode: MaskMode = "prune"
    _masks: Any = None  # of the next scores

    def proba_distribution_net(self, latent_dim: int) -> nn.Module:
        """The layer that gives the scores of all heads."""
        return nn.Linear(latent_dim, sum(head.num_scores for head in self.heads))

    def proba_distribution(self, action_logits: Tensor) -> Self:
        """Set the distribution from scores (B, sum of S).

        A probability that is NaN raises a ValueError, as in the policies of Stable-Baselines3. The
        host waits for the device here. See :func:`unchecked` for code that must not wait.
        """
        self.scores = action_logits
        self.apply_masking(self._masks)
        # Log-probabilities are finite or NaN, so their sum is NaN if and only if one of them is.
        for part in self.parts if self.validate_args else ():
            if is_plain(part.logits) and bool(part.logits.sum().isnan()):
                raise ValueError(
                    "the policy's probabilities are NaN: look for NaN in the observations and in "
                    "the policy's parameters"
                )
        return self

    def apply_masking(self, masks: Any) -> None:
        """Allow only the choices that are True in masks (B, sum of K); None allows all again."""
        self.parts = self.parts_from(self.scores, masks)
        self.distribution = self.parts if self.several else self.parts[0]

    def allowing(self, masks: Any) -> AbstractContextManager[None]:
        """Within this context masks hold for all scores; None leaves the present masks."""
        return _temporarily(self, "_masks", self._masks if masks is None else masks)

    def parts_from(self, scores: Tensor, masks: Any = None) -> list[HeadCategorical]:
        """The distribution of each head, from scores (B, sum of S) and masks (B, sum of K)."""
        parts = scores.split([head.num_scores for head in self.heads], -1)
        if masks is None:
            return [head(part) for head, part in zip(self.heads, parts, strict=True)]
        sizes = [head.num_categories for head in self.heads]
        allowed = [mask.to(scores.device) for mask in split_masks(masks, sizes, scores.shape[:-1])]
        triples = zip(self.heads, parts, allowed, strict=True)
        if self.mask_mode == "renormalize":
            return [renormalized(head(part), mask) for head, part, mask in triples]
        return [head(part, mask=mask) for head, part, mask in triples]

    def sample(self) -> Tensor:
        """Random actions (B,), or (B, A) where an action has several parts."""
        return self._joined([draw(part) for part in self.parts])

    def mode(self) -> Tensor:
        """The likeliest actions, of the same shape."""
        return self._joined([part.logits.argmax(-1) for part in self.parts])

    def _joined(self, actions: list[Tensor]) -> Tensor:
        return torch.stack(actions, -1) if self.several else actions[0]


class HeadDistribution(FromHeads, CategoricalDistribution):
    """The distribution of a head over the actions of a ``Discrete`` space.

    Args:
        heads: one alone; called as a module, so that probes see its scores.
    """

    several = False

    def __init__(self, heads: Sequence[CategoricalHead]) -> None:
        super().__init__(heads[0].num_categories)
        self.heads = heads


class HeadMultiDistribution(FromHeads, MultiCategoricalDistribution):
    """Distributions over the actions of ``MultiDiscrete`` or ``MultiBinary``, one head for each.

    Args:
        heads: one for each action.
    """

    several = True

    def __init__(self, heads: Sequence[CategoricalHead]) -> None:
        super().__init__([head.num_categories for head in heads])
        self.heads = heads


def renormalized(unmasked: HeadCategorical, mask: Tensor) -> HeadCategorical:
    """The distribution given that an allowed category is drawn: p_k / sum of allowed p."""
    log_probs = torch.where(mask, unmasked.logits, -torch.inf).log_softmax(-1)
    return HeadCategorical(finite_log_probs(log_probs), validate_args=False, normalized=True)


def unchecked(policy: nn.Module) -> AbstractContextManager[None]:
    """Within this context a policy does not check for NaN, and so does not wait for the device."""
    return _temporarily(policy.action_dist, "validate_args", False)


@contextmanager
def _temporarily(target: Any, name: str, value: Any) -> Iterator[None]:
    """Change an attribute within a context."""
    previous = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, previous)


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
    if np.any(getattr(action_space, "start", 0)):
        raise ValueError(f"actions must begin with 0: wrap an environment with {action_space}")
    return sizes


def draw(distribution: HeadCategorical) -> Tensor:
    """Samples (B,): the first of K exponential clocks with rates p to ring.

    The draws equal those of torch.multinomial from the same generator state. The host does not
    wait for the device, and a category of probability 0 is never drawn.
    """
    p = distribution.probs.detach()
    clocks = torch.empty_like(p).exponential_().clamp_min_(torch.finfo(p.dtype).tiny)
    return (p / clocks).argmax(-1)
