"""Encoders from 28 x 28 images to scores, and decoders from latents to the logits of pixels."""

import platform
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_SHAPE = (1, 28, 28)
_SLOW_TRANSPOSED = platform.machine() in {"aarch64", "arm64"}


def dense(*widths: int) -> list[nn.Module]:
    """Linear layers of these widths, with ReLU between the layers."""
    layers = []
    for width, next_width in pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
    return layers[:-1]


def conv_encoder(num_outputs: int) -> nn.Sequential:
    """Three strided convolutions and two linear layers.

    Shapes: images (B, 1, 28, 28), result (B, num_outputs).

    Example:
        >>> import torch
        >>> conv_encoder(70)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 70])
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),  # 14 x 14
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),  # 7 x 7
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),  # 3 x 3
        nn.ReLU(),
        nn.Flatten(),
        *dense(288, 128, num_outputs),
    )


def conv_decoder(num_inputs: int) -> nn.Sequential:
    """Mirror of :func:`conv_encoder`: two linear layers and three transposed convolutions.

    Shapes: latents (B, num_inputs), result the logits of the pixels (B, 1, 28, 28).

    Example:
        >>> import torch
        >>> conv_decoder(80)(torch.zeros(2, 80)).shape
        torch.Size([2, 1, 28, 28])
    """
    return nn.Sequential(
        *dense(num_inputs, 128, 288),
        nn.ReLU(),
        nn.Unflatten(1, (32, 3, 3)),
        Upsample(32, 16, 3, stride=2),  # 7 x 7
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Upsample(16, 8, 3, stride=2, padding=1, output_padding=1),  # 14 x 14
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Upsample(8, 1, 3, stride=2, padding=1, output_padding=1),  # 28 x 28
    )


def mlp_encoder(num_outputs: int) -> nn.Sequential:
    """784 - 512 - 256 - num_outputs with ReLU.

    Shapes: images (B, 1, 28, 28), result (B, num_outputs).
    """
    return nn.Sequential(nn.Flatten(), *dense(784, 512, 256, num_outputs))


def mlp_decoder(num_inputs: int) -> nn.Sequential:
    """Mirror of :func:`mlp_encoder`: num_inputs - 256 - 512 - 784 with ReLU.

    Shapes: latents (B, num_inputs), result the logits of the pixels (B, 1, 28, 28).
    """
    return nn.Sequential(*dense(num_inputs, 256, 512, 784), nn.Unflatten(1, IMAGE_SHAPE))


class Upsample(nn.ConvTranspose2d):
    """Transposed convolution with kernel 3, stride 2 and equal paddings of 0 or 1.

    On ARM processors a matrix product and a fold replace oneDNN, which takes up to five times as
    long.

    Shapes: x (B, C, n, n), result (B, C', m, m), m = 2n + 1 without padding, 2n with it.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Transposed convolution of x."""
        if not (_SLOW_TRANSPOSED and x.device.type == "cpu"):
            return super().forward(x)
        assert self.bias is not None
        padding = int(self.padding[0])
        size = tuple(2 * length + 1 - padding for length in x.shape[-2:])
        columns = self.weight.flatten(1).t() @ x.flatten(2)  # (B, 9 C', n n)
        image = F.fold(columns, size, kernel_size=3, padding=padding, stride=2)
        return image + self.bias[:, None, None]
