"""A Triton kernel for the energy score of samples: its terms and its gradient. CUDA, float32.

Torch has no fast way on a GPU to the distances between all pairs of a few samples: ``cdist`` takes
a block of threads for every single distance, and a matrix product loses the small distances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.ops.triton_launch import on_device_of


@triton.jit
def _kernel(
    samples,
    target,
    error,
    own,
    gradient,
    scale,
    D: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program for each observation; a row is a sample, and its D N numbers are the columns."""
    program = tl.program_id(0).to(tl.int64)
    samples += program * D * G * N
    gradient += program * D * G * N
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    real = column < D * N
    inside = (row < G)[:, None] & real[None, :]
    place = column // N * (G * N) + column % N  # of a column in the first sample
    at = row[:, None] * N + place[None, :]
    x = tl.load(samples + at, mask=inside, other=0.0)
    y = tl.load(target + program * D * N + column, mask=real, other=0.0)
    apart = x - y[None, :]
    distance = tl.sqrt_rn(tl.sum(apart * apart, axis=1))
    tl.store(error + program * G + row, distance, mask=row < G)
    slope = apart * tl.where(distance == 0, 0.0, 1 / distance)[:, None]
    total = tl.zeros((ROWS,), tl.float32)
    for h in range(G):
        apart = x - tl.load(samples + h * N + place, mask=real, other=0.0)[None, :]
        distance = tl.sqrt_rn(tl.sum(apart * apart, axis=1))
        total += distance
        slope -= apart * tl.where(distance == 0, 0.0, 1 / ((G - 1) * distance))[:, None]
    tl.store(own + program * G + row, total, mask=row < G)
    tl.store(gradient + at, slope * scale, mask=inside)


def energy(samples: Tensor, target: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Terms and gradient of the energy score of G samples x_g of D times N numbers.

    Shapes: ``samples`` (*, D, G, N), ``target`` y (*, D, N).

    Returns:
        |x_g - y| (*, G); the sums of |x_g - x_h| over h (*, G); ``scale`` times the gradient of the
        energy score in the samples (*, D, G, N). Where two points coincide, their term has
        gradient 0.
    """
    D, G, N = samples.shape[-3:]
    samples, target = samples.contiguous(), target.contiguous()
    error, own = (samples.new_empty(*samples.shape[:-3], G) for _ in range(2))
    gradient = torch.empty_like(samples)
    tensors = (samples, target, error, own, gradient)
    sizes = {"ROWS": triton.next_power_of_2(G), "COLUMNS": triton.next_power_of_2(D * N)}
    with on_device_of(samples):
        _kernel[(error.numel() // G,)](*tensors, scale / G, D=D, G=G, N=N, **sizes, num_warps=4)
    return error, own, gradient
