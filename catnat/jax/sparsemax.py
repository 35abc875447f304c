"""Sparsemax: the projection of scores onto the simplex (Martins and Astudillo, 2016).

p_k = max(s_k - tau, 0), with tau such that the p_k sum to 1. A small p_k is a difference of numbers
near 1. JAX has no float64 unless it is asked for, so numbers are held as sums of two floats here:
a probability just above 0 then keeps its relative accuracy in float32 too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

Double = tuple[Array, Array]  # high and low part of a number
_UPPER_HALF = {4: (jnp.uint32, 0xFFFFF000), 8: (jnp.uint64, 0xFFFFFFFFF8000000)}


@jax.custom_jvp
def sparsemax_probs(scores: Array) -> Array:
    """p_k = max(s_k - tau, 0), (*, K) -> (*, K), exactly 0 outside the support."""
    out: Array = _projection(scores)
    return out


@sparsemax_probs.defjvp
def _sparsemax_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """On the support a tangent minus its mean, 0 elsewhere."""
    p, tangent = sparsemax_probs(*primals), tangents[0]
    support = ~(p <= 0)
    n = support.sum(-1, keepdims=True).astype(p.dtype)
    mean = jnp.where(support, tangent, 0.0).sum(-1, keepdims=True) / n
    return p, jnp.where(support, tangent - mean + 0 * p, 0.0)  # NaN stays NaN


@jax.jit
def _projection(scores: Array) -> Array:
    """The probabilities by Michelot's algorithm.

    A set of categories gives a tau, and the categories above this tau are the next set. The sets
    shrink until the last one is the support.
    """
    z = _below_largest(scores)
    start = z[0] > -1  # the largest z is 0, and tau at least -1

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        support, _, _ = state
        excess = _excess(z, support)
        smaller = support & (excess > 0)
        return smaller, excess, (smaller != support).any()

    state = (start, jnp.zeros_like(scores), jnp.asarray(True))
    support, excess, _ = jax.lax.while_loop(lambda state: state[2], step, state)
    broken = jnp.isnan(z[0]).any(-1, keepdims=True)
    return jnp.where(broken, jnp.nan, jnp.where(support, excess, 0.0))


def _below_largest(scores: Array) -> Double:
    """s - max(s) without rounding, at least -2: lower ones never matter."""
    top = scores.max(-1, keepdims=True)
    high, low = _add(scores, -top)
    lowest = high < -2
    return jnp.where(lowest, -2.0, high), jnp.where(lowest, 0.0, low)


def _excess(z: Double, support: Array) -> Array:
    """z - tau, with the tau at which the z of the support would sum to 1."""
    n = support.sum(-1, keepdims=True).astype(z[0].dtype)
    high, low = _sum((jnp.where(support, z[0], 0.0), jnp.where(support, z[1], 0.0)))
    tau = _divide(_add(high, jnp.full_like(high, -1.0)), low, jnp.maximum(n, 1))
    return (z[0] - tau[0]) + (z[1] - tau[1])


def _add(a: Array, b: Array) -> Double:
    """a + b, and the rounding error of the sum (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _sum(x: Double) -> Double:
    """Sum over the last dimension, which is kept, by halves."""
    high, low = x
    while (size := high.shape[-1]) > 1:
        half = size // 2
        first, second = slice(0, half), slice(half, 2 * half)
        total, error = _add(high[..., first], high[..., second])
        total, error = _add(total, error + (low[..., first] + low[..., second]))
        rest = slice(2 * half, size)
        high = jnp.concatenate((total, high[..., rest]), -1)
        low = jnp.concatenate((error, low[..., rest]), -1)
    return high, low


def _divide(x: Double, rest: Array, n: Array) -> Double:
    """(x + rest) / n."""
    quotient = x[0] / n
    product, error = _multiply(quotient, n)
    return quotient, (((x[0] - product) - error) + (x[1] + rest)) / n


def _multiply(a: Array, b: Array) -> Double:
    """a b, and the rounding error of the product (Dekker)."""
    product = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(x: Array) -> Double:
    """x as a sum of two numbers of half its digits, whose products have no rounding error."""
    integers, mask = _UPPER_HALF[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, integers)
    upper = jax.lax.bitcast_convert_type(bits & integers(mask), x.dtype)
    return upper, x - upper
