"""The convolutional VAE with many draws of z for each image: less noise, the same loss.

    catnat sweep paper/plans/without_noise.yaml

With estimator "gumbel" the gradient is the mean over the draws; with "score-function" every draw
has the mean loss of the others as its baseline, so that the gradient has no bias. Evaluation takes
one draw: its mean over 10,000 images is precise enough, and all runs are measured alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from catnat import HeadCategorical
from catnat.lit_modules import DiscreteVAE

torch.backends.cudnn.benchmark = True  # all steps have the same shapes


class ManyDrawsVAE(DiscreteVAE):
    """As DiscreteVAE, with the mean loss of several draws.

    Args:
        draws: of z for each image, at least 2 with "score-function".
        options: those of DiscreteVAE.
    """

    def __init__(self, draws: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.draws = draws
        self.num_samples = draws  # of the score function

    def loss(self, batch: Any, q: HeadCategorical) -> Tensor:
        """The negative ELBO, a mean over the draws."""
        if not self.training:
            reconstruction = self.reconstruction(batch, q.one_hot_sample())
            return (reconstruction + self.kl(q)).mean()
        if self.estimator == "score-function":
            return super().loss(batch, q)
        z = q.rsample((self.draws,), **self.sample_options())
        return (self.reconstruction(batch, z).mean(0) + self.kl(q)).mean()
