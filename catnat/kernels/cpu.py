"""The C kernels of ``cpu.c``, called through ctypes: CPU, float32.

The installation compiles them. Without a compiler, or if the kernels cannot be loaded, catnat falls
back to plain torch, which gives the same numbers several times slower.
"""

import ctypes
import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from catnat.heads.activations import Activation, NaturalActivation, kernel_numbers

PARALLEL = 1 << 18
"""Smallest number of scores for which a C kernel uses as many threads as torch."""
LEVELS = {"AVX512": "_cpu_avx512", "AVX2": "_cpu_avx2", "DEFAULT": "_cpu"}
"""Libraries of the C kernels by torch's name of the instruction set, best first."""


class _Activation(ctypes.Structure):
    """The struct ``activation`` of ``cpu.c``: the :func:`kernel_numbers` in their order."""

    _fields_ = (
        ("kind", ctypes.c_int),
        *(
            (name, ctypes.c_float)
            for name in ("rate", "high", "low", "joint", "steepness", "at_edge")
        ),
    )


class _Job(ctypes.Structure):
    """The struct ``job`` of ``cpu.c``: inputs and outputs of a kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("scores", "grad", "constants", "leaf", "uniforms", "out", "sampled")
        ),
        *((name, ctypes.c_long) for name in ("rows", "categories", "repeats", "constant_rows")),
        ("activation", _Activation),
        ("failed", ctypes.c_int),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Compiled kernels, or None if unavailable."""
    for level in levels():
        try:
            return load(level)
        except (
            OSError,
            AttributeError,
        ) as error:  # built for another machine or from another cpu.c
            warnings.warn(
                f"the C kernels cannot be loaded, falling back to PyTorch: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return None


def levels() -> list[str]:
    """Keys of :data:`LEVELS` that were built and that this processor supports, best first.

    torch's environment variable ATEN_CPU_CAPABILITY selects lower ones.
    """
    best = torch.backends.cpu.get_cpu_capability()
    names = list(LEVELS)
    usable = names[names.index(best) :] if best in names else ["DEFAULT"]
    return [level for level in usable if _path(level)]


def load(level: str) -> ctypes.CDLL:
    """Kernels of one of the :func:`levels`."""
    lib = ctypes.CDLL(_path(level))
    if lib.catnat_size_of_job() != ctypes.sizeof(_Job):
        raise OSError(f"{lib._name} was built from another cpu.c")
    return lib


def _path(level: str) -> str | None:
    spec = importlib.util.find_spec(f"catnat.kernels.{LEVELS[level]}")
    return getattr(spec, "origin", None)


def call(
    name: str,
    activation: Activation | None,
    constants: Tensor | None,
    tensors: dict[str, Tensor],
) -> None:
    """Call a C kernel.

    Args:
        name: name of the kernel in ``cpu.c``, without ``catnat_``.
        activation: activation of a tree; None for sparsemax.
        constants: constants of the nodes of a tree, or None.
        tensors: inputs and outputs of the kernel, by the field names of its job.
    """
    S = tensors["scores"].shape[-1]
    work = tensors["scores"].numel()
    job = _Job(rows=work // S, categories=S if activation is None else S + 1)
    # The contiguous copies must live until the kernel returns. A view may be lazily negated.
    tensors = {
        key: x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
        for key, x in tensors.items()
    }
    for key, x in tensors.items():
        setattr(job, key, x.data_ptr())
    if isinstance(activation, NaturalActivation):  # zeros mean sigmoid
        job.activation = _settings(activation)
    if constants is not None:
        job.constants = constants.data_ptr()
        job.constant_rows = len(constants)
    paths = tensors.get("leaf", tensors.get("uniforms"))
    if paths is not None:
        job.repeats = len(paths) // max(1, job.rows)
        work = len(paths) * S.bit_length()
    threads = torch.get_num_threads() if work >= PARALLEL else 1
    if getattr(library(), f"catnat_{name}")(ctypes.byref(job), threads):
        shape = tuple(tensors["scores"].shape)
        raise MemoryError(f"out of memory in {name} for scores of shape {shape}")


@functools.cache
def _settings(activation: NaturalActivation) -> _Activation:
    return _Activation(*kernel_numbers(activation).values())
