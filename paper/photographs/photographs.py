"""Photographs in color as data of a VAE with 8 x 8 latents and one codebook.

    catnat sweep paper/plans/photographs.yaml --jobs 9 -- --root=data

`make_photographs.py` writes the data. A latent is one position of an 8 x 8 grid. All positions
share the linear layer that scores the categories and the embedding of the categories, so that the
networks fit 8,192 categories.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catnat.datamodules.loader import InMemoryDataModule, InMemoryLoader, seeded
from catnat.lit_modules import DiscreteVAE
from catnat.metrics import RowMeans

SIDE = 64  # pixels of a crop
GRID = 8
NUM_LATENTS = GRID * GRID
FEATURES = 128  # of a latent
NUM_VALUES = 3 * SIDE * SIDE  # of an image
EVALUATED_AT_ONCE = 256  # images on an accelerator: 0.5 GB for each tensor with 8,192 categories
_CROPS = 5  # purpose of a seed

torch.backends.cudnn.benchmark = True  # all steps have the same shapes


# -- data ------------------------------------------------------------------------------------------


class CropLoader(InMemoryLoader):
    """Batches (B, 3, 64, 64) of float crops in [0, 1], multiples of 1 / 255.

    An item is one cell of a grid of squares over a photograph. Evaluation takes these squares. In
    training an item is a random square of its photograph, mirrored half of the time, as a function
    of the seed, the epoch and the number of the batch.

    Args:
        pixels: pixels (n, 3) uint8 of all photographs, on the device of the batches.
        cells: first pixel, height and width of the photograph, top and left, (m, 5).
        batch_size: batch size of each rank (B).
        options: options of :class:`~catnat.datamodules.loader.InMemoryLoader`.
    """

    def __init__(self, pixels: Tensor, cells: Tensor, batch_size: int, **options: Any) -> None:
        super().__init__((cells,), batch_size, **options)
        self.pixels = pixels
        self.steps = torch.arange(SIDE, device=pixels.device)

    def gather(self, index: Tensor, batch: int) -> Tensor:
        """Crops of these cells."""
        first, height, width, top, left = self.items[0][index].unbind(1)
        columns = self.steps.expand(len(index), SIDE)
        if self.shuffle:
            device = self.pixels.device
            noise = seeded(_CROPS, self.seed, self.epoch, batch, self.rank, device=device)
            draws = torch.rand(3, len(index), generator=noise, dtype=torch.float64, device=device)
            top = (draws[0] * (height - SIDE + 1)).long()
            left = (draws[1] * (width - SIDE + 1)).long()
            columns = torch.where(draws[2][:, None] < 0.5, columns, SIDE - 1 - columns)
        rows = first[:, None] + (top[:, None] + self.steps) * width[:, None]  # (B, 64)
        places = rows[:, :, None] + (left[:, None] + columns)[:, None, :]  # (B, 64, 64)
        return self.pixels[places].permute(0, 3, 1, 2).float().div_(255)


class Photographs(InMemoryDataModule):
    """Crops (B, 3, 64, 64) of the photographs in the file that make_photographs.py writes.

    Args:
        root: folder of photographs.npz.
        batch_size: B.
        seed: of the order and of the random crops.
    """

    def __init__(self, root: str = "data", batch_size: int = 32, seed: int = 0) -> None:
        super().__init__(batch_size, seed)
        self.save_hyperparameters()
        self.path = Path(root, "photographs.npz")
        self.pixels: dict[str, Tensor] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read the photographs."""
        super().setup(stage)
        if not self.path.is_file():
            raise ValueError(
                f"there is no {self.path}; paper/photographs/make_photographs.py makes it"
            )
        with np.load(self.path) as arrays:
            for part in ("train", "val", "test"):
                self.pixels[part] = torch.from_numpy(restored(arrays[part]))
                self.parts[part] = (torch.from_numpy(cells(arrays[f"{part}_sizes"])),)

    def make_loader(self, part: str, device: torch.device, **options: Any) -> CropLoader:
        """A loader of the crops of one part."""
        self.pixels[part] = self.pixels[part].to(device)  # it stays there for later loaders
        size = self.batch_size if part == "train" or device.type == "cpu" else EVALUATED_AT_ONCE
        (of_part,) = self.parts[part]
        return CropLoader(self.pixels[part], of_part.to(device), size, **options)


