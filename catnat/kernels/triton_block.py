"""The loss of the softmax over frequent classes, from logits in half precision, by Triton kernels.

Plain torch makes several float32 copies of the logits, (M, F+1), on the way to the loss and back.
These kernels read the logits once for the loss, and once for the gradient, which they write in the
dtype of the logits.
"""

# mypy: ignore-errors
# Triton's own language, in Python's clothes.
import torch
import triton
import triton.language as tl
from torch import Tensor

from catnat.kernels.dispatch import fit_triton
from catnat.kernels.reference import gradients
from catnat.numerics import at_least_float32, is_plain

LIMIT = 2**14
"""Largest number of columns: a program holds a row in registers."""


def takes(logits: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels take these tensors."""
    tensors = (logits,) if bias is None else (logits, bias)
    return fit_triton(*tensors) and logits.shape[0] > 0 and logits.shape[1] <= LIMIT


def block_nll(logits: Tensor, bias: Tensor | None, column: Tensor, num_columns: int) -> Tensor:
    """Negative log-likelihoods of columns under a softmax, (M, P), (M,) -> (M,) in float32.

    Args:
        logits: (M, P) without the bias; columns from ``num_columns`` on are padding.
        bias: (num_columns,), or None.
        column: one column for each row, (M,) int64.
        num_columns: number of columns of the softmax.
    """
    return _BlockNLL.apply(logits, bias, column, num_columns)


def block_nll_plainly(
    logits: Tensor, bias: Tensor | None, column: Tensor, num_columns: int
) -> Tensor:
    """:func:`block_nll` in plain torch."""
    logits = at_least_float32(logits)[:, :num_columns]
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return torch.nn.functional.cross_entropy(logits, column, reduction="none")


class _BlockNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, column, num_columns):
        M, P = logits.shape
        out = logits.new_empty(M, dtype=torch.float32)
        normalizer = torch.empty_like(out)
        with torch.cuda.device_of(logits):
            _forward_kernel[(M,)](
                logits=logits,
                bias=bias,
                column=column,
                out=out,
                normalizer=normalizer,
                P=P,
                C=num_columns,
                B=triton.next_power_of_2(P),
                num_warps=8,
            )
        ctx.num_columns = num_columns
        ctx.save_for_backward(logits, bias, column, normalizer)
        return out

    @staticmethod
    def backward(ctx, grad):
        logits, bias, column, normalizer = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grad):

            def plainly(logits, bias):
                return block_nll_plainly(logits, bias, column, ctx.num_columns)

            return *gradients(plainly, (logits, bias), grad), None, None
        M, P = logits.shape
        of_logits = torch.empty_like(logits)
        with torch.cuda.device_of(logits):
            _backward_kernel[(M,)](
                logits=logits,
                bias=bias,
                column=column,
                normalizer=normalizer,
                grad=grad.contiguous(),
                out=of_logits,
                largest=torch.finfo(logits.dtype).max,
                P=P,
                C=ctx.num_columns,
                B=triton.next_power_of_2(P),
                num_warps=8,
            )
        of_bias = None
        if bias is not None and ctx.needs_input_grad[1]:
            sums = of_logits.sum(0, dtype=torch.float32)
            of_bias = sums[: ctx.num_columns].to(bias.dtype)
        return of_logits, of_bias, None, None


@triton.jit
def _row(logits, bias, row, P: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """A row of logits with the bias, (B,) in float32; -inf beyond its columns."""
    place = tl.arange(0, B)
    inside = place < C
    x = tl.load(logits + row * P + place, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, x, float("-inf"))


@triton.jit
def _forward_kernel(
    logits,
    bias,
    column,
    out,
    normalizer,
    P: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x = _row(logits, bias, row, P, C, B)
    largest = tl.max(x, axis=0)
    total = largest + tl.log(tl.sum(tl.exp(x - largest), axis=0))
    chosen = tl.load(column + row)
    picked = tl.sum(tl.where(tl.arange(0, B) == chosen, x, 0.0), axis=0)
    tl.store(normalizer + row, total)
    tl.store(out + row, total - picked)


@triton.jit
def _backward_kernel(
    logits,
    bias,
    column,
    normalizer,
    grad,
    out,
    largest,
    P: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, B)
    x = _row(logits, bias, row, P, C, B)
    p = tl.exp(x - tl.load(normalizer + row))  # 0 in the padding
    g = tl.load(grad + row).to(tl.float32)
    move = g * (p - tl.where(place == tl.load(column + row), 1.0, 0.0))
    move = tl.where(g == 0, 0.0, move)  # a row that does not count may be NaN
    # A steep gradient must not become infinite in half precision.
    move = tl.where(move > largest, largest, tl.where(move < -largest, -largest, move))
    tl.store(out + row * P + place, move.to(out.dtype.element_ty), mask=place < P)
