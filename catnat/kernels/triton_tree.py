"""Fused Triton kernels for trees: all leaves or single paths, forward, backward, samples.

CUDA, float32.

All leaves: a program processes R rows and walks their trees level by level in registers. Going
down, the two children of every node are interleaved into the next level; going up, neighbors are
split and added. Only the scores are kept for the backward pass.

Paths: a program computes R results, and every lane walks its own path from the root. Result i
belongs to row i % B of the scores. Only the nodes of a path are read, so K has no limit.
Tensors are (1, R): a row of R nodes for the functions of ``triton_activations.py``.
"""

import triton
import triton.language as tl
from torch import Tensor

from catnat.heads.activations import Activation, kernel_numbers
from catnat.kernels.triton_activations import floored, logs_and_slopes

_BLOCK = 128  # paths per program


@triton.jit
def _load_levels(source, alive, HEIGHT: tl.constexpr):
    """Scores of the complete levels, loaded together to wait for memory once."""
    loaded = ()
    for level in tl.static_range(HEIGHT):
        node = (1 << level) - 1 + tl.arange(0, 1 << level)
        loaded = loaded + (tl.load(source + node[None, :], mask=alive, other=0.0),)  # noqa: RUF005
    return loaded


@triton.jit(do_not_specialize=["rows"])
def tree_kernel(
    scores,
    constants,
    grad,  # not read forward
    out,
    rows,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    BACKWARD: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,  # largest power of two <= K
    HEIGHT: tl.constexpr,  # log2 P
    REST: tl.constexpr,  # K - P: nodes of the last, incomplete level
    NATURAL: tl.constexpr,  # see triton_activations
):
    """Log-probabilities of the leaves, or from their gradient that in the scores."""
    K: tl.constexpr = P + REST
    S: tl.constexpr = K - 1
    settings = (constants, S, rate, high, low, joint, slope, edge)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    alive = row < rows
    source = scores + row * S
    leaves = out + row * K
    if BACKWARD:
        leaves = grad + row * K
    place = tl.arange(0, P)  # below the complete levels: nodes with two leaves, then single leaves
    node = P - 1 + place
    has_node = alive & (place < REST)[None, :]
    has_leaf = alive & (place >= REST)[None, :]
    single = leaves + (place - REST)[None, :]
    pair = leaves + (P - REST + 2 * place)[None, :]
    if REST > 0:
        s = tl.load(source + node[None, :], mask=has_node, other=0.0)
        left, right, fall, rise = logs_and_slopes(s, node, settings, place < REST, NATURAL)
    if BACKWARD:
        target = out + row * S
        if REST == 0:
            values = tl.load(single, mask=alive, other=0.0)
        else:  # Triton's layout follows what is added first: single leaves first spill registers
            a = tl.load(pair, mask=has_node, other=0.0)
            b = tl.load(pair + 1, mask=has_node, other=0.0)
            tl.store(target + node[None, :], b * rise - a * fall, mask=has_node)
            values = a + b + tl.load(single, mask=has_leaf, other=0.0)
        loaded = _load_levels(source, alive, HEIGHT)
        for level in tl.static_range(HEIGHT - 1, -1, -1):
            node = (1 << level) - 1 + tl.arange(0, 1 << level)
            _, _, fall, rise = logs_and_slopes(loaded[level], node, settings, node < S, NATURAL)
            a, b = tl.split(tl.reshape(values, (R, 1 << level, 2)))
            tl.store(target + node[None, :], b * rise - a * fall, mask=alive)
            values = a + b
    else:
        values = tl.zeros((R, 1), tl.float32)
        loaded = _load_levels(source, alive, HEIGHT)
        for level in tl.static_range(HEIGHT):
            node = (1 << level) - 1 + tl.arange(0, 1 << level)
            lefts, rights, _, _ = logs_and_slopes(loaded[level], node, settings, node < S, NATURAL)
            values = tl.interleave(values + lefts, values + rights)
        tl.store(single, floored(values), mask=has_leaf)
        if REST > 0:
            tl.store(pair, floored(values + left), mask=has_node)
            tl.store(pair + 1, floored(values + right), mask=has_node)


