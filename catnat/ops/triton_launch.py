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
    """A kernel with the arguments that never change. Calling it with the others launches it.

    The binary depends on the device, on the dtypes of the tensors, on whether their addresses are
    multiples of 16, and on the kinds of the numbers. The tensors of a launch have the same dtypes
    at every call. Where an address is no such multiple, where another device is the current one,
    or where a profiler asked Triton to be told of launches, Triton finds the binary as it always
    does.

    Args:
        kernel: takes tensors, then numbers, then constants.
        programs: how many programs run; None where every call says it.
        settings: the last numbers and the constants by their names, in the order of the kernel's
            arguments, and ``num_warps``.
    """

    def __init__(self, kernel: Any, programs: int | None, settings: dict[str, Any]) -> None:
        self.kernel, self.settings = kernel, settings
        self.programs = None if programs is None else (programs,)
        self.values = [value for name, value in settings.items() if name != "num_warps"]
        # by the device and the kinds of the numbers
        self._binaries: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def __call__(
        self,
        *tensors: Tensor,
        numbers: tuple[int | float, ...] = (),
        programs: tuple[int, ...] | None = None,
    ) -> None:
        """Launch the kernel on the current stream of the tensors' device.

        Args:
            tensors: the first arguments of the kernel.
            numbers: the arguments between the tensors and the settings.
            programs: how many programs run, in one or two dimensions.
        """
        programs = programs or self.programs
        assert programs is not None, "neither the launch nor the call says how many programs"
        device = tensors[0].get_device()  # -1 for the CPU, where Triton's interpreter runs
        addresses = [each.data_ptr() for each in tensors]
        usual = device >= 0 and _is_usual(addresses, device)
        key = (device, *map(_kind, numbers)) if numbers else (device,)
        binary = self._binaries.get(key)
        if usual and binary is not None:
            run, function, metadata = binary
            stream = torch._C._cuda_getCurrentRawStream(device)
            grid = (*programs, 1, 1)[:3]
            start = (*grid, stream, function, metadata, None, None, None)
            run(*start, *addresses, *numbers, *self.values)
            return
        with on_device_of(tensors[0]):
            compiled = self.kernel[programs](*tensors, *numbers, **self.settings)
        if usual:
            self._binaries[key] = (compiled.run, compiled.function, compiled.packed_metadata)


def row_settings(rows: int, K: int, most_warps: int) -> tuple[int, dict[str, int]]:
    """Number of programs, and the arguments after the tensors, of a kernel over rows of K numbers.

    A program holds R whole rows, each in the least power of two P >= K.
    """
    P = triton.next_power_of_2(K)
    R = max(1, (1024 if P <= 64 else 512) // P)
    warps = 4 if P <= 64 else min(most_warps, max(1, R * P // 512))
    return triton.cdiv(rows, R), {"rows": rows, "K": K, "R": R, "P": P, "num_warps": warps}


def _kind(number: int | float) -> int:
    """What a binary may depend on: float or integer, and of an integer its size, 1, and 16 | n."""
    if isinstance(number, float):
        return -1
    return 4 * (-(2**31) <= number < 2**31) + 2 * (number == 1) + (number % 16 == 0)


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
