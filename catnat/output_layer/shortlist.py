"""The softmax over frequent classes and the event "rare": the part of the layer that is dense."""

import math
import warnings
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from catnat.kernels.dispatch import HAS_TRITON
from catnat.numerics import at_least_float32, without_autocast

_ALIGNED = 8  # rows of the weight come in such groups: GPUs multiply aligned matrices faster
_LEAST_SHARE = 0.9  # of what the most frequent classes hold: below it the choice is a mistake


def shortlist_logits(shortlist: nn.Module, hidden: Tensor) -> Tensor:
    """Logits in float32 or float64, (*, D) -> (*, F+1), by a call of the module.

    The module is an ``nn.Linear``, or what a library has put in its place. On CUDA an
    ``nn.Linear`` that nothing observes is computed with its rows padded, which is faster.
    """
    if hidden.is_cuda and type(shortlist) is nn.Linear and not _is_observed(shortlist):
        return _padded_logits(shortlist, hidden)
    parameter = next(shortlist.parameters(), None)
    has_one_dtype = parameter is None or parameter.dtype == hidden.dtype
    with without_autocast(hidden) if has_one_dtype else nullcontext():
        logits: Tensor = shortlist(hidden)
    return at_least_float32(logits)


def shortlist_nll(
    shortlist: nn.Module, hidden: Tensor, column: Tensor, soft_cap: float | None
) -> Tensor:
    """Negative log-likelihoods of columns of the softmax, (M, D), (M,) -> (M,).

    On CUDA by kernels that make no copies of the logits, for an ``nn.Linear`` that nothing
    observes and no soft cap.
    """
    has_kernels = hidden.is_cuda and HAS_TRITON and soft_cap is None
    if has_kernels and type(shortlist) is nn.Linear and not _is_observed(shortlist):
        from catnat.kernels.triton_block import block_nll, takes

        with without_autocast(hidden):
            products = _padded_products(shortlist, hidden)
            if takes(products, shortlist.bias):
                return block_nll(products, shortlist.bias, column, len(shortlist.weight))
    logits = capped(shortlist_logits(shortlist, hidden), soft_cap)
    return nn.functional.nll_loss(logits.log_softmax(-1), column, reduction="none")


def start_evenly(shortlist: nn.Linear, num_rare: int, soft_cap: float | None = None) -> None:
    """Let "rare" begin as likely as its classes together, if there is a bias.

    A soft cap may not allow that; then "rare" begins near its largest logit.
    """
    if shortlist.bias is not None:
        logit = math.log(num_rare)
        if soft_cap is not None:
            logit = soft_cap * math.atanh(min(logit / soft_cap, 0.9))
        with torch.no_grad():
            shortlist.bias[-1] = logit


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Logits between -c and c, smoothly."""
    return logits if soft_cap is None else soft_cap * (logits / soft_cap).tanh()


def uncapped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Invert :func:`capped`, up to a constant."""
    if soft_cap is None:
        return logits
    logits = logits - (logits.max() + logits.min()) / 2
    largest = float(logits.max())
    if largest >= soft_cap:
        raise ValueError(f"soft_cap must be above {largest:.3g} for these counts, got {soft_cap}")
    return soft_cap * (logits / soft_cap).atanh()


def warn_of_rare(counts: Tensor, frequent: Tensor) -> None:
    """Warn if classes of the shortlist are far from the most frequent ones.

    Args:
        counts: how often each class occurs, (K,).
        frequent: the classes of the shortlist, (F,).
    """
    total = counts.sum()
    if not len(frequent) or not total:
        return
    share = float(counts[frequent].sum() / total)
    best_share = float(counts.topk(len(frequent)).values.sum() / total)
    if share < _LEAST_SHARE * best_share:
        warnings.warn(
            f"the {len(frequent)} frequent classes of the layer have {share:.1%} of the counts, "
            f"the {len(frequent)} most frequent classes have {best_share:.1%}: give these, "
            f"frequent=counts.topk({len(frequent)}).indices",
            stacklevel=4,
        )


def _is_observed(module: nn.Module) -> bool:
    """Whether a hook expects a call of the module."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or _has_any_global_hook()


def _padded_logits(shortlist: nn.Linear, hidden: Tensor) -> Tensor:
    rows = len(shortlist.weight)
    with without_autocast(hidden):
        logits = at_least_float32(_padded_products(shortlist, hidden))[..., :rows]
        return logits if shortlist.bias is None else logits + shortlist.bias.to(logits.dtype)


def _padded_products(shortlist: nn.Linear, hidden: Tensor) -> Tensor:
    """Logits without the bias in the dtype of the hidden states, with columns of padding."""
    missing = -len(shortlist.weight) % _ALIGNED
    weight = nn.functional.pad(shortlist.weight, (0, 0, 0, missing))
    return hidden @ weight.to(hidden.dtype).T
