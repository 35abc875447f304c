"""Kernels of the heads.

``dispatch.py`` has functions of all categories, ``tree_log_probs``, ``tree_fisher``,
``sparsemax_log_probs`` and ``softmax_log_probs``, and along one path of a tree, in O(log K),
``tree_log_prob`` and ``tree_sample``.

Three implementations of each agree to rounding, and ``dispatch.py`` chooses by the scores:

- ``reference.py``, plain torch: any device and dtype, torch.func, torch.compile, differentiable any
  number of times;
- ``cpu.c``, which ``cpu.py`` calls: CPU, float32, one pass forward and one backward. Softmax is
  torch's own there;
- ``triton_tree.py`` and ``triton_flat.py``: CUDA, float32, one kernel for each pass. There is no
  Fisher kernel.
"""
