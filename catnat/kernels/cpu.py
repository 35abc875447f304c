"""The C kernels of ``cpu.c``, called through ctypes: CPU, float32.

The kernels are compiled when the package is installed. Where there is no compiler, or the kernels
cannot be loaded, plain torch takes their place: the same numbers, several times slower.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from catnat.activations import Activation, NaturalActivation

PARALLEL = 1 << 18
"""Number of scores from which on a kernel uses as many threads as torch."""
LEVELS = {"AVX512": "_cpu_avx512", "AVX2": "_cpu_avx2", "DEFAULT": "_cpu"}
"""Libraries of the same kernels by what torch calls the processor's instructions, best first."""


class _Activation(ctypes.Structure):
    """The struct ``activation`` of ``cpu.c``."""

    _fields_ = (
        ("kind", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("rate", "high", "low")),
        *((name, ctypes.c_float) for name in ("joint", "steepness", "at_edge")),
    )


class _Job(ctypes.Structure):
    """The struct ``job`` of ``cpu.c``: what a kernel reads, and where it writes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "grad", "constants")),
        *((name, ctypes.c_void_p) for name in ("leaf", "uniforms", "out", "sampled")),
        *((name, ctypes.c_long) for name in ("rows", "categories", "repeats", "constant_rows")),
        ("activation", _Activation),
        ("failed", ctypes.c_int),
    )


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
    lib = ctypes.CDLL(_path(level))
    if lib.catnat_job_size() != ctypes.sizeof(_Job):
        raise OSError(f"{lib._name} was built from another cpu.c")
    return lib


def _path(level: str) -> str | None:
    spec = importlib.util.find_spec(f"catnat.kernels.{LEVELS[level]}")
    return None if spec is None else spec.origin


def tree_forward(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Log-probabilities of the leaves, (*, K-1) -> (*, K)."""
    out = scores.new_empty((*scores.shape[:-1], scores.shape[-1] + 1))
    _run("tree_forward", activation, constants, scores=scores, out=out)
    return out


def tree_fisher(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Fisher diagonal, (*, K-1) -> (*, K-1)."""
    out = scores.new_empty(scores.shape)
    _run("tree_fisher", activation, constants, scores=scores, out=out)
    return out


def tree_backward(
    scores: Tensor, grad: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Gradient in the scores, (*, K-1), from that in the log-probabilities, (*, K)."""
    out = scores.new_empty(scores.shape)
    _run("tree_backward", activation, constants, scores=scores, grad=grad, out=out)
    return out


def path_forward(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Log-probabilities of N leaves a row, (B, K-1) and (N B) -> (N B)."""
    out = scores.new_empty(leaf.shape)
    _run("path_forward", activation, constants, len(leaf), scores=scores, leaf=leaf, out=out)
    return out


def path_backward(
    scores: Tensor, leaf: Tensor, grad: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Gradient in the scores, (B, K-1), from that in the log-probabilities of the leaves, (N B)."""
    out = scores.new_zeros(scores.shape)
    tensors = {"scores": scores, "leaf": leaf, "grad": grad, "out": out}
    _run("path_backward", activation, constants, len(leaf), **tensors)
    return out


def path_sample(
    scores: Tensor, uniforms: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """N random leaves a row, -1 where a score is NaN: (B, K-1) and (N B, H) -> (N B)."""
    out = torch.empty(len(uniforms), dtype=torch.int64)
    tensors = {"scores": scores, "uniforms": uniforms, "sampled": out}
    _run("path_sample", activation, constants, len(uniforms), **tensors)
    return out


def sparsemax_forward(scores: Tensor) -> Tensor:
    """Log-probabilities, (*, K) -> (*, K)."""
    out = scores.new_empty(scores.shape)
    _run("sparsemax_forward", scores=scores, out=out)
    return out


def sparsemax_backward(log_probs: Tensor, grad: Tensor) -> Tensor:
    """Gradient in the scores from that in the log-probabilities, (*, K) -> (*, K)."""
    out = grad.new_empty(grad.shape)
    _run("sparsemax_backward", scores=log_probs, grad=grad, out=out)
    return out


def _run(
    name: str,
    activation: Activation | None = None,
    constants: Tensor | None = None,
    paths: int | None = None,
    **tensors: Tensor,
) -> None:
    """Call a kernel.

    Args:
        name: of the kernel, as ``cpu.c`` exports it.
        activation: of a tree; None for sparsemax.
        constants: of the nodes of a tree, or None.
        paths: number of paths, for a kernel of paths.
        tensors: by their names in :class:`_Job`.
    """
    S, work = tensors["scores"].shape[-1], tensors["scores"].numel()
    job = _Job(rows=work // S, categories=S)
    for key, x in tensors.items():
        tensors[key] = plain = _plain_memory(x)  # kept until the kernel has returned
        setattr(job, key, plain.data_ptr())
    if activation is not None:
        job.categories = S + 1
    if isinstance(activation, NaturalActivation):
        job.activation = _settings(activation)
    if constants is not None:
        job.constants, job.constant_rows = constants.data_ptr(), len(constants)
    if paths is not None:
        job.repeats, work = paths // max(1, job.rows), paths * S.bit_length()
    threads = torch.get_num_threads() if work >= PARALLEL else 1
    if getattr(library(), f"catnat_{name}")(ctypes.byref(job), threads):
        shape = tuple(tensors["scores"].shape)
        raise MemoryError(f"out of memory in {name} for scores of shape {shape}")


@functools.cache
def _settings(activation: NaturalActivation) -> _Activation:
    tail = (activation.joint, activation.steepness, activation.log_at_edge)
    kind = 2 if activation.tail else 1
    return _Activation(kind, activation.rate, *activation.half_width(torch.float32), *tail)


def _plain_memory(x: Tensor) -> Tensor:
    """x in contiguous memory; a view that torch marks as negated is negated first."""
    return x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
