"""Action distributions of Stable-Baselines3, made by heads."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, Self

import torch
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    MultiCategoricalDistribution,
)
from torch import Tensor, nn
from torch.distributions import Bernoulli

from catnat.distributions import HeadCategorical, pick
from catnat.heads.base import CategoricalHead
from catnat.heads.tree import CatnatHead
from catnat.numerics import is_plain
from catnat.sb3.masks import checked_masks

MaskMode = Literal["prune", "renormalize"]


class NanProbabilities(FloatingPointError, ValueError):  # noqa: N818 - it describes the numbers
    """A probability of a policy is NaN; a ValueError as in Stable-Baselines3."""


class OneChoice(nn.Module):
    """The head of an action with a single choice: it has no scores and is always certain."""

    num_categories = 1
    num_scores = 0

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> HeadCategorical:
        """The certain distribution, (*, 0) -> (*)."""
        log_probs = scores.new_zeros((*scores.shape[:-1], 1))
        return HeadCategorical(log_probs, validate_args=False, normalized=True)


def default_mask_mode(head: nn.Module) -> MaskMode:
    """The mask mode of a head.

    Renormalizing keeps the ratios of the probabilities of allowed categories. In a pruned tree, the
    better side of a node depends on what is allowed below it, and learning was slower with masks
    that change (paper/masks). Pruning a flat head masks its scores, which keeps the ratios, and its
    Fisher matrix is that of the allowed categories.
    """
    return "renormalize" if isinstance(getattr(head, "inner", head), CatnatHead) else "prune"


class FromHeads:
    """Turns scores into categorical distributions; the first of two base classes.

    Actions that share a head are computed together, in one call of the head.

    Args:
        heads: head of each action, called as a module, so that probes see its scores.
        mask_mode: how masks change a distribution, see :class:`~catnat.sb3.HeadPolicy`; None:
            "renormalize" for trees, "prune" for other heads.
    """

    distribution: Any
    validate_args = True  # raise ValueError where a probability is NaN
    masks: Any = None  # of the next scores

    def __init__(
        self, heads: Sequence[CategoricalHead | OneChoice], mask_mode: MaskMode | None = None
    ) -> None:
        self.heads = heads
        self.sizes = [head.num_categories for head in heads]
        self.widths = [head.num_scores for head in heads]
        self.mask_mode = mask_mode
        positions: dict[CategoricalHead | OneChoice, list[int]] = {}
        for position, head in enumerate(heads):
            positions.setdefault(head, []).append(position)
        self._has_weights = any(True for head in positions for _ in head.parameters())
        # Each head with the positions of its actions.
        self.groups = list(positions.items())
        super().__init__(self._action_dims())  # type: ignore[call-arg]

    def proba_distribution_net(self, latent_dim: int) -> nn.Module:
        """The layer that computes the scores of all heads."""
        with warnings.catch_warnings():  # where all actions have one choice
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            return nn.Linear(latent_dim, sum(self.widths))

    def proba_distribution(self, action_logits: Tensor) -> Self:
        """Set the distribution from scores (B, sum of S).

        A probability that is NaN raises a ValueError, as in the policies of Stable-Baselines3. The
        host waits for the device here. Code that must not wait calls this within
        ``using(validate_args=False)``.
        """
        self.scores = action_logits
        self.apply_masking(self.masks)
        if self.validate_args and is_plain(action_logits):
            self._check()
        return self

    def _check(self) -> None:
        """Raise an error if a probability is NaN; heads without weights need finite scores only."""
        if not self._has_weights and math.isfinite(self.scores.sum().item()):
            return
        # Log-probabilities are finite or NaN, so their sum is NaN if and only if one of them is.
        if any(bool(part.logits.sum().isnan()) for part in self.parts):
            raise NanProbabilities(
                "the policy's probabilities are NaN: look for NaN in the observations and in the "
                "policy's parameters"
            )

    def apply_masking(self, masks: Any) -> None:
        """Allow only the choices that are True in masks (B, sum of K); None allows all again."""
        allowed = None
        if masks is not None:
            allowed = checked_masks(masks, self.sizes, self.scores.shape[:-1])
            allowed = allowed.to(self.scores.device)
        # One distribution for each group.
        self.parts = [
            self._part(
                head,
                self._take(self.scores, self.widths, positions),
                None if allowed is None else self._take(allowed, self.sizes, positions),
            )
            for head, positions in self.groups
        ]

    def _action_dims(self) -> Any:
        """Arguments of Stable-Baselines3's distribution."""
        return self.sizes

    def _take(self, columns: Tensor, widths: list[int], positions: list[int]) -> Tensor:
        """The columns of one group of actions."""
        return columns

    def _part(self, head: Any, scores: Tensor, mask: Tensor | None) -> HeadCategorical:
        """The distribution of a head over the choices that its mask allows."""
        if mask is None or (self.mask_mode or default_mask_mode(head)) == "prune":
            part = head(scores, mask)
            if "logits" not in vars(part):  # computed now: under no_grad they need no graph
                part.logits = head.log_probs(part.scores)
            return part
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


