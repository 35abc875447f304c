"""Checksums of TensorBoard's event files by a C kernel.

TensorBoard computes a checksum of every record byte by byte in Python, which takes as long as a
replayed training step. The checksum of the kernel is the same number.
"""

from __future__ import annotations

import ctypes
import functools

from catnat.ops import native


def masked_crc32c(data: bytes) -> int:
    """CRC-32C of some bytes, rotated and shifted as event files want it. Needs the C kernels."""
    crc: int = _kernel()(data, len(data))  # type: ignore[misc]
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def has_kernel() -> bool:
    """Whether :func:`masked_crc32c` can be called."""
    return _kernel() is not None


@functools.cache
def _kernel() -> ctypes._NamedFuncPointer | None:
    library = native.library()
    if library is None or not hasattr(library, "catnat_crc32c"):
        return None
    kernel = library.catnat_crc32c
    kernel.argtypes, kernel.restype = [ctypes.c_char_p, ctypes.c_long], ctypes.c_uint32
    return kernel
