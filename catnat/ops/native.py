"""The C kernels of ``_native.c``, called through ctypes: CPU, float32.

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

from catnat.splits import NaturalSplit, Split

PARALLEL = 1 << 18
"""Number of scores from which on a kernel uses as many threads as torch."""


WIDEST = 64
"""Most categories for which :func:`flat_observe` was written: more are a matrix product's work."""

LEVELS = {"AVX512": "_native_avx512", "AVX2": "_native_avx2", "DEFAULT": "_native"}
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
    spec = importlib.util.find_spec(f"catnat.ops.{LEVELS[level]}")
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
    lib.catnat_path_gradients.argtypes = [pointer] * 4 + [long, long, *rest]
    lib.catnat_tree_observe.argtypes = [pointer] * 5 + [long, long, long, *rest]
    lib.catnat_flat_observe.argtypes = [pointer] * 4 + [ctypes.c_int] + [long] * 4 + [ctypes.c_int]
    lib.catnat_softmax_gradients.argtypes = [pointer] * 3 + [long, long, long, ctypes.c_int]
    lib.catnat_sparsemax_gradients.argtypes = [pointer] * 3 + [long, long, long, ctypes.c_int]
    lib.catnat_sparsemax_forward.argtypes = [pointer, pointer, long, long, ctypes.c_int]
    lib.catnat_sparsemax_backward.argtypes = [pointer, pointer, pointer, long, long, ctypes.c_int]
    return lib