class HeadDistribution(FromHeads, CategoricalDistribution):
    """The distribution of a head over the actions of a ``Discrete`` space."""

    def apply_masking(self, masks: Any) -> None:
        """Allow only the choices that are True in masks (B, K); None allows all again."""
        super().apply_masking(masks)
        self.distribution = self.parts[0]

    def _action_dims(self) -> int:
        return self.sizes[0]

    def sample(self) -> Tensor:
        """Random actions (B,)."""
        return draw(self.parts[0])


class HeadMultiDistribution(FromHeads, MultiCategoricalDistribution):
    """Distributions over the A actions of ``MultiDiscrete`` or ``MultiBinary``.

    The distribution of a group of G actions has the batch shape (B, G).
    """

    def apply_masking(self, masks: Any) -> None:
        """Allow only the choices that are True in masks (B, sum of K); None allows all again."""
        super().apply_masking(masks)
        vars(self).pop("distribution", None)

    @cached_property
    def distribution(self) -> list[HeadCategorical]:  # type: ignore[override]
        """The distribution of each action."""
        logits: dict[int, Tensor] = {}
        for part, (_, positions) in zip(self.parts, self.groups, strict=True):
            logits |= zip(positions, part.logits.unbind(-2), strict=True)
        return [
            HeadCategorical(logits[position], validate_args=False, normalized=True)
            for position in range(len(self.heads))
        ]

    def _take(self, columns: Tensor, widths: list[int], positions: list[int]) -> Tensor:
        """The columns of one group, (B, sum of widths) -> (B, G, W)."""
        if len(positions) == len(widths):
            return columns.unflatten(-1, (len(widths), widths[0]))
        parts = columns.split(widths, -1)
        return torch.stack([parts[position] for position in positions], -2)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities of actions, (B, A) -> (B,)."""
        chosen = actions.unbind(-1)
        terms = []
        for part, (_, positions) in zip(self.parts, self.groups, strict=True):
            group = actions
            if len(positions) < len(chosen):
                group = torch.stack([chosen[position] for position in positions], -1)
            terms.append(log_prob(part, group))
        return total(terms)

    def entropy(self) -> Tensor:
        """Entropy of all actions together, (B,)."""
        return total([entropy(part) for part in self.parts])

    def sample(self) -> Tensor:
        """Random actions (B, A)."""
        drawn = []
        for part, (_, positions) in zip(self.parts, self.groups, strict=True):
            many_bits = is_binary(part) and len(positions) > 1
            drawn.append(bit_of(part).sample().long() if many_bits else draw(part))
        return self._in_order(drawn)

    def mode(self) -> Tensor:
        """The likeliest choice of each action, (B, A)."""
        return self._in_order([part.logits.argmax(-1) for part in self.parts])

    def _in_order(self, groups: list[Tensor]) -> Tensor:
        """Actions (B, A) from those of each group, (B, G)."""
        if len(groups) == 1:
            return groups[0]
        columns: dict[int, Tensor] = {}
        for actions, (_, positions) in zip(groups, self.groups, strict=True):
            columns |= zip(positions, actions.unbind(-1), strict=True)
        return torch.stack([columns[position] for position in range(len(self.heads))], -1)


# Two choices have one number, their log-odds: half as much to compute as with two logarithms.


def is_binary(distribution: HeadCategorical) -> bool:
    """Whether there are two categories."""
    return distribution.logits.shape[-1] == 2


def bit_of(distribution: HeadCategorical) -> Bernoulli:
    """A distribution of two categories as that of a bit; log_prob and entropy share it."""
    bit: Bernoulli | None = vars(distribution).get("bit")
    if bit is None:
        log_zero, log_one = distribution.logits.unbind(-1)
        bit = Bernoulli(logits=log_one - log_zero, validate_args=False)
        vars(distribution)["bit"] = bit
    return bit


def log_prob(distribution: HeadCategorical, actions: Tensor) -> Tensor:
    """Log-probabilities of actions, (*)."""
    if is_binary(distribution):
        bit = bit_of(distribution)
        return bit.log_prob(actions.to(bit.logits.dtype))
    return pick(distribution.logits, actions.long(), checked=False)


def entropy(distribution: HeadCategorical) -> Tensor:
    """Entropies, (*)."""
    return bit_of(distribution).entropy() if is_binary(distribution) else distribution.entropy()


def total(terms: list[Tensor]) -> Tensor:
    """The sum over all actions of groups of them, (B, G) each -> (B,)."""
    return terms[0].sum(-1) if len(terms) == 1 else torch.cat(terms, -1).sum(-1)


def draw(distribution: HeadCategorical) -> Tensor:
    """Samples (*): the first of K exponential clocks with rates p to ring.

    For a distribution (B,) the draws equal those of torch.multinomial from the same generator
    state. The host does not wait for the device, and a category of probability 0 is never drawn.
    """
    p = distribution.probs
    clocks = torch.empty_like(p).exponential_().clamp_min_(torch.finfo(p.dtype).tiny)
    return (p / clocks).argmax(-1)
