"""Trees, their paths and sparsemax in plain torch: what the C and Triton kernels must agree with.

These functions take every device and dtype, work under ``torch.func`` and ``torch.compile``, and
are differentiable any number of times: a derivative of a kernel's gradient goes through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from catnat.activations import Activation
from catnat.numerics import LOG_ZERO, safe_log, take
from catnat.tree import leaf_paths, path_sums


def tree_log_probs(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Log-probability of every leaf, (*, K-1) -> (*, K)."""
    return path_sums(*activation.log_activation(scores, constants))[1]


def tree_log_prob(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Log-probability of each leaf, (*); the batch shape of the scores broadcasts to theirs."""
    taken = tree_path_logs(scores, leaf, activation, constants)[0].sum(-1)
    exists = (leaf >= 0) & (leaf <= scores.shape[-1])
    return taken * torch.where(exists, 1.0, torch.nan).to(taken.dtype)


def tree_path_logs(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the child that a path takes and of the other one, from the leaf up.

    (*, K-1) and (*) -> (*, H) each; where a path has no node, 0 and LOG_ZERO.
    """
    node, right_hand, inside = leaf_paths(leaf, scores.shape[-1] + 1)
    left, right = activation.log_activation(take(scores, node), _at(constants, node))
    taken, other = torch.where(right_hand, right, left), torch.where(right_hand, left, right)
    return torch.where(inside, taken, 0.0), torch.where(inside, other, LOG_ZERO)


def tree_sample(
    scores: Tensor, uniforms: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """One leaf per row of uniforms: (*, K-1) and (*, H), which broadcast -> (*).

    -1 where a score on the way is NaN.
    """
    K = scores.shape[-1] + 1
    heap = torch.ones(uniforms.shape[:-1], dtype=torch.int64, device=scores.device)
    lost = torch.zeros_like(heap, dtype=torch.bool)
    for level in range(uniforms.shape[-1]):
        inside = heap < K
        node = torch.where(inside, heap - 1, 0)[..., None]
        left, _ = activation.log_activation(take(scores, node), _at(constants, node))
        left = left[..., 0].double()
        # u < 1 always, and 0 <= u: a split that is certain always goes its way.
        child = 2 * heap + (uniforms[..., level] >= left.exp())
        heap = torch.where(inside, child, heap)
        lost = lost | (inside & left.isnan())
    return torch.where(lost, -1, heap - K)


def _at(constants: Tensor | None, node: Tensor) -> Tensor | None:
    """The constants of some nodes, (R, S) and (*, H) -> (R, *, H)."""
    if constants is None:
        return None
    return constants.index_select(1, node.reshape(-1)).view(len(constants), *node.shape)


def sparsemax_log_probs(scores: Tensor) -> Tensor:
    """Logarithms of :func:`sparsemax_probs`, at their floor outside the support."""
    return safe_log(sparsemax_probs(scores))


def sparsemax_probs(scores: Tensor) -> Tensor:
    """Projection of the scores onto the simplex (Martins and Astudillo, 2016), (*, K) -> (*, K).

    p_k = max(s_k - tau, 0), with tau such that the p_k sum to 1; tau is found by sorting. In
    float64, so that probabilities just above 0 keep their relative accuracy.
    """
    z = scores.double()
    z = z - z.amax(-1, keepdim=True).detach()
    ranked = z.sort(-1, descending=True).values.clamp_min(-2)  # lower ones never matter
    beyond = ranked.cumsum(-1) - 1
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (rank * ranked > beyond).sum(-1, keepdim=True)
    excess = z - beyond.gather(-1, (size - 1).clamp_min(0)) / size
    return torch.where(excess <= 0, 0.0, excess).to(scores.dtype)  # not clamp: NaN's gradient


def sparsemax_vjp(log_probs: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from the gradient in the log-probabilities, (*, K) -> (*, K)."""
    support = ~(log_probs <= LOG_ZERO)
    pulled = torch.where(support, grad * torch.where(support, -log_probs, 0.0).exp(), 0.0)
    mean = pulled.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
    return torch.where(support, pulled - mean, 0.0)
