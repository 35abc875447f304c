"""The Triton kernels of the heads, launched: CUDA, float32."""

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


_KERNELS = {
    "tree_forward": triton_tree.forward_kernel,
    "tree_backward": triton_tree.backward_kernel,
    "path_forward": triton_path.leaf_kernel,
    "path_backward": triton_path.leaf_kernel,
    "path_sample": triton_path.sample_kernel,
    "sparsemax_forward": triton_sparsemax.forward_kernel,
    "sparsemax_backward": triton_sparsemax.backward_kernel,
}


def launch(
    name: str, activation: Activation | None, constants: Tensor | None, *tensors: Tensor
) -> None:
    """Launch a kernel of this name; arguments as in ``dispatch.py``."""
    kernel, given = _KERNELS[name], [x.contiguous() for x in tensors]
    if activation is None:
        _launch_sparsemax(kernel, *given)
    elif name == "path_sample":
        _launch_path(kernel, activation, constants, *given)
    elif name == "path_forward":
        scores, leaf, out = given
        _launch_path(kernel, activation, constants, scores, leaf, scores, out, BACKWARD=False)
    elif name == "path_backward":
        _launch_path(kernel, activation, constants, *given, BACKWARD=True)
    else:
        elements, few = (512, 2) if name == "tree_backward" else (1024, 1)
        _launch_tree(kernel, activation, constants, *given, elements=elements, few=few)


def _launch_tree(
    kernel: Any,
    activation: Activation,
    constants: Tensor | None,
    scores: Tensor,
    *tensors: Tensor,
    elements: int,
    few: int,
) -> None:
    """A program takes R rows; ``elements`` of it and ``few`` warps were fastest on an H200."""
    S = scores.shape[-1]
    rows = scores.numel() // S
    if not rows:
        return
    height = (S + 1).bit_length() - 1
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
    **options: bool,
) -> None:
    (rows, S), count = scores.shape, tensors[0].shape[0]
    if not count:
        return
    with _on_device_of(scores):
        kernel[(triton.cdiv(count, _BLOCK),)](
            scores,
            scores if constants is None else constants,
            *tensors,
            count=count,
            rows=rows,
            K=S + 1,
            **activation_arguments(activation, constants is None),
            **options,
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
