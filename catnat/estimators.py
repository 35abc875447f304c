"""Gradient estimators for discrete samples, such as score function, Gumbel-Rao and ReinMax."""

import torch
from torch import Tensor

from catnat.checks import require_at_least, require_positive
from catnat.numerics import LOG_ZERO, at_least_float32, exp_of_log_probs

MOST_DIFFERENT = 10
"""Largest number of samples in :func:`unordered_set_surrogate`, unless they are all categories."""


def score_function_surrogate(
    losses: Tensor, log_probs: Tensor, baseline: float | Tensor | None = None
) -> Tensor:
    r"""Mean of the losses L_m of M samples z_m of p, with an unbiased gradient of E[L].

    The value is the mean loss. The gradient is the sum of the pathwise gradient and the
    score-function term,

    .. math:: \frac1M \sum_m \nabla L_m + (L_m - b_m) \nabla \log p(z_m),

    where b_m is the mean loss of the other M - 1 samples, or ``baseline`` if given. The gradient is
    unbiased only if b_m does not depend on z_m. Without ``baseline``, L_m must therefore depend
    only on z_m. A loss over pairs of samples needs its own ``baseline``.

    Shapes: ``losses`` and ``log_probs`` (M, \*), ``baseline`` a number or a tensor that
    broadcasts to (M, \*), result (\*). Half precision is computed and returned in float32.

    References:
        Williams, Simple Statistical Gradient-Following Algorithms, 1992.
        Kool, van Hoof and Welling, Buy 4 REINFORCE Samples, Get a Baseline for Free!, 2019.

    Example:
        >>> log_probs = torch.zeros(2, requires_grad=True)
        >>> score_function_surrogate(torch.tensor([1.0, 3.0]), log_probs).backward()
        >>> log_probs.grad
        tensor([-1.,  1.])
    """
    if losses.shape != log_probs.shape or losses.dim() == 0:
        raise ValueError(
            "losses and log_probs must both be (M, *), "
            f"got shapes {tuple(losses.shape)} and {tuple(log_probs.shape)}"
        )
    losses = at_least_float32(losses)
    log_probs = at_least_float32(log_probs)
    mean = losses.mean(0)
    advantage = losses.detach()
    M = len(losses)
    if baseline is not None:
        advantage = advantage - (baseline.detach() if isinstance(baseline, Tensor) else baseline)
        if advantage.shape != losses.shape:
            raise ValueError(
                f"baseline must broadcast to the shape {tuple(losses.shape)} of losses, "
                f"but together they make {tuple(advantage.shape)}"
            )
    elif M < 2:
        raise ValueError(
            f"the leave-one-out baseline needs M >= 2 samples, got M = {M}; "
            "pass baseline= to use a single one"
        )
    else:
        advantage = (advantage - mean.detach()) * (M / (M - 1))  # = L_m - mean of the others
    # The difference is exactly zero, so the value stays that of the mean to the last bit.
    return mean + (advantage * (log_probs - log_probs.detach())).mean(0)


def unordered_set_surrogate(
    losses: Tensor, log_probs: Tensor, num_categories: int | None = None
) -> Tensor:
    r"""Unbiased estimate of E[L] from k different samples of p, with an unbiased gradient.

    The set of samples S is drawn without replacement. The estimate is the expected loss of the
    first draw, over all orders in which S can be drawn:

    .. math:: \sum_{s \in S} p(s) R(S, s) L_s, \qquad
        R(S, s) = \frac{P(S \backslash s \mid s \text{ first})}{P(S)}.

    Its gradient is the pathwise gradient, :math:`\sum_s p(s) R(S, s) \nabla L_s`, plus

    .. math:: \sum_{s \in S} \nabla p(s) \, R(S, s) (L_s - b_s),

    where b_s is the estimate of E[L] given that s was the first draw. With all K categories, the
    value and the gradient are exact. Two samples are enough. The loss need not be differentiable.

    Impossible categories in S have weight 0. The weights are computed in float64 with
    :math:`2^k` terms, which limits k to 10, unless S contains all categories.

    Args:
        losses: losses of the samples (L_s), (k, \*).
        log_probs: log-probabilities of the samples, (k, \*), in any order that matches ``losses``.
        num_categories: number of categories (K). It is required if k > 10, and avoids rounding
            errors if k = K.

    Returns:
        The estimate, (\*). Half precision is computed and returned in float32.

    References:
        Kool, van Hoof and Welling, Estimating Gradients for Discrete Random Variables by Sampling
        without Replacement, 2020.

    Example:
        >>> from catnat import make_head
        >>> q = make_head("softmax", 3)(torch.zeros(3, requires_grad=True))
        >>> values, log_probs = q.sample_without_replacement(3)
        >>> round(unordered_set_surrogate(values.float() ** 2, log_probs).item(), 4)
        1.6667
    """
    if losses.shape != log_probs.shape or losses.dim() == 0:
        raise ValueError(
            "losses and log_probs must both be (k, *), "
            f"got shapes {tuple(losses.shape)} and {tuple(log_probs.shape)}"
        )
    k = len(losses)
    has_all = k == num_categories
    if not has_all and not 2 <= k <= MOST_DIFFERENT:
        raise ValueError(
            f"the unordered set estimator needs 2 to {MOST_DIFFERENT} samples, or all categories "
            f"(num_categories={num_categories}), got {k}"
        )
    losses = at_least_float32(losses)
    log_probs = at_least_float32(log_probs)
    with torch.no_grad():
        logs = log_probs.double()
        if has_all:
            weights = logs.exp()
            baselines = (weights * losses).sum(0)
        else:
            weights, later_weights = _set_weights(logs)
            baselines = (later_weights * losses).sum(1)
        factors = (weights * (losses - baselines)).to(losses.dtype)
    estimate = (weights.to(losses.dtype) * losses).sum(0)
    # The difference is exactly zero, so the value stays that of the estimate to the last bit.
    return estimate + (factors * (log_probs - log_probs.detach())).sum(0)


