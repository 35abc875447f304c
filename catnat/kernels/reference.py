"""Trees, paths, sparsemax and softmax in plain torch: the reference for the kernels.

These functions support every device and dtype, ``torch.func`` and ``torch.compile``, and are
differentiable any number of times. Derivatives of a kernel's gradient use them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from catnat.heads.activations import Activation
from catnat.heads.nodes import leaf_paths, path_sums, walk_down
from catnat.numerics import LOG_ZERO, floored, floored_sums, safe_log, take


def tree_log_probs(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Log-probability of every leaf, (*, K-1) -> (*, K)."""
    return floored_sums(path_sums(*activation.log_activation(scores, constants))[1])


def tree_log_prob(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Log-probability of each leaf, (*), to whose shape the scores broadcast."""
    taken = floored_sums(tree_path_logs(scores, leaf, activation, constants)[0].sum(-1))
    exists = (leaf >= 0) & (leaf <= scores.shape[-1])
    return taken * torch.where(exists, 1.0, torch.nan).to(taken.dtype)


def tree_path_logs(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`path_logs` of scores (*, K-1), which broadcast with the leaves."""
    K = scores.shape[-1] + 1
    return path_logs(lambda node: take(scores, node), leaf, K, activation, constants)


def path_logs(
    scores_at: Callable[[Tensor], Tensor],
    leaf: Tensor,
    num_categories: int,
    activation: Activation,
    constants: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the taken and the other branches on a path, from the leaf up.

    (*) -> (*, H) each; ``log_never`` for an impossible branch. Where a path has no node, the values
    are 0 and LOG_ZERO.

    Args:
        scores_at: function from the indices of nodes to their scores, (*, H) -> (*, H).
        leaf: end of each path, (*).
        num_categories: number of categories (K).
        activation: how a score divides the probability of its node.
        constants: ``activation.node_constants`` of all nodes, (R, K-1), or None.
    """
    node, right_hand, inside = leaf_paths(leaf, num_categories)
    left, right = activation.log_activation(scores_at(node), constants_at(constants, node))
    taken = torch.where(right_hand, right, left)
    other = torch.where(right_hand, left, right)
    return torch.where(inside, taken, 0.0), torch.where(inside, other, LOG_ZERO)


def tree_sample(
    scores: Tensor, uniforms: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """One leaf per row of uniforms: (*, K-1) and (*, H), which broadcast -> (*).

    The leaf is -1 if a score on the path is NaN.
    """

    def goes_right(node: Tensor, level: int) -> tuple[Tensor, Tensor]:
        score = take(scores, node[..., None])[..., 0]
        left, _ = activation.log_activation(score, constants_at(constants, node))
        # 0 <= u < 1, so a certain split is always followed.
        return uniforms[..., level] >= left.double().exp(), left.isnan()

    return walk_down(scores.shape[-1] + 1, uniforms[..., 0], goes_right)


def constants_at(constants: Tensor | None, node: Tensor) -> Tensor | None:
    """Constants of selected nodes, (R, S) and (*) -> (R, *)."""
    if constants is None:
        return None
    return constants.index_select(1, node.reshape(-1)).view(len(constants), *node.shape)


def softmax_log_probs(scores: Tensor) -> Tensor:
    """torch's log_softmax with a floor, (*, K) -> (*, K)."""
    return floored(torch.log_softmax(scores, -1))


def sparsemax_log_probs(scores: Tensor) -> Tensor:
    """Logarithms of :func:`sparsemax_probs`, at their floor outside the support."""
    return safe_log(sparsemax_probs(scores))


def sparsemax_probs(scores: Tensor) -> Tensor:
    """Projection of the scores onto the simplex (Martins and Astudillo, 2016), (*, K) -> (*, K).

    p_k = max(s_k - tau, 0), with tau such that the p_k sum to 1; sorting finds tau. It is computed
    in float64, so that probabilities just above 0 are accurate.
    """
    z = scores.double()
    z = z - z.amax(-1, keepdim=True).detach()
    ranked = z.sort(-1, descending=True).values.clamp_min(-2)  # lower scores never matter
    beyond = ranked.cumsum(-1) - 1
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (rank * ranked > beyond).sum(-1, keepdim=True)
    excess = z - beyond.gather(-1, (size - 1).clamp_min(0)) / size
    return torch.where(excess <= 0, 0.0, excess).to(
        scores.dtype
    )  # clamp changes the gradient of NaN


def sparsemax_vjp(log_probs: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from the gradient in the log-probabilities, (*, K) -> (*, K)."""
    support = ~(log_probs <= LOG_ZERO)
    return centered(grad * torch.where(support, -log_probs, 0.0).exp(), support)


def centered(x: Tensor, inside: Tensor) -> Tensor:
    """x minus its mean over the entries where ``inside`` is True; 0 elsewhere."""
    x = torch.where(inside, x, 0.0)
    mean = x.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True)
    return torch.where(inside, x - mean, 0.0)


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Any]:
    """Gradients in the inputs that require them, which can be differentiated again."""
    again = torch.is_grad_enabled()
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    with torch.enable_grad():
        results = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=again))
    return [next(results) if x is not None and x.requires_grad else None for x in inputs]
