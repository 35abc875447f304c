"""Launches of Triton kernels that cost the host little.

Triton looks at all arguments of every call, to find the binary that was compiled for them. In a
call of a head that takes the host longer than everything else. A :class:`Launch` asks Triton once,
and afterwards hands its binary the addresses of the tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Older versions of Triton pass other arguments to a binary, and so do other makers' devices.
KEEPS_BINARIES = _VERSION >= (3, 6) and torch.version.hip is None
_ALIGNED = 15  # the bits that are 0 in a multiple of 16


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make the device of x the current one: Triton launches kernels there."""
    here = torch.compiler.is_compiling() or not x.is_cuda  # not CUDA: Triton's interpreter
    if here or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(x)


class Launch:
    """A kernel with all of its arguments but the tensors. Calling it with these launches it.

    The binary depends on the device, on the dtypes of the tensors and on whether their addresses
    are multiples of 16. The tensors of a launch have the same dtypes at every call. Where an
    address is no such multiple, where another device is the current one, or where a profiler asked
    Triton to be told of launches, Triton finds the binary as it always does.

    Args:
        kernel: takes tensors, then numbers, then constants.
        programs: how many programs run.
        settings: the numbers and constants by their names, in the order of the kernel's arguments,
            and ``num_warps``.
    """

    def __init__(self, kernel: Any, programs: int, settings: dict[str, Any]) -> None:
        self.kernel, self.programs, self.settings = kernel, programs, settings
        self.values = [value for name, value in settings.items() if name != "num_warps"]
        self._binaries: dict[int, tuple[Any, Any, Any]] = {}  # by the device

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel on the current stream of the tensors' device."""
        device = tensors[0].get_device()  # -1 for the CPU, where Triton's interpreter runs
        addresses = [each.data_ptr() for each in tensors]
        usual = device >= 0 and _is_usual(addresses, device)
        binary = self._binaries.get(device)
        if usual and binary is not None:
            run, function, metadata = binary
            stream = torch._C._cuda_getCurrentRawStream(device)
            start = (self.programs, 1, 1, stream, function, metadata, None, None, None)
            run(*start, *addresses, *self.values)
            return
        with on_device_of(tensors[0]):
            compiled = self.kernel[(self.programs,)](*tensors, **self.settings)
        if usual:
            self._binaries[device] = (compiled.run, compiled.function, compiled.packed_metadata)


def _is_usual(addresses: list[int], device: int) -> bool:
    """Whether a binary may be kept, and launched when there is one: see :class:`Launch`."""
    bits = 0
    for address in addresses:
        bits |= address
    return (
        KEEPS_BINARIES
        and not bits & _ALIGNED
        and device == torch._C._cuda_getDevice()
        and not _has_hooks()
    )


def _has_hooks() -> bool:
    """Whether a profiler, such as Proton, asked Triton to be told of every launch."""
    runtime = triton.knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))
