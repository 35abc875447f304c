"""Selection of an implementation: plain torch, C kernels or Triton kernels.

The kernels are called from an ``autograd.Function``. ``torch.library.custom_op`` would take two to
three times as long for small batches on the CPU, and forward-over-reverse derivatives would fail.
"""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from catnat.heads.activations import Activation
from catnat.kernels import cpu, reference
from catnat.numerics import common_shape, is_plain

# Before Triton 3.4, which comes with torch 2.8, a tuple in a kernel cannot contain None.
HAS_TRITON = importlib.util.find_spec("triton") is not None and torch.__version__ >= "2.8"
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the Triton kernels of output layers and of RowAdam take."""
TREE_TRITON_LIMIT = 32768
"""Largest K of the Triton kernels for trees: a program holds all leaves of a row in registers."""
SPARSEMAX_TRITON_LIMIT = 16384
"""Largest K of the Triton kernels for sparsemax."""
SOFTMAX_TRITON_LIMIT = 32768
"""Largest K of the Triton kernels for softmax."""
_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # missing in torch 2.6


def tree_log_probs(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor:
    """Log-probability of every leaf, (*, K-1) -> (*, K), for float32 or float64 scores.

    Args:
        scores: one score per internal node, (*, K-1), breadth first.
        activation: how a score divides the probability of its node.
        constants: ``activation.node_constants`` of the nodes; None where all centers are 0.
    """
    fused = _tree_kernels(scores, activation)
    if fused is None:
        return reference.tree_log_probs(scores, activation, constants)
    return _LogProbs.apply("tree", scores, None, activation, constants, fused)


def tree_fisher(scores: Tensor, activation: Activation, constants: Tensor | None) -> Tensor | None:
    """Diagonal of the Fisher matrix by the C kernel, (*, K-1) -> (*, K-1), without gradient.

    None if there is no such kernel. Arguments are those of :func:`tree_log_probs`.
    """
    if _tree_kernels(scores, activation) != "cpu" or (
        scores.requires_grad and torch.is_grad_enabled()
    ):
        return None
    out = scores.new_empty(scores.shape)
    _launch("cpu", "tree_fisher", activation, constants, scores=scores.detach(), out=out)
    return out


def tree_log_prob(
    scores: Tensor, leaf: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """Log-probability of one leaf per row, from the O(log K) nodes of its path.

    (*, K-1) and (*), which broadcast -> (*), for float32 or float64 scores. The result is NaN for
    an invalid leaf. The other arguments are those of :func:`tree_log_probs`.
    """
    shape = common_shape(leaf.shape, scores.shape[:-1])
    leaf = leaf if leaf.shape == shape else leaf.expand(shape)
    fused = _path_kernels(scores, shape, activation)
    if fused is None:
        return reference.tree_log_prob(scores, leaf, activation, constants)
    flat = scores.reshape(-1, scores.shape[-1])
    return _LogProbs.apply("path", flat, leaf.reshape(-1), activation, constants, fused).view(shape)


def tree_sample(
    scores: Tensor, uniforms: Tensor, activation: Activation, constants: Tensor | None
) -> Tensor:
    """One random leaf per row of uniforms, from the O(log K) nodes of its path.

    (*, K-1) and (*, H) -> (*) int64, without gradient. The leaf is -1 if a score on the path is
    NaN. The other arguments are those of :func:`tree_log_probs`. The uniforms are float64,
    independent and uniform in [0, 1), one for each of the H = ceil(log2 K) levels, the root's
    first. The batch shape of the scores broadcasts to that of the uniforms.
    """
    scores = scores.detach()
    shape = uniforms.shape[:-1]
    fused = _path_kernels(scores, shape, activation)
    if fused is None:
        return reference.tree_sample(scores, uniforms, activation, constants)
    flat = scores.reshape(-1, scores.shape[-1])
    noise = uniforms.reshape(-1, uniforms.shape[-1])
    out = uniforms.new_empty(len(noise), dtype=torch.int64)
    _launch(fused, "path_sample", activation, constants, scores=flat, uniforms=noise, sampled=out)
    return out.view(shape)


def sparsemax_log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities of sparsemax, (*, K) -> (*, K); at their floor outside the support."""
    fused = kernels_for(scores, SPARSEMAX_TRITON_LIMIT)
    if fused is None:
        return reference.sparsemax_log_probs(scores)
    return _LogProbs.apply("sparsemax", scores, None, None, None, fused)


def softmax_log_probs(scores: Tensor) -> Tensor:
    """Log-probabilities of softmax, (*, K) -> (*, K); those at the floor get no gradient.

    On the CPU torch's own kernels are the fastest, and torch.compile makes one kernel of
    log_softmax and the floor.
    """
    fused = kernels_for(scores, SOFTMAX_TRITON_LIMIT)
    if fused != "triton" or torch.compiler.is_compiling():
        return reference.softmax_log_probs(scores)
    return _LogProbs.apply("softmax", scores, None, None, None, fused)


