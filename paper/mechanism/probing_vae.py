"""The VAE with four more options, for reasons why softmax could be behind a tree.

    catnat sweep paper/plans/probing.yaml --engine batched

``--decoder tree`` gives the decoder the path of each category in a binary tree, so that categories
with common ancestors have common weights from the start. ``--decoder copies`` gives it as many
inputs that are not 0, copies of the category, and nothing in common. ``--even W`` adds W times the
distance of the batch's mean q(z | x) from the uniform distribution to the loss of training.
``--draws M`` takes the mean loss of M draws of z for each image. ``--early_kl W`` weighs the KL by
a factor that falls from W at the first step to 1 at step 3,000, so that q is certain later.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from catnat import HeadCategorical
from catnat.cuda_graph import DeviceScalar
from catnat.lit_modules import DiscreteVAE
from catnat.losses import kl_to_uniform

Decoder = Literal["plain", "tree", "copies"]
_EARLY = 3000  # steps


class ProbingVAE(DiscreteVAE):
    """As DiscreteVAE, with an estimator of ``q.rsample``.

    Args:
        decoder: what it gets of a category: "plain", a one-hot vector; "tree" or "copies".
        even: weight of KL(mean q || uniform), summed over latents, in the loss of training.
        draws: of z for each image.
        early_kl: weight of the KL at the first step of training; it falls to 1.
        options: those of DiscreteVAE.
    """

    features: Tensor

    def __init__(
        self,
        decoder: Decoder = "plain",
        even: float = 0.0,
        draws: int = 1,
        early_kl: float = 1.0,
        **options: Any,
    ) -> None:
        self.decoder_input = decoder  # make_networks needs it
        super().__init__(**options)
        features = category_features(decoder, self.head.num_categories)  # (K, F)
        self.register_buffer("features", features, persistent=False)
        self.even = even
        self.draws = draws
        self.early_kl = early_kl
        self.kl_weight = DeviceScalar(1.0)

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """As those of the VAE, with features of a category as inputs of the decoder."""
        features = category_features(self.decoder_input, num_inputs // self.num_latents)
        return super().make_networks(num_scores, self.num_latents * features.shape[1])

    def decode(self, z: Tensor) -> Tensor:
        """Logits of the pixels, from the features of the categories."""
        return super().decode(z @ self.features)

    def loss(self, batch: Any, q: HeadCategorical) -> Tensor:
        """The negative ELBO, a mean over the draws."""
        z = q.rsample((self.draws,), **self.sample_options())
        return (self.reconstruction(batch, z).mean(0) + self.kl(q)).mean()

    def prepare_step(self, step: int) -> None:
        """Set the temperature and the weight of the KL."""
        super().prepare_step(step)
        self.kl_weight.set(1 + (self.early_kl - 1) * max(1 - step / _EARLY, 0.0))

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a training batch, with the prices of uneven use and of early certainty."""
        q = self(batch)
        uneven = kl_to_uniform(q.probs.mean(0).log()).sum()
        early = (self.kl_weight() - 1) * self.kl(q).mean()
        return self.loss(batch, q) + self.even * uneven + early


def category_features(decoder: Decoder, num_categories: int) -> Tensor:
    """What the decoder gets of each category, rows of norm 1: (K, F); K is a power of 2."""
    levels = num_categories.bit_length() - 1
    eye = torch.eye(num_categories)
    parts = {
        "plain": [eye],
        "copies": [eye] * levels,
        "tree": [eye.unflatten(1, (2**depth, -1)).sum(2) for depth in range(1, levels + 1)],
    }[decoder]
    return torch.cat(parts, 1) / len(parts) ** 0.5
