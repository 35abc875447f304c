"""The choice between the implementations, and the calls of the C kernels of ``cpu.c``.

The C kernels are compiled when the package is installed, and called through ctypes. Where there is
no compiler, or the kernels cannot be loaded, plain torch takes their place: the same numbers,
several times slower.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from catnat.activations import Activation, CustomActivation, NaturalActivation
from catnat.kernels import reference
from catnat.numerics import common_shape, is_plain

HAS_TRITON = importlib.util.find_spec("triton") is not None
TREE_TRITON_LIMIT = 32768
"""Largest K of the Triton kernels for trees: a program holds all leaves of a row in registers."""
SPARSEMAX_TRITON_LIMIT = 16384
"""Largest K of the Triton kernels for sparsemax."""
PARALLEL = 1 << 18
"""Number of scores from which on a C kernel uses as many threads as torch."""
LEVELS = {"AVX512": "_cpu_avx512", "AVX2": "_cpu_avx2", "DEFAULT": "_cpu"}
"""Libraries of the C kernels by what torch calls the processor's instructions, best first."""
_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # not known to torch 2.6


def tree_log_probs(
    scores: Tensor, activation: Activation, constants: Tensor | None = None
) -> Tensor:
    """Log-probability of every leaf, (*, K-1) -> (*, K), for float32 or float64 scores.

    Args:
        scores: one score per internal node, (*, K-1), breadth first.
        activation: how a score divides the probability of its node.
        constants: ``activation.node_constants`` of the nodes; None where all centers are 0.
    """
    fused = _tree_kernels(scores, activation)
    if fused is None:
        return reference.tree_log_probs(scores, activation, constants)
    out: Tensor = _TreeLogProbs.apply(scores, None, activation, constants, fused)
    return out


def tree_fisher(
    scores: Tensor, activation: Activation, constants: Tensor | None = None
) -> Tensor | None:
    """Diagonal of the Fisher matrix by the C kernel, (*, K-1) -> (*, K-1), without gradient.

    None where there is no such kernel. Arguments as in :func:`tree_log_probs`.
    """
    if _tree_kernels(scores, activation) != "cpu" or (
        scores.requires_grad and torch.is_grad_enabled()
    ):
        return None
    out = scores.new_empty(scores.shape)
    _launch("cpu", "tree_fisher", activation, constants, scores=scores.detach(), out=out)
    return out


def tree_log_prob(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None = None
) -> Tensor:
    """Log-probability of one leaf per row, by the O(log K) nodes of its path alone.

    (*, K-1) and (*), which broadcast -> (*), for float32 or float64 scores. NaN for a leaf that
    does not exist. Other arguments as in :func:`tree_log_probs`.
    """
    shape = common_shape(leaf.shape, scores.shape[:-1])
    leaf = leaf if leaf.shape == shape else leaf.expand(shape)
    fused = _path_kernels(scores, shape, activation)
    if fused is None:
        return reference.tree_log_prob(scores, leaf, activation, constants)
    flat, leaves = scores.reshape(-1, scores.shape[-1]), leaf.reshape(-1)
    out: Tensor = _TreeLogProbs.apply(flat, leaves, activation, constants, fused)
    return out.view(shape)


def tree_sample(
    scores: Tensor, uniforms: Tensor, activation: Activation, constants: Tensor | None = None
) -> Tensor:
    """One random leaf per row of uniforms, by the O(log K) nodes of its path alone.

    (*, K-1) and (*, H) -> (*) int64, without gradient. -1 where a score on the path is NaN. Other
    arguments as in :func:`tree_log_probs`. The uniforms are float64, independent and uniform in
    [0, 1), one for each of the H = ceil(log2 K) levels, the root's first. Their batch shape is that
    of the result, to which the batch shape of the scores is broadcast.
    """
    scores, shape = scores.detach(), uniforms.shape[:-1]
    fused = _path_kernels(scores, shape, activation)
    if fused is None:
        return reference.tree_sample(scores, uniforms, activation, constants)
    flat, noise = scores.reshape(-1, scores.shape[-1]), uniforms.reshape(-1, uniforms.shape[-1])
    out = uniforms.new_empty(len(noise), dtype=torch.int64)
    tensors = {"scores": flat, "uniforms": noise, "sampled": out}
    _launch(fused, "path_sample", activation, constants, **tensors)
    return out.view(shape)