def kernels_for(scores: Tensor, triton_limit: int) -> str | None:
    """``"triton"`` up to ``triton_limit`` scores, ``"cpu"`` for C kernels, None for plain torch.

    torch.func, forward-mode derivatives, fake tensors, torch.jit.trace, torch.export, both ONNX
    exporters and other tracers need plain torch. ``torch.compile`` supports Triton, and compiles
    plain torch.
    """
    if scores.dtype != torch.float32:
        return None
    plain = is_plain(scores)
    if plain and scores.is_cpu:
        return "cpu" if cpu.library() is not None else None
    on_gpu = scores.is_cuda and HAS_TRITON and scores.shape[-1] <= triton_limit
    traceable = plain or (torch.compiler.is_compiling() and not _is_exporting())
    return "triton" if on_gpu and traceable else None


def fit_triton(*tensors: Tensor) -> bool:
    """Whether the Triton kernels of output layers and of RowAdam can read and write these."""
    return all(x.dtype in TRITON_DTYPES and is_plain(x) and x.is_contiguous() for x in tensors)


def _tree_kernels(scores: Tensor, activation: Activation) -> str | None:
    return kernels_for(scores, TREE_TRITON_LIMIT - 1) if activation.is_fused else None


def _path_kernels(scores: Tensor, shape: torch.Size, activation: Activation) -> str | None:
    """Kernels of paths, or None for plain torch.

    Element i of the result belongs to row i % B of the scores, so the shape of the result must end
    with the batch shape of the scores. Triton sums the gradients of several leaves of a row in any
    order, which is not allowed for deterministic algorithms.
    """
    batch = scores.shape[:-1]
    if not activation.is_fused or batch != shape[len(shape) - len(batch) :]:
        return None
    in_order = torch.are_deterministic_algorithms_enabled() and shape != batch
    return None if in_order and not scores.is_cpu else kernels_for(scores, scores.shape[-1])


def _launch(
    fused: str,
    name: str,
    activation: Activation | None,
    constants: Tensor | None,
    **places: Tensor | None,
) -> None:
    """Call a C kernel or launch a Triton kernel.

    Args:
        fused: ``"cpu"`` or ``"triton"``.
        name: name of the kernel.
        activation: activation of a tree; None for sparsemax and softmax.
        constants: constants of the nodes of a tree, or None.
        places: inputs and, last, the output, by the field names of a C job; None if a kernel does
            not have one.
    """
    tensors = {name: x for name, x in places.items() if x is not None}
    if fused == "cpu":
        cpu.call(name, activation, constants, tensors)
        return
    from catnat.kernels import triton_flat, triton_tree

    contiguous = [x.contiguous() for x in tensors.values()]
    with _on_device_of(contiguous[0]):
        if activation is None:
            triton_flat.launch(getattr(triton_flat, name), *contiguous)
        else:
            triton_tree.launch(name, activation, constants, *contiguous)


def _on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make the device of x current, because Triton launches kernels there."""
    unneeded = torch.compiler.is_compiling() or not x.is_cuda  # not CUDA: Triton's interpreter
    if unneeded or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(x)


class _LogProbs(torch.autograd.Function):
    """Log-probabilities by fused kernels.

    "tree": scores (*, K-1) -> (*, K). "path": scores (B, K-1) and leaves (N B) -> (N B).
    "sparsemax", "softmax": scores (*, K) -> (*, K).
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        scores: Tensor,
        leaf: Tensor | None,
        activation: Activation | None,
        constants: Tensor | None,
        fused: str,
    ) -> Tensor:
        K = scores.shape[-1] + (activation is not None)
        out = scores.new_empty((*scores.shape[:-1], K) if leaf is None else leaf.shape)
        _launch(fused, f"{name}_forward", activation, constants, scores=scores, leaf=leaf, out=out)
        ctx.settings = name, activation, fused
        source = out if name == "sparsemax" else scores  # its gradient depends only on log_probs
        ctx.save_for_backward(source, out if name == "softmax" else None, leaf, constants)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name, activation, fused = ctx.settings
        source, log_probs, leaf, constants = ctx.saved_tensors

        def plainly(scores: Tensor) -> Tensor:
            if activation is None:
                return reference.softmax_log_probs(scores)
            if leaf is None:
                return reference.tree_log_probs(scores, activation, constants)
            leaves = leaf.view(len(leaf) // max(1, len(scores)), len(scores))
            return reference.tree_log_prob(scores, leaves, activation, constants).flatten()

        # Batched gradients and gradients of gradients use plain torch.
        is_last = is_plain(grad) and not torch.is_grad_enabled()
        if is_last or torch.compiler.is_compiling():
            out = source.new_empty(source.shape)  # contiguous, unlike empty_like
            if leaf is not None:
                out.zero_()  # paths add to the gradient
            _launch(
                fused,
                f"{name}_backward",
                activation,
                constants,
                scores=source,
                log_probs=log_probs,
                leaf=leaf,
                grad=grad,
                out=out,
            )
        elif name == "sparsemax":  # a derivative of log_probs calls this method again
            out = reference.sparsemax_vjp(source, grad)
        else:
            (out,) = reference.gradients(plainly, (source,), grad)
        return None, out, *[None] * 4
