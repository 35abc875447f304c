"""The C kernels of ``cpu.c``, called through ctypes: CPU, float32.

The kernels are compiled when the package is installed. Where there is no compiler, or the kernels
cannot be loaded, plain torch takes their place: the same numbers, several times slower.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import struct
import warnings
from typing import Any

import torch
from torch import Tensor

from catnat.activations import Activation, NaturalActivation

PARALLEL = 1 << 18
"""Number of scores from which on a kernel uses as many threads as torch."""


LEVELS = {"AVX512": "_cpu_avx512", "AVX2": "_cpu_avx2", "DEFAULT": "_cpu"}
"""Libraries of the same kernels by what torch calls the processor's instructions, best first."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built or cannot be loaded."""
    for level in levels():
        try:
            return load(level)
        except (OSError, AttributeError) as error:  # built for another machine, or older
            warnings.warn(
                f"the C kernels cannot be loaded, others take their place: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return None


def levels() -> list[str]:
    """The keys of :data:`LEVELS` that were built and that this processor runs, best first.

    torch's own environment variable ATEN_CPU_CAPABILITY chooses lower ones.
    """
    best = torch.backends.cpu.get_cpu_capability()
    known = list(LEVELS)
    runs = known[known.index(best) :] if best in known else ["DEFAULT"]
    return [level for level in runs if _path(level)]


def load(level: str) -> ctypes.CDLL:
    """The kernels of one of the :func:`levels`."""
    return _declared(ctypes.CDLL(_path(level)))


def _path(level: str) -> str | None:
    spec = importlib.util.find_spec(f"catnat.kernels.{LEVELS[level]}")
    return None if spec is None else spec.origin


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions; AttributeError if one is missing."""
    pointer, long = ctypes.c_void_p, ctypes.c_long
    rest: list[Any] = [long, long, ctypes.c_char_p, ctypes.c_int]
    lib.catnat_tree_forward.argtypes = [pointer, pointer, pointer, *rest]
    lib.catnat_tree_fisher.argtypes = [pointer, pointer, pointer, *rest]
    lib.catnat_tree_backward.argtypes = [pointer, pointer, pointer, pointer, *rest]
    lib.catnat_path_forward.argtypes = [pointer] * 4 + [long, long, *rest]
    lib.catnat_path_backward.argtypes = [pointer] * 5 + [long, long, *rest]
    lib.catnat_path_sample.argtypes = [pointer] * 4 + [long, long, *rest]
    lib.catnat_sparsemax_forward.argtypes = [pointer, pointer, long, long, ctypes.c_int]
    lib.catnat_sparsemax_backward.argtypes = [pointer, pointer, pointer, long, long, ctypes.c_int]
    return lib


def tree_forward(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Log-probabilities of the leaves, (*, K-1) -> (*, K)."""
    return _tree("catnat_tree_forward", scores, 1, activation, constants)


def tree_fisher(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Fisher diagonal and, in the last column, share of flat activations, (*, K-1) -> (*, K)."""
    return _tree("catnat_tree_fisher", scores, 1, activation, constants)


def tree_backward(
    scores: Tensor, grad: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Gradient in the scores, (*, K-1), from that in the log-probabilities, (*, K)."""
    return _tree("catnat_tree_backward", scores, 0, activation, constants, _plain_memory(grad))


def _tree(
    name: str,
    scores: Tensor,
    more: int,
    activation: Activation,
    constants: Tensor | None,
    *given: Tensor,
) -> Tensor:
    """Call a kernel on the scores of trees; a row of its result has ``more`` numbers."""
    scores = _plain_memory(scores)
    *batch, S = scores.shape
    out = scores.new_empty((*batch, S + more))
    pointers = (_pointer(constants), *(each.data_ptr() for each in (*given, out)))
    _call(name, scores, *pointers, scores.numel() // S, S + 1, _settings(activation))
    return out


def tree_path_forward(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Log-probabilities of N leaves a row, (B, K-1) and (N B) -> (N B)."""
    out = scores.new_empty(leaf.shape)
    _path_call("catnat_path_forward", scores, _plain_memory(leaf), (out,), activation, constants)
    return out


def tree_path_backward(
    scores: Tensor, leaf: Tensor, grad: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Gradient in the scores, (B, K-1), from that in the log-probabilities of the leaves, (N B)."""
    out = _zeros(scores.shape)
    tensors = (_plain_memory(grad), out)
    _path_call("catnat_path_backward", scores, _plain_memory(leaf), tensors, activation, constants)
    return out


def tree_sample(
    scores: Tensor, uniforms: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """N random leaves a row, -1 where a score is NaN: (B, K-1) and (N B, H) -> (N B)."""
    out = torch.empty(uniforms.shape[0], dtype=torch.int64)
    _path_call("catnat_path_sample", scores, _plain_memory(uniforms), (out,), activation, constants)
    return out


def _zeros(shape: torch.Size) -> Tensor:
    """Zeros in float32. The system zeroes the pages of large ones when they are first used."""
    if shape.numel() < PARALLEL:
        return torch.zeros(shape)
    pages = mmap.mmap(-1, 4 * shape.numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)


def _path_call(
    name: str,
    scores: Tensor,
    given: Tensor,
    tensors: tuple[Tensor, ...],
    activation: Activation,
    constants: Tensor | None,
) -> None:
    scores = _plain_memory(scores)
    B, S = scores.shape
    pointers = (given.data_ptr(), *(each.data_ptr() for each in tensors))
    repeats = given.shape[0] // max(1, B)
    rows_of_constants = 0 if constants is None else constants.shape[0]
    sizes = (repeats, rows_of_constants, B, S + 1)
    settings = (_pointer(constants), *pointers, *sizes, _settings(activation))
    _call(name, scores, *settings, work=given.shape[0] * S.bit_length())


def sparsemax_forward(scores: Tensor) -> Tensor:
    """Log-probabilities, (*, K) -> (*, K)."""
    scores = _plain_memory(scores)
    out, K = torch.empty_like(scores), scores.shape[-1]
    _call("catnat_sparsemax_forward", scores, out.data_ptr(), scores.numel() // K, K)
    return out


def sparsemax_backward(log_probs: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from that in the log-probabilities, (*, K) -> (*, K)."""
    grad = _plain_memory(grad)
    out, K = torch.empty_like(grad), grad.shape[-1]
    pointers, sizes = (grad.data_ptr(), out.data_ptr()), (grad.numel() // K, K)
    _call("catnat_sparsemax_backward", log_probs, *pointers, *sizes)
    return out


def _settings(activation: Activation) -> bytes:
    """The split as a struct of C: kind, pi/A, A/2 as two floats; joint, steepness, log_at_edge."""
    return _natural_settings(activation) if isinstance(activation, NaturalActivation) else _SIGMOID


_SIGMOID = struct.pack("i6f", 0, *[0.0] * 6)


@functools.cache
def _natural_settings(activation: NaturalActivation) -> bytes:
    kind = 2 if activation.tail else 1
    tail = (activation.joint, activation.steepness, activation.log_at_edge)
    return struct.pack("i6f", kind, activation.rate, *activation.half_width(torch.float32), *tail)


def _plain_memory(x: Tensor) -> Tensor:
    """x in contiguous memory; a view that torch marks as negated is negated first."""
    return x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _call(
    name: str,
    first: Tensor,
    *arguments: int | bytes | None,
    work: int | None = None,
) -> None:
    """Call a kernel with the memory of the scores, other arguments, and a number of threads.

    ``work`` is the number of scores that the kernel looks at, if these are not all of them.
    """
    many = (first.numel() if work is None else work) >= PARALLEL
    threads = torch.get_num_threads() if many else 1
    if getattr(library(), name)(first.data_ptr(), *arguments, threads):
        raise MemoryError(f"out of memory in {name} for scores of shape {tuple(first.shape)}")
