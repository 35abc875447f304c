"""Layers of many models at once: activations and parameters have the model as first dimension.

Images are (M, B, n, n, C). A convolution is a gather of 3 x 3 patches and a batched matrix product,
a transposed convolution a batched matrix product and the adjoint of that gather. ``w`` has the
parameters of all models by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.together.patches import Patches, Spread

_PARTS = 10  # of the rows of a long sum: one model's sum alone would keep one multiprocessor busy


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    """(M, B, D) -> (M, B, D')."""
    return torch.baddbmm(w[f"{name}.bias"][:, None], x, w[f"{name}.weight"].mT)


def conv(x: Tensor, w: dict[str, Tensor], name: str, padding: int) -> Tensor:
    """A convolution with kernel 3 and stride 2, (M, B, n, n, C) -> (M, B, m, m, C')."""
    weight = w[f"{name}.weight"]  # (M, C', C, 3, 3)
    columns = Patches.apply(x, padding)  # (M, B, m, m, 9 C)
    matrix = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)  # (M, 9 C, C')
    product: Tensor = _Product.apply(columns.flatten(1, 3), matrix)
    out = product.view(*columns.shape[:-1], -1)
    return out + w[f"{name}.bias"][:, None, None, None]


def upsample(x: Tensor, w: dict[str, Tensor], name: str, padding: int) -> Tensor:
    """A transposed convolution with kernel 3 and stride 2, (M, B, n, n, C) -> (M, B, m, m, C')."""
    weight = w[f"{name}.weight"]  # (M, C, C', 3, 3)
    matrix = weight.permute(0, 1, 3, 4, 2).flatten(2)  # (M, C, 9 C')
    columns = _Product.apply(x.flatten(1, 3), matrix).view(*x.shape[:-1], -1)
    out: Tensor = Spread.apply(columns, padding)
    return out + w[f"{name}.bias"][:, None, None, None]


def norm(x: Tensor, w: dict[str, Tensor], name: str, seen: dict[str, Tensor]) -> Tensor:
    """Batch norm of each model's channels, (M, B, n, n, C) -> same; keeps what it saw."""
    variance, mean = torch.var_mean(x, (1, 2, 3), correction=0, keepdim=True)
    count = x[0, ..., 0].numel()
    seen[f"{name}.running_mean"] = mean.detach().flatten(1)
    seen[f"{name}.running_var"] = variance.detach().flatten(1) * (count / (count - 1))
    scale = w[f"{name}.weight"][:, None, None, None] * torch.rsqrt(variance + 1e-5)
    return torch.addcmul(w[f"{name}.bias"][:, None, None, None] - mean * scale, x, scale)


class _Product(torch.autograd.Function):
    """Batched product (M, R, C) @ (M, C, D) of many rows; the sum over rows goes by parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return torch.bmm(x, matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        x, matrix = ctx.saved_tensors
        of_x = torch.bmm(grad, matrix.mT) if ctx.needs_input_grad[0] else None
        M, R, _ = x.shape
        parts = _PARTS if R % _PARTS == 0 else 1
        x, grad = (each.reshape(M * parts, R // parts, -1) for each in (x, grad))
        return of_x, torch.bmm(x.mT, grad).view(M, parts, *matrix.shape[1:]).sum(1)
