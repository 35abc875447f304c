"""Losses of an output layer that read the rows of paths alone, as its likelihood does."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from catnat.distributions import path_kl
from catnat.heads.nodes import leaf_paths, subtree_sums
from catnat.numerics import LOG_ZERO, at_least_float32, exp_of_log_probs, floored_sums, safe_log

if TYPE_CHECKING:
    from catnat.output_layer.tree_linear import TreeLinear


def regularized_losses(
    layer: "TreeLinear", hidden: Tensor, classes: Tensor, label_smoothing: float, z_loss: float
) -> Tensor:
    """Losses of classes with smoothed labels and the penalty of the softmax's normalizer.

    Args:
        layer: the output layer.
        hidden: (M, D).
        classes: (M,), -1 for those that do not count.
        label_smoothing: share of the target's probability that each split gives to both sides.
        z_loss: factor of the squared log-normalizer of the softmax over frequent classes.
    """
    hidden = torch.where((classes >= 0)[:, None], hidden, 0.0)
    if label_smoothing:
        losses = _smoothed(layer, hidden, classes, label_smoothing)
    else:
        losses = -layer._tree_log_prob(hidden, classes)
    if layer.shortlist is None:
        return losses
    logits = layer._logits(hidden)
    column = layer._places(classes).clamp(0, layer.num_frequent)
    losses = losses + nn.functional.cross_entropy(
        logits, column, reduction="none", label_smoothing=label_smoothing
    )
    return losses + z_loss * logits.logsumexp(-1).square() if z_loss else losses


def _smoothed(layer: "TreeLinear", hidden: Tensor, classes: Tensor, share: float) -> Tensor:
    """Cross entropy of the splits on each path with their smoothed targets, (M,).

    NaN for what is not a class.
    """
    place = layer._places(classes)
    leaf = place - layer.num_frequent
    logs = layer._steps(hidden, layer.weight, layer.bias, leaf)
    step, aside = (floored_sums(log) for log in logs)
    is_node = leaf_paths(leaf, layer.head.num_categories)[2] & (leaf >= 0)[:, None]
    terms = (1 - share / 2) * step + share / 2 * aside
    losses = -torch.where(is_node, terms, 0.0).sum(-1)
    return torch.where(place >= 0, losses, torch.nan)


def distillation(
    layer: "TreeLinear",
    hidden: Tensor,
    teacher: Tensor,
    num_samples: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Estimates of the KL divergence from a teacher's softmax, (M, D), (M, K) -> (M,).

    Exact between the softmaxes of frequent classes; unbiased below "rare", from paths that the
    teacher draws.
    """
    F = layer.num_frequent
    logs = at_least_float32(teacher.detach())[:, layer.classes].log_softmax(-1)
    of_tree = logs[:, F:]
    log_rare = of_tree.logsumexp(-1, keepdim=True)
    probs = (of_tree - log_rare).exp()
    leaf = torch.multinomial(probs, num_samples, replacement=True, generator=generator)
    states = hidden.repeat_interleave(num_samples, 0)
    theirs = layer._steps(states, layer.weight, layer.bias, leaf.flatten())
    ours = _steps_of(probs, leaf)
    estimates = path_kl(ours, [floored_sums(log).view_as(ours[0]) for log in theirs]).mean(-1)
    if layer.shortlist is None:
        return estimates
    block = torch.cat((logs[:, :F], log_rare), -1)
    of_block = (exp_of_log_probs(block) * (block - layer._block(hidden))).sum(-1)
    return of_block + log_rare[:, 0].exp() * estimates


def _steps_of(probs: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Logs of the steps to leaves, and of the other sides, (M, K), (M, n) -> (M, n, H) each."""
    node, goes_right, is_node = leaf_paths(leaf, probs.shape[-1])
    left, right = (side.gather(1, node.flatten(1)).view(node.shape) for side in subtree_sums(probs))
    log_left, log_right = (safe_log(side / (left + right)) for side in (left, right))
    step = torch.where(goes_right, log_right, log_left)
    aside = torch.where(goes_right, log_left, log_right)
    return torch.where(is_node, step, 0.0), torch.where(is_node, aside, LOG_ZERO)
