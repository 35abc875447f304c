"""Action distributions of Stable-Baselines3, made by heads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    MultiCategoricalDistribution,
)
from torch import Tensor, nn

from catnat.distributions import HeadCategorical
from catnat.head import CategoricalHead
from catnat.numerics import is_plain
from catnat.sb3.masks import checked_masks

MaskMode = Literal["prune", "renormalize"]


class FromHeads:
    """Scores become one categorical distribution for each head; the first of two base classes.

    Args:
        heads: one for each action; they are called as modules, so that probes see their scores.
        mask_mode: how masks change a distribution, see :class:`~catnat.sb3.HeadPolicy`.
    """

    distribution: Any
    validate_args = True  # raise ValueError where a probability is NaN
    masks: Any = None  # of the next scores

    def __init__(self, heads: Sequence[CategoricalHead], mask_mode: MaskMode = "prune") -> None:
        self.heads = heads
        self.sizes = [head.num_categories for head in heads]
        self.mask_mode = mask_mode
        # Whether an action has several parts.
        self.several = isinstance(self, MultiCategoricalDistribution)
        super().__init__(self.sizes if self.several else self.sizes[0])  # type: ignore[call-arg]

    def proba_distribution_net(self, latent_dim: int) -> nn.Module:
        """The layer that gives the scores of all heads."""
        return nn.Linear(latent_dim, sum(head.num_scores for head in self.heads))

    def proba_distribution(self, action_logits: Tensor) -> Self:
        """Set the distribution from scores (B, sum of S).

        A probability that is NaN raises a ValueError, as in the policies of Stable-Baselines3. The
        host waits for the device here. Code that must not wait does so within
        ``using(validate_args=False)``.
        """
        self.scores = action_logits
        self.apply_masking(self.masks)
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
        scores = self.scores.split([head.num_scores for head in self.heads], -1)
        masks_of_parts = [None] * len(scores)
        if masks is not None:
            allowed = checked_masks(masks, self.sizes, self.scores.shape[:-1])
            masks_of_parts = allowed.to(self.scores.device).split(self.sizes, -1)
        # The distribution of each head.
        self.parts = list(map(self._part, self.heads, scores, masks_of_parts))
        self.distribution = self.parts if self.several else self.parts[0]

    def _part(self, head: CategoricalHead, scores: Tensor, mask: Tensor | None) -> HeadCategorical:
        """The distribution of a head, over the choices that its mask allows."""
        if mask is None or self.mask_mode == "prune":
            return head(scores, mask)
        # Renormalized, p_k / sum of allowed p: given that an allowed category is drawn.
        log_probs = torch.where(mask, head(scores).logits, -torch.inf).log_softmax(-1)
        return HeadCategorical(log_probs, validate_args=False)

    @contextmanager
    def using(self, **attributes: Any) -> Iterator[None]:
        """Within this context attributes have other values, such as the masks of all scores."""
        previous = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(previous)

    def sample(self) -> Tensor:
        """Random actions (B,), or (B, A) where an action has several parts."""
        actions = [draw(part) for part in self.parts]
        return torch.stack(actions, -1) if self.several else actions[0]


class HeadDistribution(FromHeads, CategoricalDistribution):
    """The distribution of a head over the actions of a ``Discrete`` space."""


class HeadMultiDistribution(FromHeads, MultiCategoricalDistribution):
    """Distributions over the actions of ``MultiDiscrete`` or ``MultiBinary``, one head for each."""


def draw(distribution: HeadCategorical) -> Tensor:
    """Samples (B,): the first of K exponential clocks with rates p to ring.

    The draws equal those of torch.multinomial from the same generator state. The host does not
    wait for the device, and a category of probability 0 is never drawn.
    """
    p = distribution.probs
    clocks = torch.empty_like(p).exponential_().clamp_min_(torch.finfo(p.dtype).tiny)
    return (p / clocks).argmax(-1)
