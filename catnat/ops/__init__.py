"""Fast paths behind :func:`tree_log_probs`, :func:`tree_fisher` and :func:`sparsemax_log_probs`.

Three implementations of each agree to rounding and are chosen by where the scores live:

- plain torch, the reference: any device and dtype, torch.func, torch.compile, differentiable any
  number of times;
- C, in ``_native.c``: CPU, float32, one pass forward and one backward;
- Triton: CUDA, float32, one kernel forward and one backward.
"""

from catnat.ops.sparsemax_reference import sparsemax_log_probs
from catnat.ops.tree_reference import tree_fisher, tree_log_probs

__all__ = ["sparsemax_log_probs", "tree_fisher", "tree_log_probs"]
