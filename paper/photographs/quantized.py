"""The networks of photographs.py with a quantizer in place of a categorical distribution.

    pip install vector-quantize-pytorch
    catnat sweep paper/plans/photographs_quantized.yaml --jobs 3 -- --root=data

"vq" is VectorQuantize with the settings of its page: an exponential moving average with decay 0.8,
commitment weight 1, the codebook from ten steps of k-means, and codes replaced that are hardly
used. That page replaces codes with fewer than 2 uses in a batch; here the limit is half of the mean
number of uses, which is 2 for 512 codes and batches of 32 images. "fsq" is FSQ with levels of at
least 5, as its authors recommend, whose product is K or close to it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from photographs import (
    FEATURES,
    NUM_LATENTS,
    location_and_log_scale,
    logistic_nll,
    make_decoder,
    make_encoder,
    psnr,
    rate_metrics,
)
from torch import Tensor, nn

from catnat.checks import require_choice
from catnat.lit_modules.step_module import StepModule
from catnat.metrics import RowMeans

LEVELS = {512: (8, 8, 8), 8192: (8, 8, 5, 5, 5)}  # of FSQ; 8,000 codes in place of 8,192
BATCH = 32  # images, for the limit of VectorQuantize


class QuantizedAutoencoder(StepModule):
    """Encoder, quantizer and decoder of color images 64 x 64, with 8 x 8 codes for an image.

    The loss is -log p(x | z) per value in nats, plus the quantizer's own loss. Logged: val/loss and
    val/elbo as of a VAE whose q(z | x) has no noise, so that the KL divergence from the uniform
    prior is N log K; bits, bits_fitted and pooled_perplexity of ``photographs.rate_metrics``; psnr
    of the mean image.

    Args:
        quantizer: "vq" or "fsq".
        num_categories: number of codes (K); "fsq" takes 512 and 8192.
        learning_rate: learning rate of Adam.
        gradient_clip: largest norm of the gradient; 0 for no limit.
        capture: whether training steps are replayed as CUDA graphs; not possible here.
    """

    def __init__(
        self,
        quantizer: Literal["vq", "fsq"] = "vq",
        num_categories: int = 512,
        learning_rate: float = 1e-3,
        gradient_clip: float = 1.0,
        capture: bool = False,
    ) -> None:
        if capture:
            raise ValueError("capture: the quantizers have steps that the host takes")
        super().__init__(False, gradient_clip, learning_rate)
        self.save_hyperparameters()
        self.encoder = make_encoder()
        self.quantizer = make_quantizer(quantizer, num_categories)
        self.decoder = make_decoder()
        self.num_codes = self.quantizer.codebook_size
        shapes = {"elbo": (), "usage": (self.num_codes,), "psnr": ()}
        self.val_means = RowMeans(shapes)
        self.test_means = RowMeans(shapes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decoder's output (B, 6, 64, 64), codes (B, 64), and the quantizer's own loss."""
        features = self.encoder(images)
        quantized, codes, *losses = self.quantizer(features)
        own_loss = sum((loss.sum() for loss in losses), torch.zeros((), device=images.device))
        return self.decoder(quantized), codes.long(), own_loss

    def step_loss(self, batch: Any) -> Tensor:
        """The loss of a training batch, a scalar."""
        output, _, own_loss = self(batch)
        return logistic_nll(batch, *location_and_log_scale(output)).mean() + own_loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Measure a batch."""
        self._measure(batch, self.val_means)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Measure a batch."""
        self._measure(batch, self.test_means)

    def _measure(self, batch: Tensor, means: RowMeans) -> None:
        output, codes, _ = self(batch)
        location, log_scale = location_and_log_scale(output)
        distortion = logistic_nll(batch, location, log_scale).sum((-3, -2, -1))
        means.add_rows(
            elbo=-distortion - self.kl,
            usage=F.one_hot(codes, self.num_codes).double().mean(1),
            psnr=psnr(batch, location.clamp(0, 1)),
        )

    @property
    def kl(self) -> float:
        """KL divergence of a code without noise from the uniform prior, in nats."""
        return NUM_LATENTS * math.log(self.num_codes)

    def epoch_metrics(self, stage: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over all images, and metrics that follow from the means."""
        usage = means.pop("usage")
        kl = torch.full_like(means["elbo"], self.kl)
        if stage == "val":
            means["loss"] = -means["elbo"]
        return means | {"kl": kl} | rate_metrics(-means["elbo"] - kl, kl, usage)


def make_quantizer(name: str, num_categories: int) -> nn.Module:
    """A quantizer of features (B, 64, FEATURES)."""
    require_choice(("vq", "fsq"), quantizer=name)
    try:
        from vector_quantize_pytorch import FSQ, VectorQuantize
    except ImportError as error:
        raise ValueError(
            f"quantizer {name} needs vector-quantize-pytorch and what it imports "
            f"(pip install vector-quantize-pytorch): {error}"
        ) from None
    if name == "vq":
        return VectorQuantize(
            dim=FEATURES,
            codebook_size=num_categories,
            decay=0.8,
            commitment_weight=1.0,
            kmeans_init=True,
            kmeans_iters=10,
            threshold_ema_dead_code=BATCH * NUM_LATENTS / num_categories / 2,
        )
    require_choice(map(str, LEVELS), num_categories=str(num_categories))
    return FSQ(levels=list(LEVELS[num_categories]), dim=FEATURES)
