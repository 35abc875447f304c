"""Gradients through one-hot samples: the formulas of :mod:`catnat.estimators` in JAX."""

import jax
import jax.numpy as jnp
from jax import Array

from catnat.checks import require_at_least
from catnat.jax.numerics import LOG_ZERO


def reinmax(log_probs: Array, one_hot: Array) -> Array:
    r"""One-hot samples D of p with ReinMax's gradient, which is exact to second order.

    The gradient g of a loss in the result becomes, in log p,

    .. math:: \tfrac12 \, p \odot g + \tfrac12 \, (g \cdot D - g \cdot p) \, D.

    ZGR (Shekhovtsov, 2023) is the same estimator.

    Args:
        log_probs: normalized log-probabilities, (\*, K).
        one_hot: samples, (M, \*, K) or (\*, K).

    References:
        Liu, Dong, Liu, Yu and Gao, Bridging Discrete and Backpropagation: Straight-Through and
        Beyond, 2023.
    """
    probs = jnp.exp(log_probs)
    fixed = jax.lax.stop_gradient
    chosen = (one_hot * log_probs).sum(-1, keepdims=True)
    change = (probs - fixed(probs)) + fixed(one_hot - probs) * (chosen - fixed(chosen))
    return one_hot + change / 2


def gumbel_rao(
    log_probs: Array,
    one_hot: Array,
    temperature: float | Array,
    num_draws: int = 8,
    *,
    seed: Array,
) -> Array:
    r"""One-hot samples D of p with the mean gradient of M relaxations that agree with each.

    The formula is that of :func:`catnat.estimators.gumbel_rao`. The temperature is not checked.

    Args:
        log_probs: normalized log-probabilities, (\*, K).
        one_hot: samples, (L, \*, K) or (\*, K).
        temperature: temperature of the relaxed samples, > 0.
        num_draws: relaxed samples for each sample (M).
        seed: a key of ``jax.random``.

    References:
        Paulus, Maddison and Krause, Rao-Blackwellizing the Straight-Through Gumbel-Softmax
        Gradient Estimator, 2021.
    """
    require_at_least(1, num_draws=num_draws)
    noise = jax.random.exponential(seed, (num_draws, *one_hot.shape), log_probs.dtype)
    noise = jnp.maximum(noise, jnp.finfo(log_probs.dtype).tiny)  # its logarithm is finite
    drawn = one_hot > 0
    first = jnp.where(drawn, noise, 0).sum(-1, keepdims=True)  # e_D
    fixed = jax.lax.stop_gradient(log_probs)
    # e_k + p_k e_D = p_k (e_k / p_k + e_D) stays in range for the smallest p_k.
    others = jnp.log(noise + jnp.exp(fixed) * first)
    gumbel = -jnp.where(drawn, jnp.log(first) + fixed, others)
    perturbed = jnp.where(log_probs <= LOG_ZERO, -jnp.inf, log_probs + gumbel)
    y = jax.nn.softmax(perturbed / temperature, axis=-1).mean(0)
    return one_hot + (y - jax.lax.stop_gradient(y))
