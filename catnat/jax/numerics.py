"""Numerical conventions and helpers of the JAX heads, as in :mod:`catnat.numerics` for torch.

- Every finite score gives finite log-probabilities, probabilities that sum to 1, and finite
  gradients. An impossible category has probability exactly 0, and a finite log-probability.
- Half precision is computed and returned in float32.
- A result that depends on a NaN score is NaN. In a tree an infinite score makes its node certain;
  in softmax and sparsemax a score of -inf is an impossible category.
- Python reads shapes and dtypes, never values: invalid values become NaN, never a wrong number.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

LOG_ZERO = -1000.0
"""Log-probability of an impossible category: finite, and ``exp`` of it is exactly 0."""


def at_least_float32(x: Array) -> Array:
    """``x`` in float32 if its dtype is narrower, and unchanged otherwise."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def largest_score(dtype: Any) -> float:
    """Largest absolute log-probability; sums over 10^6 categories and differences stay finite."""
    return float(jnp.finfo(dtype).max) / 2**24


def log_never(dtype: Any) -> float:
    """Log-probability of an impossible step on a path, below every sum of possible steps.

    The sum along a path stays finite, and :func:`floored_sums` replaces it with :data:`LOG_ZERO`.
    """
    return float(jnp.finfo(dtype).min) / 2**8


def floored_sums(sums: Array) -> Array:
    """Log-probabilities from sums along paths; :data:`LOG_ZERO` where a step was impossible.

    The gradient is that of the sum.
    """
    floor = LOG_ZERO + (sums - jax.lax.stop_gradient(sums))
    return jnp.where(sums < log_never(sums.dtype) / 2, floor, sums)


def safe_log(x: Array) -> Array:
    """``log x`` for ``x >= 0``; at 0 a finite number with zero gradient. NaN stays NaN."""
    zero = x <= 0
    return jnp.where(zero, LOG_ZERO, jnp.log(jnp.where(zero, 1.0, x)))


def uniform(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Uniform numbers in [0, 1), whose small values have the relative accuracy of their dtype.

    ``jax.random.uniform`` draws multiples of eps, so an event of probability 1e-9 would have
    probability 1e-7 in float32. A second draw therefore adds the digits below eps.
    """
    eps = float(jnp.finfo(dtype).eps)
    high, low = jax.random.uniform(key, (2, *shape), dtype)
    return jnp.minimum(high + low * eps, 1 - eps / 2)


@partial(jnp.vectorize, signature="(s),(h)->(h)")
def pick(x: Array, index: Array) -> Array:
    """``x[..., index]`` row by row: x (*, S), index (*, H), batch shapes broadcast, -> (*, H)."""
    return x[index]
