"""Sparse gradients under ``DistributedDataParallel``."""

import sys

from torch import nn

_ASKING = "torch.nn.parallel.distributed"


def asked_by_data_parallel() -> bool:
    """Whether ``named_modules`` runs for DistributedDataParallel, which looks for sparse modules.

    It expects sparse gradients of an ``nn.Embedding`` alone. Everyone else sees the modules that
    exist: initializers and tools that replace embeddings must not find one in an output layer.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_name == "named_modules" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == _ASKING


def sparse_rows(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Embedding:
    """An embedding of these parameters."""
    rows = nn.Embedding.from_pretrained(weight, sparse=True)
    rows.weight = weight
    rows.register_parameter("bias", bias)
    return rows
