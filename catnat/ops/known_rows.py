"""Which sparse gradients are known to have ascending rows, each once.

Autograd forgets that a sparse gradient is coalesced when it becomes ``param.grad``, and finding it
out again takes a sort and a copy of the gradient. A gradient is remembered by its memory: while
that is in use, no other tensor has it, and adding up two gradients gives new memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_KNOWN: dict[int, tuple[StorageWeakRef, StorageWeakRef, int]] = {}
_MOST = 64
"""From so many gradients on, those whose memory is no longer in use are forgotten."""


def remember(indices: Tensor, values: Tensor) -> None:
    """Of a sparse gradient with these indices, (1, n), ascending and different, and values."""
    if len(_KNOWN) >= _MOST:  # seldom: looking at them all takes time
        for key in [key for key, known in _KNOWN.items() if known[1].expired()]:
            del _KNOWN[key]
    at, of = StorageWeakRef(indices.untyped_storage()), StorageWeakRef(values.untyped_storage())
    _KNOWN[of.cdata] = at, of, len(values)


def sparse_gradient(rows: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """A gradient of ``like`` with these values in these rows, ascending and different."""
    values, indices = values.to(like.dtype), rows[None]
    remember(indices, values)
    return torch.sparse_coo_tensor(
        indices, values, like.shape, is_coalesced=True, check_invariants=False
    )


def rows_of(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Different rows, (n,), and the values of a sparse gradient there."""
    indices, values = grad._indices(), grad._values()
    known = _KNOWN.get(values.untyped_storage()._cdata)
    if known is not None:
        at, _, n = known
        if at.cdata == indices.untyped_storage()._cdata and n == len(values):
            return indices[0], values
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()
