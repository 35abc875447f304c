"""Kernels of the heads.

Of all categories: :func:`tree_log_probs`, :func:`tree_fisher`, :func:`sparsemax_log_probs`; along
one path of a tree, in O(log K): :func:`tree_log_prob`, :func:`tree_sample`. Softmax is torch's own.

Three implementations of each agree to rounding, and ``dispatch.py`` chooses by the scores:

- ``reference.py``, plain torch: any device and dtype, torch.func, torch.compile, differentiable any
  number of times;
- ``cpu.c``, which ``dispatch.py`` calls: CPU, float32, one pass forward and one backward;
- ``triton_heads.py``, which launches the kernels of ``triton_tree.py``, ``triton_path.py`` and
  ``triton_sparsemax.py``: CUDA, float32, one kernel for each pass. It has no Fisher kernel.
"""

from catnat.kernels.dispatch import (
    sparsemax_log_probs,
    tree_fisher,
    tree_log_prob,
    tree_log_probs,
    tree_sample,
)

__all__ = [
    "sparsemax_log_probs",
    "tree_fisher",
    "tree_log_prob",
    "tree_log_probs",
    "tree_sample",
]