def tree_forward(scores: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Log-probabilities of the leaves, (*, K-1) -> (*, K)."""
    return _from_scores("catnat_tree_forward", scores, split, constants)


def tree_fisher(scores: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Fisher diagonal and, in the last column, share of flat splits, (*, K-1) -> (*, K)."""
    return _from_scores("catnat_tree_fisher", scores, split, constants)


def _from_scores(name: str, scores: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    scores = _plain_memory(scores)
    *batch, S = scores.shape
    out = scores.new_empty((*batch, S + 1))
    pointers, sizes = (_pointer(constants), out.data_ptr()), (scores.numel() // S, S + 1)
    _call(name, scores, *pointers, *sizes, _settings(split))
    return out


def tree_backward(scores: Tensor, grad: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """Gradient in the scores, (*, K-1), from that in the log-probabilities, (*, K)."""
    scores, grad = _plain_memory(scores), _plain_memory(grad)
    out, S = torch.empty_like(scores), scores.shape[-1]
    pointers = (_pointer(constants), grad.data_ptr(), out.data_ptr())
    sizes = (scores.numel() // S, S + 1)
    _call("catnat_tree_backward", scores, *pointers, *sizes, _settings(split))
    return out


def tree_path_forward(
    scores: Tensor, leaf: Tensor, split: Split, constants: Tensor | None
) -> Tensor:
    """Log-probabilities of N leaves a row, (B, K-1) and (N B) -> (N B)."""
    out = scores.new_empty(leaf.shape)
    _path_call("catnat_path_forward", scores, _plain_memory(leaf), (out,), split, constants)
    return out


def tree_path_backward(
    scores: Tensor, leaf: Tensor, grad: Tensor, split: Split, constants: Tensor | None
) -> Tensor:
    """Gradient in the scores, (B, K-1), from that in the log-probabilities of the leaves, (N B)."""
    out = _zeros(scores.shape)
    tensors = (_plain_memory(grad), out)
    _path_call("catnat_path_backward", scores, _plain_memory(leaf), tensors, split, constants)
    return out


def tree_sample(scores: Tensor, uniforms: Tensor, split: Split, constants: Tensor | None) -> Tensor:
    """N random leaves a row, -1 where a score is NaN: (B, K-1) and (N B, H) -> (N B)."""
    out = torch.empty(uniforms.shape[0], dtype=torch.int64)
    _path_call("catnat_path_sample", scores, _plain_memory(uniforms), (out,), split, constants)
    return out


def tree_gradients(
    scores: Tensor, levels: Tensor, split: Split, constants: Tensor | None
) -> Tensor:
    """Gradients of the log-probabilities of N leaves a row, (B, K-1) and (N B) -> (N B, K-1)."""
    out = scores.new_empty(len(levels), scores.shape[1])
    _path_call("catnat_path_gradients", scores, _plain_memory(levels), (out,), split, constants)
    return out


def tree_observe(
    scores: Tensor, levels: Tensor, split: Split, constants: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Mean :func:`tree_fisher` and two mean products of :func:`tree_gradients` of each step.

    (T, B, K-1) and (M, T, B) -> (T, K) and (2, T, K-1, K-1); the first product has M // 2 draws.
    """
    scores, levels = _plain_memory(scores), _plain_memory(levels)
    T, B, S = scores.shape
    out, products = scores.new_empty(T, S + 1), scores.new_empty(2, T, S, S)
    pointers = (_pointer(constants), *(each.data_ptr() for each in (levels, out, products)))
    rows_of_constants = 0 if constants is None else constants.shape[0]
    sizes = (len(levels), rows_of_constants, B, T, S + 1)
    settings = (*pointers, *sizes, _settings(split))
    _call("catnat_tree_observe", scores, *settings, work=0)  # one thread: torch's are still awake
    return out, products


def flat_observe(scores: Tensor, levels: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
    """Mean Fisher matrix and two mean products of gradients of each step, without a tree.

    Of sparsemax, or of softmax, for at most :data:`WIDEST` categories: (T, B, K) and (M, T, B) ->
    (T, K^2 + 1), the last column the share of saturated scores, and (2, T, K, K).
    """
    scores, levels = _plain_memory(scores), _plain_memory(levels)
    T, B, K = scores.shape
    out, products = scores.new_empty(T, K * K + 1), scores.new_empty(2, T, K, K)
    pointers = (each.data_ptr() for each in (levels, out, products))
    settings = (*pointers, int(sparse), len(levels), B, T, K)
    _call("catnat_flat_observe", scores, *settings, work=0)
    return out, products


def softmax_gradients(scores: Tensor, levels: Tensor) -> Tensor:
    """Gradients of the log-probabilities of N categories a row, (B, K) and (N B) -> (N B, K)."""
    return _gradients("catnat_softmax_gradients", scores, levels)


def sparsemax_gradients(scores: Tensor, levels: Tensor) -> Tensor:
    """Gradients of the log-probabilities of N categories a row, (B, K) and (N B) -> (N B, K)."""
    return _gradients("catnat_sparsemax_gradients", scores, levels)


def _gradients(name: str, scores: Tensor, levels: Tensor) -> Tensor:
    scores, levels = _plain_memory(scores), _plain_memory(levels)
    B, K = scores.shape
    out = scores.new_empty(len(levels), K)
    pointers, sizes = (levels.data_ptr(), out.data_ptr()), (len(levels) // max(1, B), B, K)
    _call(name, scores, *pointers, *sizes, work=out.numel())
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
    split: Split,
    constants: Tensor | None,
) -> None:
    scores = _plain_memory(scores)
    B, S = scores.shape
    pointers = (given.data_ptr(), *(each.data_ptr() for each in tensors))
    repeats = given.shape[0] // max(1, B)
    rows_of_constants = 0 if constants is None else constants.shape[0]
    sizes = (repeats, rows_of_constants, B, S + 1)
    settings = (_pointer(constants), *pointers, *sizes, _settings(split))
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


def _settings(split: Split) -> bytes:
    """The split as a struct of C: kind, pi/A, A/2 as two floats; joint, steepness, log_at_edge."""
    return _natural_settings(split) if isinstance(split, NaturalSplit) else _SIGMOID


_SIGMOID = struct.pack("i6f", 0, *[0.0] * 6)


@functools.cache
def _natural_settings(split: NaturalSplit) -> bytes:
    kind = 2 if split.tail else 1
    tail = (split.joint, split.steepness, split.log_at_edge)
    return struct.pack("i6f", kind, split.rate, *split.half_width(torch.float32), *tail)


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
