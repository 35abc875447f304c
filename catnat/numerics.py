"""Numerical conventions and helpers.

- Finite scores of every floating dtype give finite log-probabilities, probabilities that sum to 1,
  and finite gradients. Saturated scores and categories have gradient exactly 0. With float16
  autocast, a steep gradient may overflow, so that a GradScaler can detect it.
- An impossible category has probability exactly 0. Its log-probability is :data:`LOG_ZERO`, which
  is finite, so that 0 * log 0 = 0.
- Half precision is computed in float32, and matrix products turn autocast off.
- This module defines floors, ``0 * log 0`` and logarithms of 0. Kernels follow it.
- Code reads the values of a tensor only if that does not wait for a device, see
  :func:`can_branch_on`. Otherwise, invalid values become NaN and never a wrong number.

Every implementation and dtype treats scores that are not finite as follows:

- A result that depends on a NaN score is NaN. In softmax and sparsemax, this is the whole row. In a
  tree, it is the categories and nodes below the node of the score. A NaN score does not count as
  saturated. On the CPU, calling a head raises a ValueError instead, unless validation is off.
- Trees: an infinite score makes one side of its node certain and the other side impossible. Its
  gradient is 0.
- Softmax and sparsemax: a score of -inf is an impossible category and gets no gradient. A row with
  +inf, or with only -inf, is NaN.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)
_INSIDE = torch._C
_FUNCTORCH = torch._C._functorch  # looked up once, because every call of a head uses it
LOG_ZERO = -1000.0
"""Log-probability of an impossible category.

It is finite, so that sums, differences and masks stay finite. Its ``exp`` is exactly 0 in every
floating dtype. The log-probabilities of natural and sparsemax reach about -40 in float32, and -80
in float64, before they saturate. Only softmax and sigmoid reach lower values, because their
log-probabilities decrease linearly.
"""


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32 if its dtype is narrower, and unchanged otherwise."""
    if x.dtype in (torch.float32, torch.float64):
        return x
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context that turns autocast off on the device of ``x``."""
    if x.device.type == "meta":  # it has no autocast
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def uniform(
    shape: Sequence[int],
    like: Tensor,
    generator: torch.Generator | None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Uniform levels in [0, 1) on the device of ``like``."""
    # torch.compile cannot trace generator=None after a size of the shape has changed.
    source: dict[str, Any] = {} if generator is None else {"generator": generator}
    return torch.rand(tuple(shape), dtype=dtype, device=like.device, **source)


def exponential(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Exponential noise above 0 with mean 1, in float64 on the device of ``like``."""
    return -torch.log1p(-uniform(shape, like, generator)).clamp_max(-(2.0**-60))


def largest_score(dtype: torch.dtype) -> float:
    """Largest absolute log-probability; sums over 10^6 categories and differences stay finite."""
    return torch.finfo(dtype).max / 2**24


def log_never(dtype: torch.dtype) -> float:
    """Log-probability of an impossible step on a path, below every sum of possible steps.

    The sum along a path stays finite, and :func:`floored_sums` replaces it with :data:`LOG_ZERO`.
    """
    return torch.finfo(dtype).min / 2**8


def floored_sums(sums: Tensor) -> Tensor:
    """Log-probabilities from sums along paths; :data:`LOG_ZERO` if a step is impossible.

    The gradient is the gradient of the sum.
    """
    impossible = sums < log_never(sums.dtype) / 2
    if can_branch_on(sums) and not bool(impossible.any()):
        return sums
    finite = sums.clamp_min(torch.finfo(sums.dtype).min)
    return torch.where(impossible, LOG_ZERO + (finite - finite.detach()), sums)


def safe_log(x: Tensor, log_of_zero: float = LOG_ZERO) -> Tensor:
    """``log x`` for ``x >= 0``, with zero gradient at 0. NaN stays NaN.

    >>> safe_log(torch.tensor([0.0, 1.0]))
    tensor([-1000.,     0.])
    """
    zero = x <= 0
    return torch.where(zero, log_of_zero, torch.log(torch.where(zero, 1.0, x)))


def finite_log_probs(log_probs: Tensor) -> Tensor:
    """Log-probabilities with ``-inf`` replaced by :data:`LOG_ZERO`."""
    return torch.where(log_probs == -torch.inf, LOG_ZERO, log_probs)


def floored(log_probs: Tensor) -> Tensor:
    """Log-probabilities no lower than -:func:`largest_score`; those at that floor get no gradient.

    -inf, the log-probability of an impossible category, becomes :data:`LOG_ZERO`. On the CPU the
    minimum is cheap and usually shows that no value needs the floor.
    """
    lowest = -largest_score(log_probs.dtype)
    looked_at = can_branch_on(log_probs) and log_probs.numel() > 0
    if looked_at and log_probs.detach().amin().item() >= lowest:  # not where one is NaN
        return log_probs
    impossible = log_probs == -torch.inf
    return torch.where(impossible, LOG_ZERO, log_probs.clamp_min(lowest))


def exp_of_log_probs(log_probs: Tensor) -> Tensor:
    """``exp`` of log-probabilities in float32 or float64, exactly 0 for impossible categories.

    On the CPU, ``exp`` takes fifty times longer if its result underflows. Impossible categories are
    therefore clamped first and set to 0 afterwards.
    """
    if not can_branch_on(log_probs):
        return log_probs.exp()
    smallest = torch.finfo(log_probs.dtype).smallest_normal
    probs = log_probs.clamp_min(math.log(smallest) + 1).exp()  # at least e times smallest
    return F.threshold(probs, 3 * smallest, 0.0)


def common_shape(values: torch.Size, batch: torch.Size) -> torch.Size:
    """``torch.broadcast_shapes``, but fast if the first shape ends with the second."""
    if values[len(values) - len(batch) :] == batch:
        return values
    return torch.Size(torch.broadcast_shapes(values, batch))


def take(x: Tensor, index: Tensor) -> Tensor:
    """Select elements of the last dimension, x (*, S) and index (*, H), which broadcast -> (*, H).

    The gradient has the size of x, even if many rows of index broadcast with one row of x.
    """
    if x.shape[:-1] == index.shape[:-1]:
        return x.gather(-1, index)
    rows = torch.arange(x.shape[:-1].numel(), device=x.device).view(*x.shape[:-1], 1)
    flat = rows * x.shape[-1] + index
    return x.reshape(-1).index_select(0, flat.reshape(-1)).view(flat.shape)


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is plain data in memory: not traced, batched, fake, or a dual number."""
    if torch.compiler.is_compiling() or type(x) not in _PLAIN:
        return False
    return not (
        _INSIDE._is_tracing()  # torch.jit.trace, also torch.onnx.export(dynamo=False)
        or _INSIDE._are_functorch_transforms_active()
        or _INSIDE._len_torch_dispatch_stack()
        or _FUNCTORCH.is_functorch_wrapped_tensor(x)
        or _FUNCTORCH.is_legacy_batchedtensor(x)
        or forward_ad._current_level >= 0
    )


def can_branch_on(x: Tensor) -> bool:
    """Whether Python can read the values of ``x`` without waiting: plain data on the CPU."""
    return x.device.type == "cpu" and is_plain(x)


def takes_real_tensors(x: Tensor) -> bool:
    """Whether operations on ``x`` accept real tensors, too; fake tensors often reject them."""
    if torch.compiler.is_compiling():
        return True
    mode = torch._guards.detect_fake_mode(x)
    return mode is None or bool(mode.allow_non_fake_inputs)
