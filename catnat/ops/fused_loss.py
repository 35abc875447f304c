"""The loss of an output layer by paths as one autograd function, by Triton kernels on CUDA.

For sigmoid and natural splits. :mod:`catnat.ops.path_scores` is the way for all else, and for a
derivative of the gradient. Both agree to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from catnat.numerics import is_plain
from catnat.ops import triton_layer as kernels
from catnat.ops.known_rows import sparse_gradient
from catnat.ops.triton_launch import on_device_of
from catnat.ops.triton_rows import _block, _power
from catnat.ops.triton_splits import split_constants, split_numbers

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Layer:
    """What a loss needs to know of a layer besides its parameters.

    Args:
        num_categories: K.
        upper: levels below the root whose scores are one matmul.
        split: of its head, sigmoid or natural.
        constants: of its head, (R, K-1), or None.
        order: the leaf of each class, (K,), or None.
        sparse: whether the gradients of weight and bias are sparse tensors with the rows in use.
        plainly: log-probabilities in torch, of hidden, weight, bias and targets.
    """

    num_categories: int
    upper: int
    split: Any
    constants: Tensor | None
    order: Tensor | None
    sparse: bool
    plainly: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]

    @property
    def height(self) -> int:
        """H, the number of levels."""
        return (self.num_categories - 1).bit_length()

    @property
    def near(self) -> int:
        """Number of nodes near the root."""
        return (1 << self.upper) - 1


def takes(hidden: Tensor, weight: Tensor, bias: Tensor | None, upper: int) -> bool:
    """Whether the kernels take these tensors, if Triton does."""
    height = weight.shape[0].bit_length()
    return (
        hidden.dtype in _DTYPES
        and weight.dtype in _DTYPES
        and len(hidden) > 0
        and 1 <= upper <= 10
        and upper < height < 30
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and all(is_plain(x) for x in (hidden, weight, bias) if x is not None)
    )


def log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, layer: Layer
) -> Tensor:
    """Log-probabilities of classes, (M, D), (M,) -> (M,); NaN for a class that does not exist."""
    with _without_autocast(hidden):
        out: Tensor = _Loss.apply(hidden, weight, bias, target, layer, None, False)
    return out


def nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    layer: Layer,
    ignored: int,
    reduction: str,
) -> Tensor:
    """Negative log-likelihood of the targets that are not ``ignored``."""
    mean = reduction == "mean"
    with _without_autocast(hidden):
        out: Tensor = _Loss.apply(hidden, weight, bias, target, layer, ignored, mean)
    if mean:
        return out
    return 0.0 - out if reduction == "none" else -out.sum()


class _Loss(torch.autograd.Function):
    """Log-probabilities of the targets, 0 where ignored, or minus the mean of those that count."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        layer: Layer,
        ignored: int | None,
        mean: bool,
    ) -> Tensor:
        given = hidden
        hidden, target = hidden.contiguous(), target.contiguous()
        (M, D), K, H, U = hidden.shape, layer.num_categories, layer.height, layer.upper
        # One row more than the nodes near the root: matmuls are fast where sizes are aligned.
        top = weight[: layer.near + 1].to(hidden.dtype)
        near = hidden @ top.T
        keys = hidden.new_empty(M, dtype=torch.int32)
        slopes = hidden.new_empty(M, H, dtype=torch.float32)
        out = hidden.new_empty(M, dtype=torch.float32)
        scale = hidden.new_empty(1, dtype=torch.float32) if mean else out
        with on_device_of(hidden):
            kernels._forward_kernel[(M,)](
                hidden,
                weight,
                hidden if bias is None else bias,
                near,
                target,
                target if layer.order is None else layer.order,
                slopes if layer.constants is None else layer.constants,
                keys,
                slopes,
                out,
                -1 if ignored is None else ignored,
                **_numbers(layer.split),
                N=len(top),
                D=D,
                K=K,
                H=H,
                U=U,
                PU=_power(U),
                PL=_power(H - U),
                B=_block(D, 256),
                BIAS=bias is not None,
                ORDERED=layer.order is not None,
                IGNORES=ignored is not None,
                CENTRED=layer.constants is None,
            )
            if mean:
                log_probs, out = out, hidden.new_empty((), dtype=torch.float32)
                kernels._mean_kernel[(1,)](
                    log_probs, target, out, scale, M, ignored, B=4096, num_warps=8
                )
        ctx.save_for_backward(given, weight, bias, target, keys, slopes, scale if mean else keys)
        ctx.layer, ctx.ignored, ctx.mean = layer, ignored, mean
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, *taken = ctx.saved_tensors
        rest = (None, None, None, None)
        if torch.is_grad_enabled() or not is_plain(grad):
            return *_plain_backward(ctx, hidden, weight, bias, target, grad), *rest
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = of_weight = of_bias = None
        step = _Backward(hidden.contiguous(), weight, bias, grad, taken, ctx.layer, ctx.mean)
        with on_device_of(hidden), _without_autocast(hidden):
            runs = step.runs() if wants_weight or wants_bias else None  # waits for the device
            step.spread()
            if wants_hidden:
                of_hidden = step.of_hidden()
            if runs is not None:
                of_weight, of_bias = step.of_rows(*runs)
        of_weight, of_bias = of_weight if wants_weight else None, of_bias if wants_bias else None
        return of_hidden, of_weight, of_bias, *rest


