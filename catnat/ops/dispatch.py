"""Which implementation serves a tensor."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from catnat._numerics import transforms_active

HAS_TRITON = importlib.util.find_spec("triton") is not None


def use_triton(scores: Tensor, num_categories: int, limit: int) -> bool:
    """Whether the Triton kernels take these scores: CUDA, float32, K up to ``limit``."""
    on_device = scores.is_cuda and scores.dtype == torch.float32
    return on_device and num_categories <= limit and HAS_TRITON


def use_reference(triton: bool) -> bool:
    """Whether only plain torch will do: under torch.func, or compiled (but for Triton)."""
    if torch.compiler.is_compiling():
        return not triton
    return transforms_active()
