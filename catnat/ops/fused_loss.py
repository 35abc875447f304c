"""The loss of an output layer by paths as one autograd function, by Triton kernels on CUDA.

For sigmoid and natural splits. :mod:`catnat.ops.path_scores` is the way for all else, and for a
derivative of the gradient. Both agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from catnat.numerics import is_plain
from catnat.ops import triton_layer as kernels
from catnat.ops.known_rows import sparse_gradient
from catnat.ops.triton_launch import Launch
from catnat.ops.triton_rows import _block, _pieces, _power
from catnat.ops.triton_splits import split_constants, split_numbers

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_AT_ONCE = 128  # entries that a program takes, where programs take entries
_ROWS_AT_ONCE = 4  # rows of hidden that a program of the kernel "near" takes


class Layer(NamedTuple):
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
    """Whether the kernels take these tensors, if Triton does and ``hidden`` is plain."""
    height = weight.shape[0].bit_length()
    return (
        hidden.dtype in _DTYPES
        and weight.dtype in _DTYPES
        and hidden.shape[0] > 0
        and 1 <= upper <= 10
        and upper < height < 30
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and is_plain(weight)
        and (bias is None or is_plain(bias))
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
        M = hidden.shape[0]
        launches = _launches_for(hidden, weight, bias, target, layer, ignored, mean)
        # One row more than the nodes near the root: matmuls are fast where sizes are aligned.
        near = hidden @ weight[: layer.near + 1].to(hidden.dtype).T
        keys = hidden.new_empty(M, dtype=torch.int32)
        slopes = hidden.new_empty(M, layer.height, dtype=torch.float32)
        out = hidden.new_empty(M, dtype=torch.float32)
        scale = keys
        launches.forward(
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
            programs=(M,),
        )
        if mean:
            log_probs, out = out, hidden.new_empty((), dtype=torch.float32)
            scale = hidden.new_empty(1, dtype=torch.float32)
            launches.mean(log_probs, target, out, scale, numbers=(M,), programs=(1,))
        ctx.save_for_backward(given, weight, bias, target, keys, slopes, scale)
        ctx.layer, ctx.ignored, ctx.mean, ctx.launches = layer, ignored, mean, launches
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, *taken = ctx.saved_tensors
        rest = (None, None, None, None)
        if torch.is_grad_enabled() or not is_plain(grad):
            return *_plain_backward(ctx, hidden, weight, bias, target, grad), *rest
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = of_weight = of_bias = None
        step = _Backward(hidden.contiguous(), weight, bias, grad, taken, ctx.layer, ctx.launches)
        with _without_autocast(hidden):
            runs = step.runs() if wants_weight or wants_bias else None
            step.spread()
            if wants_hidden:
                of_hidden = step.of_hidden()
            if runs is not None:  # last: the device works on the rest while the host waits
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
        launches: _Launches,
    ) -> None:
        self.hidden, self.weight, self.bias, self.layer = hidden, weight, bias, layer
        self.keys, self.slopes, self.scale = taken
        self.grad, self.launches = grad.contiguous(), launches

    def spread(self) -> None:
        """The gradient at the nodes near the root, (M, 2^U), with a last column of zeros."""
        M = self.hidden.shape[0]
        self.near = self.hidden.new_empty(M, self.layer.near + 1)
        tensors = (self.keys, self.slopes, self.grad, self.scale, self.near)
        self.launches.near(*tensors, numbers=(M,), programs=(_pieces(M, _ROWS_AT_ONCE),))

    def of_hidden(self) -> Tensor:
        """The gradient in hidden, (M, D)."""
        M, D = self.hidden.shape
        out = self.near @ self.weight[: self.layer.near + 1].to(self.near.dtype)
        tensors = (self.weight, self.keys, self.slopes, self.grad, self.scale, out)
        self.launches.hidden(*tensors, programs=(M, _pieces(D, _block(D, 1024))))
        return out

    def runs(self) -> tuple[Tensor, Tensor, Tensor, Callable[[], int]]:
        """Keys in order, their tokens, where the tokens of each node below begin, and how often."""
        M, L = self.hidden.shape[0], self.layer.height - self.layer.upper
        ranked, tokens = self.keys.sort()
        size, launches = L * (M + 1), self.launches
        begins = tokens.new_empty(size)
        launches.begins(ranked, begins, numbers=(M,), programs=(_pieces(M + 1, _AT_ONCE),))
        places, starts = begins.cumsum(0), begins  # the memory is used once more
        count = _promised(places[-1:])
        launches.starts(places, starts, numbers=(size,), programs=(_pieces(size, _AT_ONCE),))
        return ranked, tokens, starts, count

    def of_rows(
        self, ranked: Tensor, tokens: Tensor, starts: Tensor, promised: Callable[[], int]
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients in weight and bias."""
        (M, D), layer = self.hidden.shape, self.layer
        N, dense, count = layer.near, not layer.sparse, promised()
        n = N + count - (layer.height - layer.upper)  # each level ends with an entry more
        rows = starts if dense else starts.new_empty(n)
        values = _room(self.weight, dense, n, N + 1)
        biases = None if self.bias is None else _room(self.bias, dense, n, N + 1)
        # The row after those near the root gets zeros here. If it is in use, it is set below.
        if values.dtype == self.near.dtype:
            torch.mm(self.near.T, self.hidden, out=values[: N + 1])
        else:
            values[: N + 1] = self.near.T @ self.hidden
        if biases is not None:
            torch.sum(self.near, 0, dtype=biases.dtype, out=biases[: N + 1])
        self.launches.rows(
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
            numbers=(M, count),
            programs=(count, _pieces(D, _block(D, 1024))),
        )
        if dense:
            return values, biases
        of_bias = None
        if biases is not None and self.bias is not None:
            of_bias = sparse_gradient(rows, biases[:n], self.bias)
        return sparse_gradient(rows, values[:n], self.weight), of_bias


