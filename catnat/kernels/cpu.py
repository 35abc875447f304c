"""The C kernels of ``cpu.c``, called through ctypes: CPU, float32.

They are compiled when the package is installed. Where there is no compiler, or the kernels cannot
be loaded, plain torch takes their place: the same numbers, several times slower.
"""

import ctypes
import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from catnat.activations import Activation, NaturalActivation, kernel_numbers

PARALLEL = 1 << 18
"""Number of scores from which on a C kernel uses as many threads as torch."""
LEVELS = {"AVX512": "_cpu_avx512", "AVX2": "_cpu_avx2", "DEFAULT": "_cpu"}
"""Libraries of the C kernels by what torch calls the processor's instructions, best first."""


class _Activation(ctypes.Structure):
    """The struct ``activation`` of ``cpu.c``: what :func:`kernel_numbers` has, in its order."""

    _fields_ = (
        ("kind", ctypes.c_int),
        *(
            (name, ctypes.c_float)
            for name in ("rate", "high", "low", "joint", "steepness", "at_edge")
        ),
    )


class _Job(ctypes.Structure):
    """The struct ``job`` of ``cpu.c``: what a kernel reads, and where it writes."""

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
    names = list(LEVELS)
    usable = names[names.index(best) :] if best in names else ["DEFAULT"]
    return [level for level in usable if _path(level)]


def load(level: str) -> ctypes.CDLL:
    """The kernels of one of the :func:`levels`."""
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
    """Call a C kernel by the name under which ``cpu.c`` exports it.

    Args:
        name: of the kernel.
        activation: of a tree; None for sparsemax.
        constants: of the nodes of a tree, or None.
        tensors: what the kernel reads and writes, by the names of the fields of its job.
    """
    S = tensors["scores"].shape[-1]
    work = tensors["scores"].numel()
    job = _Job(rows=work // S, categories=S if activation is None else S + 1)
    # Contiguous memory, kept until the kernel returns; a view may be marked as negated.
    tensors = {
        key: x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
        for key, x in tensors.items()
    }
    for key, x in tensors.items():
        setattr(job, key, x.data_ptr())
    if isinstance(activation, NaturalActivation):  # zeros say sigmoid
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
