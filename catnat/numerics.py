"""The only home of floors, ``0 * log 0`` and safe logarithms.

The rule for scores that are not finite, the same in every implementation and dtype:

- What depends on a NaN score is NaN: with softmax and sparsemax the whole row, in a tree the
  categories and nodes below the score's node. A NaN score does not count as saturated.
- catnat: an infinite score is a certain split, like the largest finite score. Its gradient is 0.
- softmax and sparsemax: a score of -inf is an impossible category, and gets no gradient. A row
  with +inf, or with -inf alone, has no limit and is NaN.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_ZERO = -1000.0
"""Log-probability of an impossible category.

Finite, so that sums, differences and masks stay finite, and low enough that ``exp`` of it is
exactly 0 in every floating dtype. Nothing a score can reach without being saturated is as low in
float32 (about -40) or float64 (about -80), except through the sigmoid, whose tails are linear.
"""


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in the dtype it is computed in: half precision becomes float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def largest_score(dtype: torch.dtype) -> float:
    """Bound on log-probabilities that keeps differences, and sums of 10^6 categories, finite."""
    return torch.finfo(dtype).max / 2**24


def safe_log(x: Tensor) -> Tensor:
    """``log x`` for ``x >= 0``; :data:`LOG_ZERO` with zero gradient at 0. NaN stays NaN.

    >>> safe_log(torch.tensor([0.0, 1.0]))
    tensor([-1000.,     0.])
    """
    zero = x <= 0
    return torch.where(zero, LOG_ZERO, torch.log(torch.where(zero, 1.0, x)))


def finite_log_probs(log_probs: Tensor) -> Tensor:
    """Log-probabilities with ``-inf`` replaced by :data:`LOG_ZERO`."""
    return torch.where(log_probs == -torch.inf, LOG_ZERO, log_probs)


def exp_of_log_probs(log_probs: Tensor) -> Tensor:
    """Probabilities of log-probabilities in float32 or float64, 0 for impossible categories.

    On the CPU ``exp`` takes fifty times as long where its result underflows, as it does there.
    """
    if not can_branch_on(log_probs):
        return log_probs.exp()
    smallest = torch.finfo(log_probs.dtype).smallest_normal
    probs = log_probs.clamp_min(math.log(smallest) + 1).exp()  # e times the smallest one, or more
    return F.threshold(probs, 3 * smallest, 0.0)


def transforms_active() -> bool:
    """Whether a torch.func transform (vmap, grad, jacrev, jvp, ...) is running."""
    return bool(torch._C._are_functorch_transforms_active())


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is just data in memory: not being traced, batched, faked or a dual number."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()  # torch.jit.trace, also torch.onnx.export(dynamo=False)
        and not transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._C._functorch.is_legacy_batchedtensor(x)
        and torch.autograd.forward_ad._current_level < 0
    )


def can_branch_on(x: Tensor) -> bool:
    """Whether Python may look at the values of ``x`` at no cost: plain, and on the CPU."""
    return x.device.type == "cpu" and is_plain(x)