@triton.jit(do_not_specialize=["count", "rows"])
def path_kernel(
    scores,
    constants,
    source,  # leaves, or uniforms of a sample
    grad,  # read only backward
    out,
    count,
    rows,
    K,
    rate,
    high,
    low,
    joint,
    slope,
    edge,
    BACKWARD: tl.constexpr,
    SAMPLE: tl.constexpr,
    R: tl.constexpr,
    HEIGHT: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """Log-probabilities of leaves, or their gradient in the scores, or random leaves."""
    settings = (constants, K - 1, rate, high, low, joint, slope, edge)
    i = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    alive = i < count
    row = (i % rows) * (K - 1)
    heap = tl.full((R,), 1, tl.int64)  # 0 after a NaN
    if not SAMPLE:
        leaf = tl.load(source + i, mask=alive, other=0)
        valid = (leaf >= 0) & (leaf < K)
        key = tl.where(valid, leaf, 0) + K
        key = tl.where(key >= (1 << HEIGHT), key, 2 * key)  # moved to the last level
        total = tl.zeros((1, R), tl.float32)
    if BACKWARD:
        g = tl.load(grad + i, mask=alive, other=0.0)
        g = tl.where(valid, g, float("nan"))[None, :]
    for level in tl.static_range(HEIGHT):
        inside = alive & (heap > 0) & (heap < K)
        node = tl.where(inside, heap - 1, 0)
        s = tl.load(scores + row + node, mask=inside, other=0.0)[None, :]
        left, right, fall, rise = logs_and_slopes(s, node, settings, inside, NATURAL)
        if SAMPLE:
            u = tl.load(source + i * HEIGHT + level, mask=alive, other=0.0)
            log_left = tl.reshape(left, (R,)).to(tl.float64)
            child = 2 * heap + (u >= tl.exp(log_left)).to(tl.int64)
            heap = tl.where(inside, tl.where(log_left != log_left, 0, child), heap)
        else:
            heap = key >> (HEIGHT - 1 - level)
            is_right = (heap & 1 == 1)[None, :]
            if BACKWARD:
                step = g * tl.where(is_right, rise, -fall)
                tl.atomic_add(out + (row + node)[None, :], step, mask=inside[None, :])
            else:
                total += tl.where(inside[None, :], tl.where(is_right, right, left), 0.0)
    if SAMPLE:
        tl.store(out + i, tl.where(heap > 0, heap - K, -1), mask=alive)
    elif not BACKWARD:
        total = tl.where(valid[None, :], floored(total), float("nan"))
        tl.store(out + i[None, :], total, mask=alive[None, :])


def launch(
    name: str, activation: Activation, constants: Tensor | None, scores: Tensor, *tensors: Tensor
) -> None:
    """Launch a kernel by name, with the arguments of ``dispatch.py``."""
    *inputs, out = tensors
    S = scores.shape[-1]
    rows = scores.numel() // S
    backward = name.endswith("backward")
    grad = inputs[-1] if backward else scores
    arguments = kernel_numbers(activation)
    arguments |= {"rows": rows, "BACKWARD": backward}
    if not name.startswith("tree"):
        source = inputs[0]
        count = source.shape[0]
        arguments |= {"count": count, "K": S + 1, "R": _BLOCK, "HEIGHT": S.bit_length()}
        arguments["SAMPLE"] = name == "path_sample"
        if count:
            grid = (triton.cdiv(count, _BLOCK),)
            path_kernel[grid](scores, constants, source, grad, out, **arguments, num_warps=4)
    elif rows:
        height = (S + 1).bit_length() - 1
        P = 1 << height
        # A program processes R rows. These sizes and numbers of warps were fastest on an H200.
        numbers, few = (512, 2) if backward else (1024, 1)
        R = max(2, min(16, numbers // P))  # with one row Triton chooses a far slower layout
        while R > 4 and rows < 512 * R:  # for few rows, more programs with fewer rows are faster
            R //= 2
        warps = min(16, few if P <= 64 else max(1, R * P // (1024 * few)))
        arguments |= {"R": R, "P": P, "HEIGHT": height, "REST": S + 1 - P}
        grid = (triton.cdiv(rows, R),)
        tree_kernel[grid](scores, constants, grad, out, **arguments, num_warps=warps)
