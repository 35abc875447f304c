"""One step of Adam on some rows of a parameter: plain torch, C (CPU, float32) or Triton (CUDA)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from catnat.ops import native
from catnat.ops.dispatch import HAS_TRITON


def adam_rows(
    param: Tensor,
    mean: Tensor,
    square: Tensor,
    rows: Tensor,
    grad: Tensor,
    betas: tuple[float, float],
    step: float,
    scale: float,
    eps: float,
) -> None:
    """Update rows in place: the moments m and v, and ``p -= step * m / (sqrt(v) * scale + eps)``.

    Args:
        param: (S, *).
        mean: m, the running mean of gradients, like ``param``.
        square: v, the running mean of squared gradients, like ``param``.
        rows: different indices, (n,).
        grad: the gradient of these rows, (n, *).
        betas: how slowly m and v forget.
        step: size of the step.
        scale: of the root of v.
        eps: added to the divisor.
    """
    grad = grad.to(param.dtype)
    own = (param, mean, square)
    kernel = _kernel() if all(_fits(each) for each in (*own, grad)) else None
    if kernel is not None:
        rows = rows.contiguous()
        width = param[0].numel() if len(param) else 0
        pointers = [x.data_ptr() for x in (*own, grad, rows)]
        threads = torch.get_num_threads() if grad.numel() >= native.PARALLEL else 1
        kernel(*pointers, len(rows), width, *betas, step, scale, eps, threads)
        return
    if _has_triton(param) and all(each.is_contiguous() for each in own):
        from catnat.ops import triton_rows

        given = (*own, rows.contiguous(), grad.contiguous())
        triton_rows.adam_rows(given, tuple(map(float, (*betas, step, scale, eps))))
        return
    m, v = mean[rows], square[rows]
    m.lerp_(grad, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    mean[rows], square[rows] = m, v
    param[rows] -= step * m / (v.sqrt() * scale + eps)


def _has_triton(param: Tensor) -> bool:
    return param.is_cuda and HAS_TRITON and param.dtype != torch.float64


def _fits(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()


@functools.cache
def _kernel() -> Any:
    lib = native.library()
    if lib is None or not hasattr(lib, "catnat_adam_rows"):
        return None
    long, number = ctypes.c_long, ctypes.c_float
    kernel = lib.catnat_adam_rows
    kernel.argtypes = [*[ctypes.c_void_p] * 5, long, long, *[number] * 5, ctypes.c_int]
    return kernel
