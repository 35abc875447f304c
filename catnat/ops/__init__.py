"""Kernels of the heads: :func:`tree_log_probs`, :func:`tree_fisher`, :func:`sparsemax_log_probs`.

Three implementations of each agree to rounding, and ``dispatch.py`` chooses by the scores:

- ``reference.py``, plain torch: any device and dtype, torch.func, torch.compile, differentiable any
  number of times;
- ``native.py``, the C kernels of ``_native.c``: CPU, float32, one pass forward and one backward;
- ``triton_tree.py`` with ``triton_splits.py``, and ``triton_sparsemax.py``: CUDA, float32, one
  kernel for each pass.
"""

from catnat.ops.dispatch import sparsemax_log_probs, tree_fisher, tree_log_probs

__all__ = ["sparsemax_log_probs", "tree_fisher", "tree_log_probs"]
