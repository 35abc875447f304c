"""Kernels of the heads.

``dispatch.py`` has functions of all categories, ``tree_log_probs``, ``tree_fisher`` and
``sparsemax_log_probs``, and along one path of a tree, in O(log K), ``tree_log_prob`` and
``tree_sample``. Softmax is torch's own.

Three implementations of each agree to rounding, and ``dispatch.py`` chooses by the scores:

- ``reference.py``, plain torch: any device and dtype, torch.func, torch.compile, differentiable any
  number of times;
- ``cpu.c``, which ``dispatch.py`` calls: CPU, float32, one pass forward and one backward;
- ``triton_heads.py``, which launches the kernels of ``triton_tree.py``, ``triton_path.py`` and
  ``triton_sparsemax.py``: CUDA, float32, one kernel for each pass. It has no Fisher kernel.
"""
