"""The VAE with two more options: is softmax behind because of uneven use, or because of noise?

    python ../../experiments/sweep.py probing.yaml --engine batched --results ../../results

``--even W`` adds W times the distance of the batch's mean q(z | x) from the uniform distribution to
the loss of training. ``--draws M`` takes the mean loss of M draws of z for each image.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from catnat import HeadCategorical
from catnat.lit_modules import DiscreteVAE
from catnat.losses import kl_to_uniform


class ProbingVAE(DiscreteVAE):
    """As DiscreteVAE, trained by straight-through Gumbel with Adam.

    Args:
        head: name of the head.
        num_latents: N.
        num_categories: K.
        learning_rate: of Adam.
        gradient_clip: largest norm of the gradient; 0 for no limit.
        nll_samples: importance samples for test/nll.
        even: weight of KL(mean q || uniform), summed over latents, in the loss of training.
        draws: of z for each image.
    """

    def __init__(
        self,
        head: str = "natural",
        num_latents: int = 10,
        num_categories: int = 8,
        learning_rate: float = 1e-3,
        gradient_clip: float = 1.0,
        nll_samples: int = 512,
        even: float = 0.0,
        draws: int = 1,
    ) -> None:
        super().__init__(
            head=head,
            num_latents=num_latents,
            num_categories=num_categories,
            learning_rate=learning_rate,
            gradient_clip=gradient_clip,
            nll_samples=nll_samples,
        )
        self.even, self.draws = even, draws

    def loss(self, batch: Any, q: HeadCategorical) -> Tensor:
        """The negative ELBO, a mean over the draws."""
        z = q.rsample((self.draws,), estimator=self.estimator, temperature=self.temperature())
        return (self.reconstruction(batch, z).mean(0) + self.kl(q)).mean()

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a training batch, with the price of uneven use."""
        q = self(batch)
        uneven = kl_to_uniform(q.probs.mean(0).log()).sum()
        return self.loss(batch, q) + self.even * uneven