def _set_weights(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    r"""Weights p(s) R(S, s), (k, \*), and p(t) R(S \ s, t) given that s was first, (k, k, \*).

    V(E) is the probability that the draws after those in E complete S:
    V(E) = sum over s in S \ E of p(s) V(E + s) / (mass that is not in E), and V(S) = 1. A set E is
    an index of k bits.
    """
    k = len(log_probs)
    outside = torch.log1p(-log_probs.exp().sum(0).clamp_max(1))
    # Impossible categories are drawn last: no mass remains outside of S.
    outside = torch.where((log_probs <= LOG_ZERO).any(0), -torch.inf, outside)
    log_mass = outside[None]
    for log_p in log_probs:
        log_mass = torch.cat([torch.logaddexp(log_mass, log_p), log_mass])  # s is not in E, or in E
    log_v = torch.zeros_like(log_mass)
    for _ in range(k):  # after n rounds, V(E) is correct if E lacks n elements
        total = torch.full_like(log_mass, -torch.inf)
        for s, log_p in enumerate(log_probs):
            with_s = log_v.unflatten(0, (-1, 2, 2**s))[:, 1]
            terms = torch.stack([log_p + with_s, torch.full_like(with_s, -torch.inf)], 1)
            total = torch.logaddexp(total, terms.flatten(0, 2))
        log_v = torch.cat([(total - log_mass)[:-1], torch.zeros_like(log_mass[:1])])
    after_one = torch.stack([log_v[2**s] for s in range(k)])
    after_two = torch.stack(
        [torch.stack([log_v[2**s | 2**t] for t in range(k)]) for s in range(k)]
    )  # with t = s, it is V of s alone: the ratio is 1
    weights = (log_probs + after_one - log_v[0]).exp()
    return weights, (log_probs + after_two - after_one[:, None]).exp()


def straight_through_gumbel(
    log_probs: Tensor,
    temperature: float | Tensor,
    hard: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""One-hot samples of p with the gradient of their relaxation y at temperature τ.

    .. math:: y = \mathrm{softmax}((\log p + g) / \tau), \qquad g_k \sim \mathrm{Gumbel}(0, 1)

    If ``hard`` is True, the value is the one-hot vector of argmax y, which is an exact sample of p,
    and the gradient is the gradient of y. Otherwise, the value is y. Impossible categories
    (log-probability at most -1000) are never sampled and have y = 0 at every temperature. The
    temperature may be a 0-d tensor. Its value is then not checked, because the check would wait for
    the device.

    Shapes: ``log_probs`` (\*, K), result (\*, K) in the dtype of ``log_probs``. Half precision is
    computed in float32.

    References:
        Jang, Gu and Poole, Categorical Reparameterization with Gumbel-Softmax, 2017.

    Example:
        >>> straight_through_gumbel(torch.tensor([[-1000.0, 0.0], [0.0, -1000.0]]), 0.5)
        tensor([[0., 1.],
                [1., 0.]])
    """
    _require_temperature(temperature)
    scores = at_least_float32(log_probs)
    impossible = scores <= LOG_ZERO  # at a high temperature, y would be positive
    gumbel = _exponential(torch.empty_like(scores), generator).log_().neg_()
    scores = scores + gumbel
    # Masked after the division: the gradient of -inf / temperature in the temperature is NaN.
    y = (scores / temperature).masked_fill(impossible, -torch.inf).softmax(-1)
    if hard:
        # argmax of the scores, not of y: at a high temperature, different scores can have equal y.
        best = scores.masked_fill(impossible, -torch.inf).argmax(-1, keepdim=True)
        one_hot = torch.zeros_like(y).scatter(-1, best, 1.0)
        y = one_hot + (y - y.detach())  # the difference is exactly zero, so the value is one-hot
    return y.to(log_probs.dtype)


def gumbel_rao(
    log_probs: Tensor,
    one_hot: Tensor,
    temperature: float | Tensor,
    num_draws: int = 8,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""One-hot samples D of p with the mean gradient of M relaxed samples.

    The value is D. The gradient is the gradient of the mean of M relaxed samples at temperature τ.
    Their Gumbel noise is drawn conditionally on D being the argmax:

    .. math::
        y = \mathrm{softmax}((\log p + g) / \tau), \qquad
        \log p_D + g_D = -\log e_D, \qquad
        \log p_k + g_k = -\log(e_k / p_k + e_D), \qquad e_k \sim \mathrm{Exp}(1)

    The expected gradient equals that of :func:`straight_through_gumbel`, and its variance is
    smaller and decreases with M. It costs M softmaxes, but the network behind the sample is
    evaluated once. The smaller variance allows a lower temperature, and therefore a smaller bias.

    Impossible categories have y = 0. A temperature that is a tensor is not checked.

    Shapes: ``log_probs`` (\*, K), ``one_hot`` (L, \*, K) or (\*, K), result as ``one_hot``. Half
    precision is computed in float32.

    Args:
        log_probs: normalized log-probabilities.
        one_hot: samples (D), as one-hot vectors.
        temperature: temperature of the relaxed samples (τ), > 0.
        num_draws: number of relaxed samples per sample (M).
        generator: random number generator (default: torch's).

    References:
        Paulus, Maddison and Krause, Rao-Blackwellizing the Straight-Through Gumbel-Softmax
        Gradient Estimator, 2021.

    Example:
        >>> gumbel_rao(torch.tensor([0.25, 0.75]).log(), torch.tensor([0.0, 1.0]), 0.5)
        tensor([0., 1.])
    """
    _require_temperature(temperature)
    require_at_least(1, num_draws=num_draws)
    scores = at_least_float32(log_probs)
    impossible = scores <= LOG_ZERO
    drawn = one_hot > 0
    with torch.no_grad():
        empty = (scores + one_hot).new_empty((num_draws, *one_hot.shape))  # batched inside vmap
        noise = _exponential(empty, generator)  # (M, L, *, K)
        first = torch.where(drawn, noise, 0.0).sum(-1, keepdim=True)  # e_D
        probs = exp_of_log_probs(scores)
        # e_k + p_k e_D = p_k (e_k / p_k + e_D) stays in range for the smallest p_k.
        gumbel = -torch.where(drawn, first.log() + scores, (noise + probs * first).log())
    # Masked after the division, as in straight_through_gumbel.
    perturbed = ((scores + gumbel) / temperature).masked_fill(impossible, -torch.inf)
    y = perturbed.softmax(-1).mean(0)
    return (one_hot + (y - y.detach())).to(one_hot.dtype)  # the value stays one-hot


def straight_through(probs: Tensor, one_hot: Tensor) -> Tensor:
    r"""One-hot samples of p with the gradient of p.

    Shapes: ``probs`` (\*, K), ``one_hot`` (M, \*, K) or (\*, K), result as ``one_hot``.

    References:
        Bengio, Léonard and Courville, Estimating or Propagating Gradients Through Stochastic
        Neurons for Conditional Computation, 2013.

    Example:
        >>> straight_through(torch.tensor([0.25, 0.75]), torch.tensor([0.0, 1.0]))
        tensor([0., 1.])
    """
    return one_hot + (probs - probs.detach())  # plus exactly zero: the value stays one-hot


def reinmax(log_probs: Tensor, one_hot: Tensor) -> Tensor:
    r"""One-hot samples D of p with ReinMax's gradient, which is exact to second order.

    The value is D. If the gradient of a loss in the result is g, its gradient in log p is

    .. math:: \tfrac12 \, p \odot g + \tfrac12 \, (g \cdot D - g \cdot p) \, D.

    ZGR (Shekhovtsov, 2023) is a different derivation of this estimator.

    Shapes: ``log_probs`` (\*, K), ``one_hot`` (M, \*, K) or (\*, K), result as ``one_hot``.

    References:
        Liu, Dong, Liu, Yu and Gao, Bridging Discrete and Backpropagation: Straight-Through and
        Beyond, 2023.
        Shekhovtsov, Cold Analysis of Rao-Blackwellized Straight-Through Gumbel-Softmax Gradient
        Estimator, 2023.

    Example:
        >>> reinmax(torch.tensor([0.25, 0.75]).log(), torch.tensor([0.0, 1.0]))
        tensor([0., 1.])
    """
    probs = log_probs.exp()
    chosen = (one_hot * log_probs).sum(-1, keepdim=True)
    change = (probs - probs.detach()) + (one_hot - probs).detach() * (chosen - chosen.detach())
    return one_hot + change / 2  # plus exactly zero: the value stays one-hot


def _require_temperature(temperature: float | Tensor) -> None:
    """Raise a ValueError for a number that is not positive. Tensors are not checked."""
    if not isinstance(temperature, Tensor):
        require_positive(temperature=temperature)


def _exponential(empty: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill a tensor with samples of Exp(1) whose logarithms are finite."""
    return empty.exponential_(generator=generator).clamp_min_(torch.finfo(empty.dtype).tiny)
