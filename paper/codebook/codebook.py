"""A VAE with 7 x 7 latents, which share one codebook or have one each.

    catnat sweep paper/plans/codebook.yaml --jobs 1 -- --root=data

The networks are convolutions with GroupNorm. Beside them are the layer of scores, which follows the
encoder, and the embedding of the categories, with which the decoder begins. Both have one weight
for all positions, or a weight for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from catnat.lit_modules import DiscreteVAE

SIDE = 7
NUM_LATENTS = SIDE * SIDE
FEATURES = 32  # of a position


class PositionLinear(nn.Module):
    """Linear layers at all positions, (B, 49, D) -> (B, 49, E).

    Args:
        num_inputs: D.
        num_outputs: E.
        is_shared: whether all positions have the same weight and bias.
    """

    def __init__(self, num_inputs: int, num_outputs: int, is_shared: bool) -> None:
        super().__init__()
        bound = num_inputs**-0.5  # as nn.Linear
        count = 1 if is_shared else NUM_LATENTS
        self.weight = nn.Parameter(torch.empty(count, num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.empty(count, 1, num_outputs))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of each position."""
        return (x.transpose(0, 1) @ self.weight + self.bias).transpose(0, 1)


class Encoder(nn.Sequential):
    """Images (B, 1, 28, 28) to scores (B, 49, S)."""

    def __init__(self, num_scores: int, is_shared: bool) -> None:
        super().__init__(
            nn.Conv2d(1, FEATURES, 4, stride=2, padding=1),  # 14 x 14
            nn.GroupNorm(8, FEATURES),
            nn.SiLU(),
            nn.Conv2d(FEATURES, FEATURES, 4, stride=2, padding=1),  # 7 x 7
            nn.GroupNorm(8, FEATURES),
            nn.SiLU(),
            nn.Conv2d(FEATURES, FEATURES, 3, padding=1),
            nn.GroupNorm(8, FEATURES),
        )
        self.scores = PositionLinear(FEATURES, num_scores, is_shared)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of each position."""
        *layers, scores = self
        for layer in layers:
            x = layer(x)
        return scores(x.flatten(2).transpose(1, 2))


class Decoder(nn.Sequential):
    """One-hot latents (B, 49 K) to the logits of the pixels (B, 1, 28, 28)."""

    def __init__(self, num_categories: int, is_shared: bool) -> None:
        super().__init__(
            PositionLinear(num_categories, FEATURES, is_shared),
            nn.Conv2d(FEATURES, FEATURES, 3, padding=1),
            nn.GroupNorm(8, FEATURES),
            nn.SiLU(),
            nn.ConvTranspose2d(FEATURES, FEATURES, 4, stride=2, padding=1),  # 14 x 14
            nn.GroupNorm(8, FEATURES),
            nn.SiLU(),
            nn.ConvTranspose2d(FEATURES, 1, 4, stride=2, padding=1),  # 28 x 28
        )
        nn.init.normal_(self[0].weight)

    def forward(self, z: Tensor) -> Tensor:
        """The logits of the pixels."""
        embedding, *layers = self
        x = embedding(z.unflatten(1, (NUM_LATENTS, -1)))
        x = x.transpose(1, 2).unflatten(2, (SIDE, SIDE))
        for layer in layers:
            x = layer(x)
        return x


class CodebookVAE(DiscreteVAE):
    """As DiscreteVAE, with 49 latents.

    Logged in addition: pooled_perplexity, exp of the entropy of the mean of q over all images and
    latents.

    Args:
        shared: whether all latents share the layer of scores and the codebook.
        options: those of DiscreteVAE; num_latents must be 49.
    """

    def __init__(self, shared: bool = True, **options: Any) -> None:
        if options.get("num_latents") != NUM_LATENTS:
            raise ValueError(
                f"num_latents must be {NUM_LATENTS} here, got {options.get('num_latents')}"
            )
        self.is_shared = shared  # make_networks needs it
        super().__init__(**options)

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """The encoder and the decoder."""
        S, K = num_scores // NUM_LATENTS, num_inputs // NUM_LATENTS
        return Encoder(S, self.is_shared), Decoder(K, self.is_shared)

    def epoch_metrics(self, stage: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over all images, and the use of the codebook."""
        means = super().epoch_metrics(stage, means)
        assert self.usage is not None
        means["pooled_perplexity"] = torch.special.entr(self.usage.mean(0)).sum().exp()
        return means
