"""Several processes (ranks) that train one model: what they send each other in a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class MeanGradients:
    """The gradients of some parameters, averaged over all ranks with one call.

    A step calls :meth:`collect` after its backward pass, then :meth:`reduce`, then :meth:`spread`;
    now every parameter has the mean gradient. The first and the last work on the device alone, and
    can be captured in a CUDA graph. With NCCL the second can be, too. A parameter that the loss of
    one rank alone does not use counts as zero there; one that no rank uses keeps no gradient.

    Args:
        parameters: of one dtype, on one device, the same on all ranks.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._flat: Tensor | None = None  # all gradients, one after the other

    @property
    def can_be_captured(self) -> bool:
        """Whether the call between the ranks, too, can be part of a CUDA graph."""
        return dist.get_backend() == "nccl"

    def collect(self) -> None:
        """Copy the gradients of this rank into one tensor, as its share of the mean."""
        if self._flat is None:
            self._flat = self._allocate()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        torch.cat([part.reshape(-1) for part in parts], out=self._flat)
        self._flat /= dist.get_world_size()

    def reduce(self) -> None:
        """Add up the shares of all ranks."""
        assert self._flat is not None
        dist.all_reduce(self._flat)

    def spread(self) -> None:
        """Make the mean the gradient of each parameter; the next ``collect`` overwrites it."""
        assert self._flat is not None
        parts = self._flat.split([p.numel() for p in self._parameters])
        for p, part in zip(self._parameters, parts, strict=True):
            p.grad = part.view_as(p)

    def _allocate(self) -> Tensor:
        """Room for the parameters that have a gradient on any rank; forgets the others."""
        first = self._parameters[0]
        used = torch.tensor([float(p.grad is not None) for p in self._parameters]).to(first.device)
        dist.all_reduce(used)
        flags = used.tolist()
        self._parameters = [p for p, flag in zip(self._parameters, flags, strict=True) if flag]
        return first.new_empty(sum(p.numel() for p in self._parameters))


def send_buffers(buffers: Iterable[Tensor]) -> None:
    """Give every rank the buffers of rank 0, such as the running means of a batch norm."""
    tensors, group = [buffer.detach() for buffer in buffers], dist.group.WORLD
    assert group is not None
    if tensors:
        dist._broadcast_coalesced(group, tensors, 2**28, 0)  # type: ignore[attr-defined]