def sparsemax_log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities of sparsemax, (*, K) -> (*, K); at their floor outside the support."""
    fused = kernels_for(scores, scores.shape[-1], SPARSEMAX_TRITON_LIMIT)
    if fused is None:
        return reference.sparsemax_log_probs(scores)
    out: Tensor = _SparsemaxLogProbs.apply(scores, fused)
    return out


def kernels_for(scores: Tensor, num_categories: int, triton_limit: int) -> str | None:
    """``"triton"``, ``"cpu"`` (the C kernels), or None for plain torch.

    Plain torch is what torch.func, forward-mode derivatives, fake tensors, torch.jit.trace,
    torch.export, both ONNX exporters and other tracers need. ``torch.compile`` knows Triton, and
    turns the rest into kernels of its own.
    """
    if scores.dtype != torch.float32:
        return None
    plain = is_plain(scores)
    if plain and scores.is_cpu:
        return "cpu" if library() is not None else None
    on_gpu = scores.is_cuda and HAS_TRITON and num_categories <= triton_limit
    known = plain or (torch.compiler.is_compiling() and not _is_exporting())
    return "triton" if on_gpu and known else None


def _launch(
    fused: str,
    name: str,
    activation: Activation | None,
    constants: Tensor | None,
    **tensors: Tensor,
) -> None:
    """Call a C kernel or launch a Triton kernel.

    Args:
        fused: ``"cpu"`` or ``"triton"``.
        name: of the kernel.
        activation: of a tree; None for sparsemax.
        constants: of the nodes of a tree, or None.
        tensors: what the kernel reads and, last, where it writes, by the names in :class:`_Job`.
    """
    if fused == "cpu":
        _call(name, activation, constants, tensors)
        return
    from catnat.kernels import triton_heads

    triton_heads.launch(name, activation, constants, *tensors.values())


def _tree_kernels(scores: Tensor, activation: Activation) -> str | None:
    if isinstance(activation, CustomActivation):  # no kernel knows its formula
        return None
    return kernels_for(scores, scores.shape[-1] + 1, TREE_TRITON_LIMIT)


def _path_kernels(scores: Tensor, shape: torch.Size, activation: Activation) -> str | None:
    """Kernels of paths: none for a custom activation.

    Element i of the result belongs to row i % B of the scores, so the batch shape of the scores
    must be the end of the shape of the result. Triton adds up the gradients of several leaves of a
    row in any order, which deterministic algorithms exclude.
    """
    batch = scores.shape[:-1]
    if isinstance(activation, CustomActivation) or batch != shape[len(shape) - len(batch) :]:
        return None
    in_order = torch.are_deterministic_algorithms_enabled() and shape != batch
    return None if in_order and not scores.is_cpu else kernels_for(scores, 0, 0)


def _needs_reference(grad: Tensor) -> bool:
    """Whether a backward pass must itself be plain torch: create_graph, or batched gradients."""
    if is_plain(grad):
        return torch.is_grad_enabled()
    return not torch.compiler.is_compiling()


def _plain_vjp(function: Callable[[Tensor], Tensor], scores: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the scores by way of plain torch, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        return torch.autograd.grad(function(scores), scores, grad, create_graph=again)[0]


class _TreeLogProbs(torch.autograd.Function):
    """Log-probabilities of all leaves, or of given ones, by fused kernels.

    scores (*, K-1) -> (*, K), or scores (B, K-1) and leaves (N B) -> (N B).
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        leaf: Tensor | None,
        activation: Activation,
        constants: Tensor | None,
        fused: str,
    ) -> Tensor:
        ctx.activation, ctx.fused = activation, fused
        ctx.save_for_backward(scores, leaf, constants)
        shape = (*scores.shape[:-1], scores.shape[-1] + 1) if leaf is None else leaf.shape
        out = scores.new_empty(shape)
        name, paths = ("tree", {}) if leaf is None else ("path", {"leaf": leaf})
        _launch(fused, f"{name}_forward", activation, constants, scores=scores, **paths, out=out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        scores, leaf, constants = ctx.saved_tensors
        known, nothing = (ctx.activation, constants), (None, None, None, None)
        if _needs_reference(grad):
            return _plain_vjp(lambda s: _plainly(s, leaf, *known), scores, grad), *nothing
        name, paths = ("tree", {}) if leaf is None else ("path", {"leaf": leaf})
        out = (scores.new_empty if leaf is None else scores.new_zeros)(scores.shape)  # paths add
        tensors = {"scores": scores, **paths, "grad": grad, "out": out}
        _launch(ctx.fused, f"{name}_backward", *known, **tensors)
        return out, *nothing


def _plainly(
    scores: Tensor, leaf: Tensor | None, activation: Activation, constants: Tensor | None
) -> Tensor:
    """What :class:`_TreeLogProbs` computes, in plain torch."""
    if leaf is None:
        return reference.tree_log_probs(scores, activation, constants)
    leaf = leaf.view(len(leaf) // max(1, len(scores)), len(scores))
    return reference.tree_log_prob(scores, leaf, activation, constants).view(-1)


class _SparsemaxLogProbs(torch.autograd.Function):
    """scores (*, K) -> log-probabilities (*, K), by fused kernels."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, fused: str) -> Tensor:
        ctx.fused = fused
        log_probs = scores.new_empty(scores.shape)
        _launch(fused, "sparsemax_forward", None, None, scores=scores, out=log_probs)
        ctx.save_for_backward(log_probs)
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (log_probs,) = ctx.saved_tensors
        if _needs_reference(grad):  # a derivative of log_probs comes back to this method
            return reference.sparsemax_vjp(log_probs, grad), None
        out = grad.new_empty(grad.shape)
        tensors = {"scores": log_probs, "grad": grad, "out": out}
        _launch(ctx.fused, "sparsemax_backward", None, None, **tensors)
        return out, None


# -- the C kernels ---------------------------------------------------------------------------------


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
    if lib.catnat_size_of_job() != ctypes.sizeof(_Job):
        raise OSError(f"{lib._name} was built from another cpu.c")
    return lib


def _path(level: str) -> str | None:
    spec = importlib.util.find_spec(f"catnat.kernels.{LEVELS[level]}")
    return None if spec is None else spec.origin


def _call(
    name: str,
    activation: Activation | None,
    constants: Tensor | None,
    tensors: dict[str, Tensor],
) -> None:
    """Call a C kernel by the name under which ``cpu.c`` exports it; arguments as in _launch."""
    S, work = tensors["scores"].shape[-1], tensors["scores"].numel()
    job = _Job(rows=work // S, categories=S)
    tensors = {key: _plain_memory(x) for key, x in tensors.items()}  # kept until the kernel returns
    for key, x in tensors.items():
        setattr(job, key, x.data_ptr())
    if activation is not None:
        job.categories = S + 1
    if isinstance(activation, NaturalActivation):
        job.activation = _settings(activation)
    if constants is not None:
        job.constants, job.constant_rows = constants.data_ptr(), len(constants)
    paths = tensors.get("leaf", tensors.get("uniforms"))
    if paths is not None:
        job.repeats, work = len(paths) // max(1, job.rows), len(paths) * S.bit_length()
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
