"""The update of :class:`catnat.optim.RowAdam` by a Triton kernel.

A program takes R rows, B columns at a time. With a dense gradient it first looks for a number that
is not 0 in each row; the weights and the moments of a row of zeros are neither read nor written.
"""

# mypy: ignore-errors
# Triton's own language, in Python's clothes.
import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096  # most columns that a program holds
_NUMBERS = 1024  # numbers of several short rows


def update_rows(
    param: Tensor,
    grad: Tensor,
    rows: Tensor | None,
    mean: Tensor,
    square: Tensor,
    size: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """:func:`catnat.optim.update_rows_plainly` for contiguous tensors.

    The gradient of all rows, (S, *), comes with ``rows=None``: rows of zeros are left alone then.
    Computed in float32.
    """
    count = len(grad)
    if not count:
        return
    columns = max(1, param[0].numel())
    block = min(triton.next_power_of_2(columns), _COLUMNS)
    together = max(1, _NUMBERS // block)
    with torch.cuda.device_of(param):
        _update_kernel[(triton.cdiv(count, together),)](
            param=param,
            grad=grad,
            rows=rows,
            mean=mean,
            square=square,
            count=count,
            size=size,
            gain1=1 - beta1,
            gain2=1 - beta2,
            eps=eps,
            D=columns,
            R=together,
            B=block,
            num_warps=8 if block * together >= 2048 else 4,
        )


@triton.jit(do_not_specialize=["count", "size"])
def _update_kernel(
    param,
    grad,
    rows,
    mean,
    square,
    count,
    size,
    gain1,
    gain2,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    used = entry < count
    column = tl.arange(0, B)[None, :]
    from_grad = grad + entry[:, None] * D + column
    if rows is None:
        row = entry
        largest = tl.zeros((R, B), tl.int32)
        for start in range(0, D, B):
            inside = used[:, None] & (start + column < D)
            g = tl.load(from_grad + start, mask=inside, other=0.0)
            largest = tl.where(g != 0, 1, largest)  # NaN is not 0
        used = used & (tl.max(largest, axis=1) > 0)
    else:
        row = tl.load(rows + entry, mask=used, other=0)
    end = tl.where(tl.max(used.to(tl.int32), axis=0) > 0, D, 0)
    place = row[:, None] * D + column
    for start in range(0, end, B):
        inside = used[:, None] & (start + column < D)
        at = place + start
        g = tl.load(from_grad + start, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
        m += (g - m) * gain1
        v += (g * g - v) * gain2
        w -= size * (m / (tl.sqrt(v) + eps))
        tl.store(mean + at, m.to(mean.dtype.element_ty), mask=inside)
        tl.store(square + at, v.to(square.dtype.element_ty), mask=inside)
        tl.store(param + at, w.to(param.dtype.element_ty), mask=inside)
