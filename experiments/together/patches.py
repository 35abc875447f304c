"""3 x 3 patches of images at every second place, and the adjoint: convolutions without cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from catnat.ops.dispatch import HAS_TRITON


def patches(x: Tensor, padding: int) -> Tensor:
    """3 x 3 patches at every second place, (*, n, n, C) -> (*, m, m, 9 C), in plain torch.

    ``padding`` zeros come before the first row and column; after the last one no patch needs any.
    """
    x = F.pad(x, (0, 0, padding, 0, padding, 0))
    x = x.unfold(-3, 3, 2).unfold(-3, 3, 2)  # (*, m, m, C, 3, 3)
    return x.movedim(-3, -1).flatten(-3)


def spread(columns: Tensor, padding: int) -> Tensor:
    """The adjoint of :func:`patches`, (*, m, m, 9 C) -> (*, n, n, C), n = 2 m + 1 - padding."""
    *batch, m, _, width = columns.shape
    taps = columns.unflatten(-1, (3, 3, -1))
    out = columns.new_zeros(*batch, 2 * m + 1, 2 * m + 1, width // 9)
    for row in range(3):
        for column in range(3):
            place = (..., slice(row, row + 2 * m - 1, 2), slice(column, column + 2 * m - 1, 2))
            out[(*place, slice(None))] += taps[..., row, column, :]
    return out[..., padding:, padding:, :]


def _kernels(x: Tensor) -> tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, int], Tensor]]:
    if x.is_cuda and HAS_TRITON:
        from experiments.together import triton_patches

        return triton_patches.patches, triton_patches.spread
    return patches, spread


class Patches(torch.autograd.Function):
    """:func:`patches`, by one Triton kernel on a GPU if there is Triton."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: int) -> Tensor:
        """(*, n, n, C) -> (*, m, m, 9 C)."""
        ctx.padding = padding
        return _kernels(x)[0](x, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The adjoint of a gather of patches is their sum, :func:`spread`."""
        return _kernels(grad)[1](grad, ctx.padding), None


class Spread(torch.autograd.Function):
    """:func:`spread`, by one Triton kernel on a GPU if there is Triton."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, padding: int) -> Tensor:
        """(*, m, m, 9 C) -> (*, n, n, C)."""
        ctx.padding = padding
        return _kernels(columns)[1](columns, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The adjoint of a sum of patches is their gather, :func:`patches`."""
        return _kernels(grad)[0](grad, ctx.padding), None
