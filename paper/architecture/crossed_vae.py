"""The VAE with a dense or a convolutional encoder, and a dense or a convolutional decoder.

    catnat sweep paper/plans/architecture.yaml --engine batched

The convolutional networks are those of the VAE, with or without their batch norm; the dense ones
have one hidden layer of 256 units.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from catnat.lit_modules import DiscreteVAE
from catnat.lit_modules.networks import IMAGE_SHAPE, conv_decoder, conv_encoder

Kind = Literal["conv", "conv-plain", "dense"]
_PIXELS = 28 * 28
_HIDDEN = 256

torch.backends.cudnn.benchmark = True  # all steps have the same shapes


class CrossedVAE(DiscreteVAE):
    """As DiscreteVAE, with networks by name.

    Args:
        encoder: "conv", "conv-plain" (without batch norm) or "dense".
        decoder: likewise.
        options: those of DiscreteVAE.
    """

    def __init__(self, encoder: Kind = "conv", decoder: Kind = "conv", **options: Any) -> None:
        self.network_kinds = (encoder, decoder)  # make_networks needs it
        super().__init__(**options)

    def make_networks(self, num_scores: int, num_inputs: int) -> tuple[nn.Module, nn.Module]:
        """The encoder and the decoder that were asked for."""
        encoder, decoder = self.network_kinds
        dense_encoder = [nn.Flatten(), *_dense(_PIXELS, num_scores)]
        dense_decoder = [*_dense(num_inputs, _PIXELS), nn.Unflatten(1, IMAGE_SHAPE)]
        return (
            _network(encoder, conv_encoder(num_scores), dense_encoder),
            _network(decoder, conv_decoder(num_inputs), dense_decoder),
        )


def _dense(num_inputs: int, num_outputs: int) -> list[nn.Module]:
    return [nn.Linear(num_inputs, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, num_outputs)]


def _network(kind: Kind, conv: nn.Sequential, dense: list[nn.Module]) -> nn.Module:
    if kind == "dense":
        return nn.Sequential(*dense)
    if kind == "conv":
        return conv
    return nn.Sequential(*(layer for layer in conv if not isinstance(layer, nn.BatchNorm2d)))
