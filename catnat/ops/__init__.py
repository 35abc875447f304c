"""Kernels of the heads.

Of all categories: :func:`tree_log_probs`, :func:`tree_fisher`, :func:`sparsemax_log_probs`,
:func:`softmax_log_probs`; along one path of a tree, in O(log K): :func:`tree_log_prob`,
:func:`tree_sample`. Gradients at random categories, on a CPU alone: :func:`tree_gradients_at`,
:func:`softmax_gradients_at`, :func:`sparsemax_gradients_at`; what a monitor needs, there in one
pass: :func:`tree_observe`, :func:`flat_observe`.

Three implementations of each agree to rounding, and ``dispatch.py`` chooses by the scores:

- ``reference.py``, plain torch: any device and dtype, torch.func, torch.compile, differentiable any
  number of times;
- ``native.py``, the C kernels of ``_native.c``: CPU, float32, one pass forward and one backward;
  softmax has none, because torch's own kernels are as fast;
- ``triton_tree.py``, ``triton_path.py`` with ``triton_splits.py``, ``triton_sparsemax.py`` and
  ``triton_softmax.py``: CUDA, float32, one kernel for each pass. ``triton_launch.py`` launches
  them.
"""

from catnat.ops.dispatch import (
    flat_observe,
    softmax_gradients_at,
    softmax_log_probs,
    sparsemax_gradients_at,
    sparsemax_log_probs,
    tree_fisher,
    tree_gradients_at,
    tree_log_prob,
    tree_log_probs,
    tree_observe,
    tree_sample,
)

__all__ = [
    "flat_observe",
    "softmax_gradients_at",
    "softmax_log_probs",
    "sparsemax_gradients_at",
    "sparsemax_log_probs",
    "tree_fisher",
    "tree_gradients_at",
    "tree_log_prob",
    "tree_log_probs",
    "tree_observe",
    "tree_sample",
]
