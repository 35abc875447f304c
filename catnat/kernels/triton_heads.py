"""The Triton kernels of the heads, launched: the functions of ``cpu.py``, on CUDA, float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from catnat.activations import Activation
from catnat.kernels import triton_path, triton_sparsemax, triton_tree
from catnat.kernels.triton_activations import activation_arguments

_BLOCK = 128  # paths of a program


def tree_forward(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Log-probabilities of the leaves, (*, K-1) -> (*, K)."""
    out = scores.new_empty((*scores.shape[:-1], scores.shape[-1] + 1))
    _launch_tree(triton_tree.forward_kernel, activation, constants, scores, out)
    return out


def tree_fisher(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Fisher diagonal and, in the last column, share of flat activations, (*, K-1) -> (*, K)."""
    out = scores.new_empty((*scores.shape[:-1], scores.shape[-1] + 1))
    _launch_tree(triton_tree.fisher_kernel, activation, constants, scores, out)
    return out


def tree_backward(
    scores: Tensor, grad: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Gradient in the scores, (*, K-1), from that in the log-probabilities, (*, K)."""
    out = scores.new_empty(scores.shape)
    tensors = (scores, grad.contiguous(), out)
    _launch_tree(triton_tree.backward_kernel, activation, constants, *tensors, elements=512, few=2)
    return out


def path_forward(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Log-probabilities of N leaves a row, (B, K-1) and (N B) -> (N B)."""
    out = scores.new_empty(leaf.shape)
    _launch_path(triton_path.forward_kernel, activation, constants, scores, leaf.contiguous(), out)
    return out


def path_backward(
    scores: Tensor, leaf: Tensor, grad: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Gradient in the scores, (B, K-1), from that in the log-probabilities of the leaves, (N B)."""
    out = scores.new_zeros(scores.shape)
    tensors = (scores, leaf.contiguous(), grad.contiguous(), out)
    _launch_path(triton_path.backward_kernel, activation, constants, *tensors)
    return out


def path_sample(
    scores: Tensor, uniforms: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """N random leaves a row, -1 where a score is NaN: (B, K-1) and (N B, H) -> (N B)."""
    out = uniforms.new_empty(uniforms.shape[0], dtype=torch.int64)
    tensors = (scores, uniforms.contiguous(), out)
    _launch_path(triton_path.sample_kernel, activation, constants, *tensors)
    return out


def sparsemax_forward(scores: Tensor) -> Tensor:
    """Log-probabilities, (*, K) -> (*, K)."""
    out = scores.new_empty(scores.shape)
    _launch_sparsemax(triton_sparsemax.forward_kernel, scores.contiguous(), out)
    return out


def sparsemax_backward(log_probs: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from that in the log-probabilities, (*, K) -> (*, K)."""
    out = grad.new_empty(grad.shape)
    _launch_sparsemax(triton_sparsemax.backward_kernel, log_probs, grad.contiguous(), out)
    return out


def _launch_tree(
    kernel: Any,
    activation: Activation,
    constants: Tensor | None,
    scores: Tensor,
    *tensors: Tensor,
    elements: int = 1024,
    few: int = 1,
) -> None:
    """A program takes R rows; ``elements`` of it and ``few`` warps were fastest on an H200."""
    S = scores.shape[-1]
    rows = scores.numel() // S
    if not rows:
        return
    scores, height = scores.contiguous(), (S + 1).bit_length() - 1
    P = 1 << height
    R = max(2, min(16, elements // P))  # one row alone leads Triton to a far slower layout
    while R > 4 and rows < 512 * R:  # for few rows, more programs with fewer rows each are faster
        R //= 2
    with _on_device_of(scores):
        kernel[(triton.cdiv(rows, R),)](
            scores,
            scores if constants is None else constants,
            *tensors,
            rows=rows,
            **activation_arguments(activation, constants is None),
            R=R,
            P=P,
            HEIGHT=height,
            REST=S + 1 - P,
            num_warps=min(16, few if P <= 64 else max(1, R * P // (1024 * few))),
        )


def _launch_path(
    kernel: Any,
    activation: Activation,
    constants: Tensor | None,
    scores: Tensor,
    *tensors: Tensor,
) -> None:
    (rows, S), count = scores.shape, tensors[0].shape[0]
    if not count:
        return
    scores = scores.contiguous()
    with _on_device_of(scores):
        kernel[(triton.cdiv(count, _BLOCK),)](
            scores,
            scores if constants is None else constants,
            *tensors,
            count=count,
            rows=rows,
            K=S + 1,
            **activation_arguments(activation, constants is None),
            R=_BLOCK,
            HEIGHT=S.bit_length(),
            num_warps=4,
        )


def _launch_sparsemax(kernel: Any, *tensors: Tensor) -> None:
    """A program holds R whole rows, each in the least power of two P >= K."""
    K = tensors[0].shape[-1]
    rows = tensors[0].numel() // K
    if not rows:
        return
    P = triton.next_power_of_2(K)
    R = max(1, (1024 if P <= 64 else 512) // P)
    warps = 4 if P <= 64 else min(16, max(1, R * P // 512))
    with _on_device_of(tensors[0]):
        kernel[(triton.cdiv(rows, R),)](*tensors, rows=rows, K=K, R=R, P=P, num_warps=warps)


def _on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make the device of x the current one: Triton launches kernels there."""
    here = torch.compiler.is_compiling() or not x.is_cuda  # not CUDA: Triton's interpreter
    if here or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(x)