class _Backward:
    """One backward pass."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grad: Tensor,
        taken: list[Tensor],
        layer: Layer,
        mean: bool,
    ) -> None:
        self.hidden, self.weight, self.bias, self.layer = hidden, weight, bias, layer
        self.keys, self.slopes, self.scale = taken
        self.grad = grad.contiguous()
        self.sizes = {"H": layer.height, "U": layer.upper, "MEAN": mean}

    def spread(self) -> None:
        """The gradient at the nodes near the root, (M, 2^U), with a last column of zeros."""
        M, N = len(self.hidden), self.layer.near + 1
        self.near = self.hidden.new_empty(M, N)
        largest = torch.finfo(self.near.dtype).max  # a steep gradient must not become infinite
        kernels._near_kernel[(triton.cdiv(M, 4),)](
            self.keys,
            self.slopes,
            self.grad,
            self.scale,
            self.near,
            M,
            largest,
            N=N,
            R=4,
            C=N,
            **self.sizes,
        )

    def of_hidden(self) -> Tensor:
        """The gradient in hidden, (M, D)."""
        M, D = self.hidden.shape
        out = self.near @ self.weight[: self.near.shape[1]].to(self.near.dtype)
        B = _block(D, 1024)
        kernels._hidden_kernel[(M, triton.cdiv(D, B))](
            self.weight,
            self.keys,
            self.slopes,
            self.grad,
            self.scale,
            out,
            D=D,
            K=self.layer.num_categories,
            B=B,
            **self.sizes,
        )
        return out

    def runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys in order, their tokens, and where the tokens of each node below begin."""
        M, H, U = len(self.hidden), self.layer.height, self.layer.upper
        ranked, tokens = self.keys.sort()
        begins = self.keys.new_empty((H - U) * (M + 1), dtype=torch.uint8)
        kernels._starts_kernel[(triton.cdiv(M + 1, 128),)](
            ranked, begins, M, K=self.layer.num_categories, H=H, U=U, B=128
        )
        return ranked, tokens, begins.nonzero()

    def of_rows(
        self, ranked: Tensor, tokens: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients in weight and bias."""
        (M, D), layer = self.hidden.shape, self.layer
        N, dense = layer.near, not layer.sparse
        n = N + len(starts) - (layer.height - layer.upper)  # each level ends with an entry more
        rows = starts if dense else torch.empty(n, dtype=torch.int64, device=starts.device)
        values = _room(self.weight, dense, n, N + 1)
        biases = None if self.bias is None else _room(self.bias, dense, n, N + 1)
        # The row after those near the root gets zeros here. If it is in use, it is set below.
        if values.dtype == self.near.dtype:
            torch.mm(self.near.T, self.hidden, out=values[: N + 1])
        else:
            values[: N + 1] = self.near.T @ self.hidden
        if biases is not None:
            torch.sum(self.near, 0, dtype=biases.dtype, out=biases[: N + 1])
        B = _block(D, 1024)
        kernels._rows_kernel[(len(starts), triton.cdiv(D, B))](
            self.hidden,
            self.slopes,
            self.grad,
            self.scale,
            ranked,
            tokens,
            starts,
            rows,
            values,
            values if biases is None else biases,
            M,
            len(starts),
            N=N,
            C=N + 1,
            D=D,
            K=layer.num_categories,
            B=B,
            BIAS=biases is not None,
            DENSE=dense,
            **self.sizes,
        )
        if dense:
            return values, biases
        of_bias = None
        if biases is not None and self.bias is not None:
            of_bias = sparse_gradient(rows, biases[:n], self.bias)
        return sparse_gradient(rows, values[:n], self.weight), of_bias


def _without_autocast(x: Tensor) -> AbstractContextManager[None]:
    device = x.device.type
    active = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()


def _room(like: Tensor, dense: bool, rows: int, least: int) -> Tensor:
    return torch.zeros_like(like) if dense else like.new_empty(max(rows, least), *like.shape[1:])


def _plain_backward(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, grad: Tensor
) -> list[Tensor | None]:
    """The gradients by way of plain torch, differentiable."""
    with torch.enable_grad():
        counts = torch.ones_like(target, dtype=torch.bool)
        if ctx.ignored is not None:
            counts = target != ctx.ignored
        logs = ctx.layer.plainly(hidden, weight, bias, torch.where(counts, target, 0))
        out = torch.where(counts, logs, 0.0)
        if ctx.mean:
            out = -out.sum() / counts.sum()
        needed = ctx.needs_input_grad[:3]
        pairs = zip((hidden, weight, bias), needed, strict=True)
        wanted = [x for x, need in pairs if x is not None and need]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=torch.is_grad_enabled()))
    return [next(found) if need else None for need in needed]


@functools.lru_cache(maxsize=64)
def _numbers(split: Any) -> dict[str, int | float]:
    return split_numbers(split) | {"NATURAL": split_constants(split, True)["NATURAL"]}