def restored(differences: np.ndarray) -> np.ndarray:
    """Pixels (n, 3) from the differences (3, n) that make_photographs.py writes."""
    green, red, blue = np.cumsum(differences, axis=1, dtype=np.uint8)
    return np.stack([red + green, green, blue + green], axis=1)


def cells(sizes: np.ndarray) -> np.ndarray:
    """First pixel, height and width of the photograph, top and left of all squares, (m, 5)."""
    rows = []
    first = 0
    for height, width in sizes.astype(np.int64):
        for top in range(0, height - SIDE + 1, SIDE):
            for left in range(0, width - SIDE + 1, SIDE):
                rows.append((first, height, width, top, left))
        first += height * width
    return np.array(rows, np.int64)


# -- networks --------------------------------------------------------------------------------------


class Residual(nn.Module):
    """x + convolutions of x, which start at zero.

    Without the normalization most runs end early: at rate 0.0024 the scores grow to 1e5 within 50
    steps, and all latents of all images take one category.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        last = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(last.weight)
        first = nn.Conv2d(channels, channels, 3, padding=1)
        normal = [nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)]
        self.layers = nn.Sequential(normal[0], nn.SiLU(), first, normal[1], nn.SiLU(), last)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return x + self.layers(x)


class Transposed(nn.Module):
    """(B, i, j) to (B, j, i): positions and channels change places."""

    def forward(self, x: Tensor) -> Tensor:
        """The transpose."""
        return x.transpose(1, 2)


def make_encoder() -> nn.Sequential:
    """Images (B, 3, 64, 64) to features of the latents (B, 64, FEATURES)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, stride=2, padding=1),  # 32 x 32
        Residual(32),
        nn.Conv2d(32, 64, 4, stride=2, padding=1),  # 16 x 16
        Residual(64),
        Residual(64),
        nn.Conv2d(64, FEATURES, 4, stride=2, padding=1),  # 8 x 8
        Residual(FEATURES),
        Residual(FEATURES),
        nn.GroupNorm(8, FEATURES),
        nn.Flatten(2),
        Transposed(),
    )


def make_decoder() -> nn.Sequential:
    """Features of the latents (B, 64, FEATURES) to locations and log-scales (B, 6, 64, 64)."""
    return nn.Sequential(
        Transposed(),
        nn.Unflatten(2, (GRID, GRID)),
        Residual(FEATURES),
        Residual(FEATURES),
        nn.ConvTranspose2d(FEATURES, 64, 4, stride=2, padding=1),  # 16 x 16
        Residual(64),
        Residual(64),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),  # 32 x 32
        Residual(32),
        nn.GroupNorm(8, 32),
        nn.SiLU(),
        nn.ConvTranspose2d(32, 6, 4, stride=2, padding=1),  # 64 x 64
    )


# -- likelihood ------------------------------------------------------------------------------------


def location_and_log_scale(output: Tensor) -> tuple[Tensor, Tensor]:
    """Parameters of the logistic distribution of each value, (*, 6, H, W) -> (*, 3, H, W) each."""
    location, log_scale = output.unflatten(-3, (2, 3)).unbind(-4)
    return location + 0.5, (log_scale - 2).clamp(-7, 5)


def logistic_nll(x: Tensor, location: Tensor, log_scale: Tensor) -> Tensor:
    r"""-log P(x) of a logistic distribution that is rounded to 0, 1/255, ..., 1.

    The probability of a value is the mass between the middles to its neighbors; those of 0 and 1
    have all the mass beyond. With the edges a < b of a value in units of the scale,

    .. math:: \sigma(b) - \sigma(a) = \sigma(b) \, \sigma(-a) \, (1 - e^{a - b}),

    which has no cancellation. The 256 probabilities add up to 1.
    """
    inverse_scale = (-log_scale).exp()
    middle = (x - location) * inverse_scale
    half = inverse_scale / 510
    below = F.logsigmoid(middle + half)  # log sigma(b)
    above = F.logsigmoid(half - middle)  # log sigma(-a)
    inside = (-torch.expm1(-2 * half)).log()
    value = (255 * x).round()
    log_p = torch.where(value > 0, above, 0.0) + torch.where(value < 255, below, 0.0)
    return -(log_p + torch.where((value > 0) & (value < 255), inside, 0.0))


