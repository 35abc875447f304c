"""A VAE small enough to sum over all its latents: is catnat's lead a matter of the estimator?

    catnat sweep paper/plans/estimators.yaml --engine batched

With ``--estimator exact`` the loss is the negative ELBO itself, a sum over all K^N latents, and its
gradient has neither bias nor noise. All other estimators are those of the VAE it is made from.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catnat import HeadCategorical
from catnat.lit_modules import DiscreteVAE

Estimator = Literal["gumbel", "straight-through", "reinmax", "score-function", "exact"]


class SmallVAE(DiscreteVAE):
    """As DiscreteVAE, with one hidden layer in encoder and decoder.

    Args:
        head: name of the head.
        num_latents: N.
        num_categories: K; there are K^N latents.
        learning_rate: of Adam.
        estimator: of the gradient through the latents.
        gradient_clip: largest norm of the gradient; 0 for no limit.
        nll_samples: importance samples for test/nll.
    """

    codes: Tensor

    def __init__(
        self,
        head: str = "natural",
        num_latents: int = 4,
        num_categories: int = 8,
        learning_rate: float = 1e-3,
        estimator: Estimator = "exact",
        gradient_clip: float = 0.0,
        nll_samples: int = 512,
    ) -> None:
        super().__init__(
            head=head,
            num_latents=num_latents,
            num_categories=num_categories,
            learning_rate=learning_rate,
            estimator="gumbel" if estimator == "exact" else estimator,
            gradient_clip=gradient_clip,
            nll_samples=nll_samples,
        )
        self.exact = estimator == "exact"
        if self.exact:
            choices = [torch.arange(num_categories)] * num_latents
            categories = torch.cartesian_prod(*choices).reshape(-1, num_latents)
            codes = F.one_hot(categories, num_categories).float()  # (C, N, K), C = K^N
            self.register_buffer("codes", codes, persistent=False)

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """784 - 256 - scores, and latents - 256 - 784."""
        encoder = [nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, num_scores)]
        decoder = [nn.Linear(num_inputs, 256), nn.ReLU(), nn.Linear(256, 784)]
        return nn.Sequential(*encoder), nn.Sequential(*decoder, nn.Unflatten(1, (1, 28, 28)))

    def loss(self, batch: Any, q: HeadCategorical) -> Tensor:
        """The negative ELBO: exact, or with a sample."""
        if not self.exact:
            return super().loss(batch, q)
        logits = self.decode(self.codes).flatten(1)  # (C, 784)
        log_p = self.images(batch).flatten(1) @ logits.mT - F.softplus(logits).sum(1)  # (B, C)
        q_codes = (q.logits.flatten(1) @ self.codes.flatten(1).mT).exp()  # (B, C)
        return (self.kl(q) - (q_codes * log_p).sum(1)).mean()
