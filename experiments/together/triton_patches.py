"""Triton kernels for patches of images and for their adjoint; see ``patches.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _patches_kernel(
    images, out, total, N: tl.constexpr, M: tl.constexpr, C: tl.constexpr, PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, place = o % C, o // C
    tap, place = place % 9, place // 9
    column, place = place % M, place // M
    row, image = place % M, place // M
    y, x = 2 * row + tap // 3 - PADDING, 2 * column + tap % 3 - PADDING
    inside = (o < total) & (y >= 0) & (x >= 0)
    value = tl.load(images + ((image * N + y) * N + x) * C + c, mask=inside, other=0.0)
    tl.store(out + o, value, mask=o < total)


@triton.jit
def _spread_kernel(
    columns, out, total, N: tl.constexpr, M: tl.constexpr, C: tl.constexpr, PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, place = o % C, o // C
    x, place = place % N + PADDING, place // N
    y, image = place % N + PADDING, place // N
    value = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(9):
        down, right = y - tap // 3, x - tap % 3
        inside = (o < total) & (down >= 0) & (right >= 0) & (down % 2 == 0) & (right % 2 == 0)
        inside = inside & (down < 2 * M) & (right < 2 * M)
        source = (((image * M + down // 2) * M + right // 2) * 9 + tap) * C + c
        value += tl.load(columns + source, mask=inside, other=0.0)
    tl.store(out + o, value, mask=o < total)


def patches(images: Tensor, padding: int) -> Tensor:
    """(*, n, n, C) -> (*, m, m, 9 C)."""
    images = images.contiguous()
    *batch, n, _, C = images.shape
    m = (n + padding - 3) // 2 + 1
    return _launch(_patches_kernel, images, (*batch, m, m, 9 * C), n, m, C, padding)


def spread(columns: Tensor, padding: int) -> Tensor:
    """(*, m, m, 9 C) -> (*, n, n, C), n = 2 m + 1 - padding."""
    columns = columns.contiguous()
    *batch, m, _, width = columns.shape
    n, C = 2 * m + 1 - padding, width // 9
    return _launch(_spread_kernel, columns, (*batch, n, n, C), n, m, C, padding)


def _launch(kernel, source, shape, n, m, C, padding) -> Tensor:
    out = source.new_empty(shape)
    if max(source.numel(), out.numel()) >= 2**31:  # the kernels count in 32 bits
        raise ValueError("models at once have too many numbers: choose fewer with --jobs")
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    kernel[grid](source, out, out.numel(), N=n, M=m, C=C, PADDING=padding, BLOCK=_BLOCK)
    return out
