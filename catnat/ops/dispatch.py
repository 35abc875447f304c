"""Which implementation serves a tensor."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from catnat.numerics import is_plain
from catnat.ops import native

HAS_TRITON = importlib.util.find_spec("triton") is not None
_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # not known to torch 2.6


def backend(scores: Tensor, num_categories: int, triton_limit: int) -> str | None:
    """``"triton"``, ``"native"`` (the C kernels), or None for plain torch.

    Plain torch is what torch.func, forward-mode derivatives, fake tensors, torch.jit.trace,
    torch.export, both ONNX exporters and other tracers need. ``torch.compile`` knows Triton, and
    turns the rest into kernels of its own.
    """
    if scores.dtype != torch.float32:
        return None
    compiling = torch.compiler.is_compiling() and not _is_exporting()
    if scores.is_cuda and HAS_TRITON and num_categories <= triton_limit:
        return "triton" if compiling or is_plain(scores) else None
    if scores.device.type == "cpu" and not compiling and is_plain(scores):
        return "native" if native.library() is not None else None
    return None


def differentiable(grad: Tensor) -> bool:
    """Whether a backward pass must itself be plain torch: create_graph, or batched gradients."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or not is_plain(grad)