def psnr(x: Tensor, reconstruction: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, (B, 3, H, W) twice -> (B,)."""
    return -10 * (x - reconstruction).square().mean((-3, -2, -1)).clamp_min(1e-10).log10()


def bits_per_value(nats: Tensor) -> Tensor:
    """Bits for each of the three values of a pixel from nats for an image."""
    return nats / (NUM_VALUES * math.log(2))


def rate_metrics(distortion: Tensor, kl: Tensor, usage: Tensor) -> dict[str, Tensor]:
    """Bits and use of the codebook from means over all images of an evaluation.

    Args:
        distortion: -log p(x | z) in nats.
        kl: KL(q(z | x) || uniform) in nats, N log K for a code without noise.
        usage: mean q(z_n = k | x) over all images and latents, (K,).

    Returns:
        bits: of the negative ELBO with a uniform prior, per value; it bounds -log2 p(x) from above.
        bits_fitted: the same with the prior ``usage``, equal for all latents, which was fitted to
        the evaluated images. pooled_perplexity: exp of the entropy of ``usage``.
    """
    entropy = torch.special.entr(usage).sum()
    saved = NUM_LATENTS * (math.log(len(usage)) - entropy)
    return {
        "bits": bits_per_value(distortion + kl),
        "bits_fitted": bits_per_value(distortion + kl - saved),
        "pooled_perplexity": entropy.exp(),
    }


# -- the VAE ---------------------------------------------------------------------------------------


class PhotographVAE(DiscreteVAE):
    """As DiscreteVAE, for color images 64 x 64, with 8 x 8 latents and one codebook.

    Logged in addition: bits, bits_fitted and pooled_perplexity of :func:`rate_metrics`, and psnr,
    the mean over images of the PSNR of the likeliest reconstruction.

    Args:
        options: those of DiscreteVAE; num_latents must be 64.
    """

    temperature_steps = 200  # between changes of τ; runs are shorter than those on MNIST

    def __init__(self, **options: Any) -> None:
        if options.get("num_latents") != NUM_LATENTS:
            raise ValueError(
                f"num_latents must be {NUM_LATENTS} here, got {options.get('num_latents')}"
            )
        super().__init__(**options)
        self.quality = RowMeans({"psnr": ()})

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """Images to scores (B, 64, S); one-hot latents (B, 64 K) to parameters (B, 6, 64, 64)."""
        num_categories = num_inputs // NUM_LATENTS
        embedding = nn.Linear(num_categories, FEATURES, bias=False)
        nn.init.normal_(embedding.weight)
        encoder = nn.Sequential(make_encoder(), nn.Linear(FEATURES, num_scores // NUM_LATENTS))
        unflatten = nn.Unflatten(1, (NUM_LATENTS, num_categories))
        return encoder, nn.Sequential(unflatten, embedding, make_decoder())

    def reconstruction(self, batch: Any, z: Tensor) -> Tensor:
        """-log p(x | z), summed over pixels and colors, (*, B, N, K) -> (*, B)."""
        parameters = location_and_log_scale(self.decode(z))
        return logistic_nll(self.images(batch), *parameters).sum((-3, -2, -1))

    def mean_image(self, logits: Tensor) -> Tensor:
        """Locations of the logistic distributions, (B, 6, 64, 64) -> (B, 3, 64, 64)."""
        return location_and_log_scale(logits)[0].clamp(0, 1)

    def setup(self, stage: str) -> None:
        """Forget the rows of a run that was cut short."""
        super().setup(stage)
        self.quality.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """As DiscreteVAE, and the PSNR."""
        super().validation_step(batch, batch_idx)
        self._add_psnr(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """As DiscreteVAE, and the PSNR."""
        super().test_step(batch, batch_idx)
        self._add_psnr(batch)

    def _add_psnr(self, batch: Any) -> None:
        images = self.images(batch)
        self.quality.add_rows(psnr=psnr(images, self.reconstruct(images)))

    def epoch_metrics(self, stage: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over all images, and metrics that follow from the means."""
        means = super().epoch_metrics(stage, means)
        assert self.usage is not None
        distortion = -means["elbo"] - means["kl"]
        means |= rate_metrics(distortion, means["kl"], self.usage.mean(0))
        means |= self.quality.compute()
        self.quality.reset()
        return means