def _promised(number: Tensor) -> Callable[[], int]:
    """Begin to copy a number to the host. The result waits for the copy, and for nothing else."""
    copy = number.to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream(number.device).record_event() if number.is_cuda else None

    def wait() -> int:
        if copied is not None:
            copied.synchronize()
        return int(copy)

    return wait


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


class _Launches(NamedTuple):
    """The kernels of a loss, with all that does not change from batch to batch."""

    forward: Launch
    mean: Launch
    near: Launch
    hidden: Launch
    begins: Launch
    starts: Launch
    rows: Launch


def _launches_for(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    layer: Layer,
    ignored: int | None,
    mean: bool,
) -> _Launches:
    dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype, target.dtype)
    absent = (layer.order is None, layer.constants is None)
    sizes = (hidden.shape[1], layer.num_categories, layer.upper)
    return _launches(dtypes, sizes, layer.split, absent, layer.sparse, ignored, mean)


@lru_cache(maxsize=256)
def _launches(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype],
    sizes: tuple[int, int, int],  # D, K and the number of upper levels
    split: Any,
    absent: tuple[bool, bool],  # whether there is no order, and whether there are no constants
    sparse: bool,
    ignored: int | None,
    mean: bool,
) -> _Launches:
    (D, K, U), (unordered, centred) = sizes, absent
    H, N, bias = (K - 1).bit_length(), 1 << U, dtypes[2] is not None
    tree, path = {"K": K, "H": H, "U": U}, {"H": H, "U": U}
    forward = {
        "ignored": -1 if ignored is None else ignored,
        **split_numbers(split),
        **{"N": N, "D": D, **tree, "PU": _power(U), "PL": _power(H - U), "B": _block(D, 256)},
        **{"BIAS": bias, "ORDERED": not unordered, "IGNORES": ignored is not None},
        **split_constants(split, centred),
    }
    # A steep gradient must not become infinite in the dtype of hidden.
    near = {"largest": torch.finfo(dtypes[0]).max, "N": N, **path, "R": _ROWS_AT_ONCE, "C": N}
    wide = {"D": D, **tree, "B": _block(D, 1024)}
    rows = {"N": N - 1, "C": N, **wide, "BIAS": bias, "DENSE": not sparse, "MEAN": mean}
    return _Launches(
        Launch(kernels._forward_kernel, None, forward),
        Launch(kernels._mean_kernel, None, {"ignored": ignored, "B": 4096, "num_warps": 8}),
        Launch(kernels._near_kernel, None, {**near, "MEAN": mean}),
        Launch(kernels._hidden_kernel, None, {**wide, "MEAN": mean}),
        Launch(kernels._begins_kernel, None, {**tree, "B": _AT_ONCE}),
        Launch(kernels._starts_kernel, None, {"B": _AT_ONCE}),
        Launch(kernels._rows_kernel, None, rows),
    )
