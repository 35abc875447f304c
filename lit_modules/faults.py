"""Errors about batches and scores, each in one line that names the cause."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from catnat.lit_modules.networks import IMAGE_SHAPE
from catnat.numerics import can_branch_on, is_plain


def checked_scores(module: nn.Module, scores: Tensor, batch: Any) -> Tensor:
    """Return the scores; NaN raises a FloatingPointError.

    The check runs on the CPU, and on other devices only in evaluation, which waits for the device
    anyway.
    """
    may_look = can_branch_on(scores) or (not module.training and is_plain(scores))
    if may_look and not math.isfinite(scores.detach().sum()) and bool(scores.isnan().any()):
        raise FloatingPointError(
            f"{type(module).__name__}.scores() returned nan{_cause(module, batch)}"
        )
    return scores


def require_default_shape(x: Tensor) -> None:
    """Raise a ValueError for images that the networks of this package do not take."""
    if tuple(x.shape[1:]) != IMAGE_SHAPE:
        raise ValueError(
            f"the default networks take images (B, 1, 28, 28), got {tuple(x.shape)}: for other "
            "sizes or color, override make_networks() in a subclass"
        )


def require_images(batch: Any) -> None:
    """Raise a ValueError for a batch that is a dictionary, which has no first element."""
    if isinstance(batch, Mapping):
        raise ValueError(
            "a batch must be a tensor of images, or a sequence whose first element is one, got "
            f"{type(batch).__name__} with {', '.join(map(str, batch))}: override images() in a "
            "subclass"
        )


def require_num_scores(scores: Tensor, num_latents: int, num_scores: int) -> None:
    """Raise a ValueError unless an encoder returns (B, N * S) scores, in any shape."""
    if scores.numel() != len(scores) * num_latents * num_scores:
        raise ValueError(
            f"the encoder must return {num_latents * num_scores} scores for each image "
            f"({num_latents} latents with {num_scores} scores), got shape {tuple(scores.shape)}"
        )


def _cause(module: nn.Module, batch: Any) -> str:
    """Name the parameter that is not finite, or the batch."""
    for name, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f": the parameter {name} is not finite; try a smaller learning_rate"
    if any(not bool(x.isfinite().all()) for x in _tensors(batch)):
        return ": the batch has values that are not finite"
    return "; the parameters and the batch are finite, but may be too large"


def _tensors(batch: Any) -> list[Tensor]:
    """Floating-point tensors of a batch."""
    if isinstance(batch, list | tuple):
        parts = list(batch)
    else:
        parts = [batch, getattr(batch, "x", None), getattr(batch, "y", None)]
    return [x for x in parts if isinstance(x, Tensor) and torch.is_floating_point(x)]
