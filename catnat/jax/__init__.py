"""Heads in JAX: stateless objects with the same distributions as in torch.

>>> import jax, jax.numpy as jnp
>>> from catnat.jax import make_head
>>> head = make_head("natural", 5, tail=0.05)
>>> q = head(jnp.zeros(head.num_scores))
>>> [round(float(p), 4) for p in q.probs]
[0.2, 0.2, 0.2, 0.2, 0.2]
>>> int(q.sample(seed=jax.random.key(0))) in range(5)
True

This package needs JAX (``pip install "catnat[jax]"``). It does not import torch, and no other part
of catnat imports it. All functions work under ``jax.jit``, ``jax.vmap`` and ``jax.grad``, in
float32, in bfloat16 (computed in float32) and, if JAX enables it, in float64.
"""

from catnat.jax.distribution import Categorical
from catnat.jax.flat_heads import head_names, make_head
from catnat.jax.head import CategoricalHead
from catnat.jax.tree_linear import TreeLinear

__all__ = [
    "Categorical",
    "CategoricalHead",
    "TreeLinear",
    "head_names",
    "make_head",
]
