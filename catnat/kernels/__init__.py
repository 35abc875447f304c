"""Kernels of the heads.

``dispatch.py`` has functions over all categories (``tree_log_probs``, ``tree_fisher``,
``sparsemax_log_probs`` and ``softmax_log_probs``) and functions along one path of a tree in
O(log K) (``tree_log_prob`` and ``tree_sample``).

Each has up to three implementations that agree to rounding. ``dispatch.py`` selects one by the
dtype and the device of the scores:

- ``reference.py``, plain torch: any device and dtype, torch.func, torch.compile, differentiable any
  number of times;
- ``cpu.c``, which ``cpu.py`` calls: CPU, float32, one pass forward and one backward; softmax
  uses torch;
- ``triton_tree.py`` and ``triton_flat.py``: CUDA, float32, one kernel for each pass. There is no
  Fisher kernel.
"""
