"""Losses: likelihood of labels, energy score, terms of the ELBO, importance-weighted likelihood."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catnat.checks import require_at_least, require_choice, require_within
from catnat.distributions import checked_value
from catnat.heads.base import CategoricalHead
from catnat.heads.natural import DEFAULT_TAIL
from catnat.heads.registry import make_head
from catnat.numerics import at_least_float32, exp_of_log_probs, without_autocast


class _PairwiseDistance(torch.autograd.Function):
    """``|x_m - x_n|`` for all pairs: ``(*, M, D) -> (*, M, M)``.

    The value is that of ``torch.cdist``; the backward is faster. With weights
    w_mn = g_mn / |x_m - x_n|, the gradient sum_n w_mn (x_m - x_n) is one matrix product instead of
    two passes over all (m, n, d).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        # The matrix-product mode would turn coincident points into distances of about 1e-3.
        return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, distance = ctx.saved_tensors
        weight = grad / distance.masked_fill(distance == 0, torch.inf)  # subgradient 0 at 0
        weight = weight + weight.mT
        x = x - x.mean(-2, keepdim=True)  # a common offset cancels, but would cost accuracy
        with without_autocast(x):
            return weight.sum(-1, keepdim=True) * x - weight @ x


def energy_score(samples: Tensor, target: Tensor) -> Tensor:
    r"""Energy score of M samples x_m for the observation y; lower is better.

    .. math:: \frac1M \sum_m \|x_m - y\|_2 - \frac1{2M(M-1)} \sum_{m \neq n} \|x_m - x_n\|_2

    It is unbiased for every M >= 2 and can be negative. Where two points coincide, their term
    has gradient zero. Half precision is computed, and returned, in float32.

    Shapes: ``samples`` (M, \*, D), ``target`` (\*, D), result (\*).

    References:
        Gneiting and Raftery, Strictly Proper Scoring Rules, Prediction, and Estimation, 2007.

    Example:
        >>> energy_score(torch.tensor([[0.0], [2.0]]), torch.tensor([3.0]))
        tensor(1.)
    """
    return energy_from_terms(*energy_terms(samples, target))


def energy_from_terms(error: Tensor, distance: Tensor) -> Tensor:
    r"""Energy score from the results of :func:`energy_terms`, (M, \*) and (\*, M, M) -> (\*)."""
    M = error.shape[0]
    return error.mean(0) - distance.sum((-2, -1)) / (2 * M * (M - 1))


