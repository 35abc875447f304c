"""Gradients through discrete samples: score function, straight-through Gumbel, ReinMax."""

import torch
from torch import Tensor

from catnat.checks import require_positive
from catnat.numerics import LOG_ZERO, at_least_float32


def score_function_surrogate(
    losses: Tensor, log_probs: Tensor, baseline: float | Tensor | None = None
) -> Tensor:
    r"""Mean of the losses L_m of M samples z_m of p, with the unbiased gradient of E[L].

    The value is the plain mean. The gradient is the pathwise one plus the score-function term,

    .. math:: \frac1M \sum_m \nabla L_m + (L_m - b_m) \nabla \log p(z_m),

    where b_m is the mean loss of the other M - 1 samples, or ``baseline`` when given. For this
    to be unbiased b_m must not depend on z_m: without a ``baseline``, L_m must be a function of
    z_m alone. A loss over pairs of samples needs its own ``baseline``.

    Shapes: ``losses`` and ``log_probs`` (M, \*), ``baseline`` a number or a tensor that
    broadcasts to (M, \*), result (\*). Half precision is computed, and returned, in float32.

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


def straight_through_gumbel(
    log_probs: Tensor,
    temperature: float | Tensor,
    hard: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""One-hot sample of the categorical p with the gradient of its relaxation y at temperature τ.

    .. math:: y = \mathrm{softmax}((\log p + g) / \tau), \qquad g_k \sim \mathrm{Gumbel}(0, 1)

    With ``hard`` the value is the one-hot vector of argmax y, an exact sample of p, and the
    gradient is that of y; without, the value is y. Impossible categories (a log-probability of
    -1000 or less) are never chosen, and have y = 0 at every temperature. The temperature may be a
    0-d tensor. Its value is then not checked, because the check would wait for the device.

    Shapes: ``log_probs`` (\*, K), result (\*, K) in the same dtype. Half precision is computed in
    float32.

    References:
        Jang, Gu and Poole, Categorical Reparameterization with Gumbel-Softmax, 2017.

    Example:
        >>> straight_through_gumbel(torch.tensor([[-1000.0, 0.0], [0.0, -1000.0]]), 0.5)
        tensor([[0., 1.],
                [1., 0.]])
    """
    if not isinstance(temperature, Tensor):
        require_positive(temperature=temperature)
    scores = at_least_float32(log_probs)
    impossible = scores <= LOG_ZERO  # a high temperature would give them a share
    exponential = torch.empty_like(scores).exponential_(generator=generator)
    gumbel = exponential.clamp_min_(torch.finfo(scores.dtype).tiny).log_().neg_()  # finite
    scores = (scores + gumbel).masked_fill(impossible, -torch.inf)
    y = (scores / temperature).softmax(-1)
    if hard:
        # argmax of the scores, not of y: a high temperature rounds different scores to one y.
        one_hot = torch.zeros_like(y).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)
        y = one_hot + (y - y.detach())  # plus exactly zero: the value stays one-hot
    return y.to(log_probs.dtype)


def reinmax(log_probs: Tensor, one_hot: Tensor) -> Tensor:
    r"""One-hot samples D of p with ReinMax's gradient, which is exact to second order.

    The value is D. A gradient g in the result is, in log p, :math:`p g / 2 + (g D - g p) D / 2`,
    where products of two vectors are sums over the categories, but for the first one.

    Shapes: ``log_probs`` (\*, K), ``one_hot`` (M, \*, K) or (\*, K), result as ``one_hot``.

    References:
        Liu, Dong, Liu, Yu and Gao, Bridging Discrete and Backpropagation: Straight-Through and
        Beyond, 2023.

    Example:
        >>> reinmax(torch.tensor([0.25, 0.75]).log(), torch.tensor([0.0, 1.0]))
        tensor([0., 1.])
    """
    probs = log_probs.exp()
    chosen = (one_hot * log_probs).sum(-1, keepdim=True)
    change = (probs - probs.detach()) + (one_hot - probs).detach() * (chosen - chosen.detach())
    return one_hot + change / 2  # plus exactly zero: the value stays one-hot