def energy_terms(samples: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    r"""Terms of :func:`energy_score`: distances to the target and between the samples.

    Shapes: ``samples`` (M, \*, D), ``target`` (\*, D), results (M, \*) and (\*, M, M).
    """
    if samples.shape[1:] != target.shape or not target.dim():
        raise ValueError(
            "samples must be (M, *, D) and target (*, D), "
            f"got shapes {tuple(samples.shape)} and {tuple(target.shape)}"
        )
    if samples.shape[0] < 2:
        raise ValueError(f"the energy score needs M >= 2 samples, got M = {samples.shape[0]}")
    samples = at_least_float32(samples)
    error = torch.linalg.vector_norm(samples - target, dim=-1)  # (M, *)
    distance = _PairwiseDistance.apply(samples.movedim(0, -2).contiguous())
    return error, distance


def bernoulli_nll(logits: Tensor, x: Tensor, event_dims: int) -> Tensor:
    r"""Negative log-likelihood -log p(x | logits), summed over the last ``event_dims`` dimensions.

    .. math:: -\sum_d x_d \log\sigma(l_d) + (1 - x_d) \log(1 - \sigma(l_d)), \quad x_d \in [0, 1]

    Shapes: ``logits`` (\*, E), ``x`` the same or without some leading dimensions (one x for many
    samples of the logits), result (\*), where E stands for ``event_dims`` dimensions.

    Example:
        >>> bernoulli_nll(torch.zeros(5, 1, 28, 28), torch.ones(5, 1, 28, 28), event_dims=3).shape
        torch.Size([5])
    """
    require_within(0, x.dim(), event_dims=event_dims)
    # Stricter than broadcasting, so that (B, 1) against (B, D) is an error and not a wrong number.
    if logits.shape[logits.dim() - x.dim() :] != x.shape:
        raise ValueError(
            f"x of shape {tuple(x.shape)} must match the last dimensions of logits of shape "
            f"{tuple(logits.shape)}"
        )
    logits = at_least_float32(logits)
    nll = F.binary_cross_entropy_with_logits(
        logits, x.to(logits.dtype).expand_as(logits), reduction="none"
    )
    return nll.flatten(logits.dim() - event_dims).sum(-1) if event_dims else nll


def kl_to_uniform(log_probs: Tensor) -> Tensor:
    r"""Divergence of the categorical q from the uniform distribution over its K categories.

    .. math:: KL(q \,\|\, u) = \log K + \sum_k q_k \log q_k

    A category with q_k = 0 adds zero to value and gradient, whether its log is -1000 or -inf.

    Shapes: ``log_probs`` (\*, K), result (\*).

    Example:
        >>> kl_to_uniform(torch.tensor([0.0, -1000.0]).expand(3, 2))
        tensor([0.6931, 0.6931, 0.6931])
    """
    log_probs = at_least_float32(log_probs)
    probs = exp_of_log_probs(log_probs)
    log_probs = torch.where(probs == 0, 0.0, log_probs)  # 0 * -inf would be NaN
    return (probs * log_probs).sum(-1) + math.log(log_probs.shape[-1])


@torch.no_grad()
def importance_weighted_nll(
    log_weights: Callable[[int], Tensor], num_samples: int = 512, chunk_size: int = 64
) -> Tensor:
    r"""Importance-weighted estimate of -log p(x) from M = ``num_samples`` draws z_m of q(z | x).

    .. math:: -\log \frac1M \sum_m w_m, \qquad \log w_m = \log p(x, z_m) - \log q(z_m \mid x)

    ``log_weights(m)`` draws m new samples and returns their log-weights. Memory holds the
    log-weights of at most ``chunk_size`` samples and one sum for each chunk. The estimate is for
    evaluation and has no gradient.

    Shapes: ``log_weights(m)`` (m, \*), result (\*).

    References:
        Burda, Grosse and Salakhutdinov, Importance Weighted Autoencoders, 2016.

    Example:
        >>> importance_weighted_nll(lambda m: torch.full((m, 2), -90.0), num_samples=100)
        tensor([90., 90.])
    """
    require_at_least(1, num_samples=num_samples, chunk_size=chunk_size)
    parts = []
    for start in range(0, num_samples, chunk_size):
        m = min(chunk_size, num_samples - start)
        chunk = log_weights(m)
        if chunk.shape[:1] != (m,):
            raise ValueError(f"log_weights({m}) must be ({m}, *), got {tuple(chunk.shape)}")
        parts.append(at_least_float32(chunk).logsumexp(0))
    return math.log(num_samples) - reduce(torch.logaddexp, parts)


class HeadNLL(nn.Module):
    r"""Negative log-likelihood of labels: ``nn.CrossEntropyLoss`` for any head.

    Scores are in the last dimension, (\*, S). Pass ``dim=1`` for the layout (N, C, d1, ...) of
    ``nn.CrossEntropyLoss``. Half precision is computed and returned in float32.

    A label that is not a category raises a ValueError on the CPU. On other devices, and under
    torch.compile and torch.func, its loss is NaN.

    Args:
        head: a head or its name. It is called as a module, so that probes and monitors see the
            scores. ``"natural"`` has a tail of 0.05 here, because impossible categories have an
            infinite loss; ``tail=0`` is the paper's head.
        num_categories: number of categories (K), if the head is a name.
        weight: weight of each category, (K,). The mean over labels is then a weighted mean.
        ignore_index: label that contributes to neither value nor gradient.
        label_smoothing: share of the uniform distribution mixed into the targets, in [0, 1]; with a
            mask, of the uniform distribution over the allowed categories.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        dim: dimension of the scores, and of the categories in targets and masks with more than one
            dimension.
        options: options of a named head, as for :func:`~catnat.make_head`.

    >>> loss = HeadNLL("softmax", 3, label_smoothing=0.1)
    >>> loss(torch.zeros(5, loss.head.num_scores), torch.arange(5) % 3)
    tensor(1.0986)
    """

    weight: Tensor | None

    def __init__(
        self,
        head: str | CategoricalHead,
        num_categories: int | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        dim: int = -1,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_categories is None:
            if isinstance(head, str):
                raise ValueError(f"head {head!r} is a name, so num_categories is required")
            num_categories = head.num_categories
        require_choice(("mean", "sum", "none"), reduction=reduction)
        require_within(0, 1, label_smoothing=label_smoothing)
        if head in ("natural", "catnat-natural"):
            options = {"tail": DEFAULT_TAIL} | options
        self.head = make_head(head, num_categories, **options)
        if weight is not None and weight.shape != (num_categories,):
            got = tuple(weight.shape)
            raise ValueError(f"weight must have shape ({num_categories},), got {got}")
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.dim = dim

    def forward(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        r"""The reduced loss.

        Args:
            scores: (\*, S).
            target: categories (\*), or probabilities (\*, K) of a floating dtype.
            mask: allowed categories, as in ``head(scores, mask=mask)``.
        """
        is_soft = target.is_floating_point()
        scores = self._categories_last(scores)
        target = self._categories_last(target) if is_soft else target
        mask = None if mask is None else self._categories_last(mask)
        K = self.head.num_categories
        batch = scores.shape[:-1]
        if target.shape != ((*batch, K) if is_soft else batch):
            raise ValueError(
                f"target must be {(*batch,)} categories or {(*batch, K)} probabilities for scores "
                f"of shape {tuple(scores.shape)}, got {target.dtype} of shape "
                f"{tuple(target.shape)}; dim=1 takes scores (N, C, d1, ...)"
            )
        q = self.head(scores, mask=mask)
        if is_soft:
            return reduced(self._cross_entropy(q.logits, target, mask), None, self.reduction)
        ignored = target == self.ignore_index
        label = checked_value(torch.where(ignored, 0, target), K, "target")
        category = label.clamp(0, K - 1)  # on a GPU a wrong label is not an error
        weights = torch.ones((), device=label.device)
        if self.weight is not None:
            weights = self.weight[category]
        if self.label_smoothing:
            one_hot = torch.zeros_like(q.logits).scatter(-1, category[..., None], 1.0)
            loss = self._cross_entropy(q.logits, one_hot, mask)
        else:
            loss = -q.log_prob(category)
            loss = loss * weights.to(loss.dtype)
        loss = torch.where(label == category, loss, torch.nan)
        counted = torch.where(ignored, 0.0, weights.to(loss.dtype))
        return reduced(torch.where(ignored, 0.0, loss), counted, self.reduction)

    def _cross_entropy(self, log_probs: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        """Weighted cross-entropy with smoothed probabilities of the targets, (*, K) -> (*)."""
        uniform: float | Tensor = 1 / self.head.num_categories
        if mask is not None:
            uniform = mask.to(target.dtype) / mask.sum(-1, keepdim=True)
        share = self.label_smoothing
        terms = log_probs * (target * (1 - share) + share * uniform)
        if self.weight is not None:
            terms = terms * self.weight.to(terms.dtype)
        return -terms.sum(-1)

    def _categories_last(self, x: Tensor) -> Tensor:
        return x.movedim(self.dim, -1) if x.dim() > 1 else x


def reduced(losses: Tensor, weights: Tensor | None, reduction: str) -> Tensor:
    """Losses, their sum, or their sum divided by the sum of the weights."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / (losses.numel() if weights is None else weights.sum())
