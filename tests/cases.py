"""The grid of cases that the tests share, and oracles independent of the library's code."""

from __future__ import annotations

import math

import mpmath
import torch
from torch import Tensor

from catnat import CategoricalHead, head_names, make_head

HEADS = head_names()[:4]  # the built-in ones; a test elsewhere may have registered others
CATNAT = ("sigmoid", "natural")
CATEGORIES = (2, 3, 4, 5, 8, 18, 32)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def random_scores(head: CategoricalHead, rows: int = 4, scale: float = 1.0) -> Tensor:
    """Normal scores in float64."""
    return scale * torch.randn(rows, head.num_scores, dtype=torch.float64)


def leaf_path(k: int, K: int) -> list[tuple[int, int]]:
    """(score index, bit) of every split above category k, root first."""
    path, node = [], K + k
    while node > 1:
        path.append((node // 2 - 1, node % 2))
        node //= 2
    return path[::-1]


def leaf_count(node: int, K: int) -> int:
    """Leaves below a heap node, by recursion."""
    return 1 if node >= K else leaf_count(2 * node, K) + leaf_count(2 * node + 1, K)


def exact_log_probs(
    name: str, scores: list[float], amplitude: float = 2 * math.pi
) -> list[mpmath.mpf]:
    """Log-probabilities by the paper's definition in 60 digits; -inf for probability 0."""
    with mpmath.workdps(60):
        s = [mpmath.mpf(x) for x in scores]
        if name == "softmax":
            top = max(s)
            total = sum(mpmath.exp(x - top) for x in s)
            return [x - top - mpmath.log(total) for x in s]
        if name == "sparsemax":
            ranked = sorted(s, reverse=True)
            size = max(n for n in range(1, len(s) + 1) if 1 + n * ranked[n - 1] > sum(ranked[:n]))
            tau = (sum(ranked[:size]) - 1) / size
            return [mpmath.log(x - tau) if x > tau else -mpmath.inf for x in s]
        K = len(s) + 1
        shares = [mpmath.mpf(leaf_count(2 * j + 1, K)) / leaf_count(j, K) for j in range(1, K)]
        edges = [exact_split(name, x, share, amplitude) for x, share in zip(s, shares, strict=True)]
        return [mpmath.fsum(edges[i][bit] for i, bit in leaf_path(k, K)) for k in range(K)]


def exact_split(
    name: str, s: mpmath.mpf, share: mpmath.mpf, amplitude: float
) -> tuple[mpmath.mpf, mpmath.mpf]:
    """log(1 - a(s)) and log a(s) of a node at which zero must give the share."""
    if name == "sigmoid":
        x = s + mpmath.log(share) - mpmath.log(1 - share)
        return -mpmath.log1p(mpmath.exp(x)), -mpmath.log1p(mpmath.exp(-x))
    A = mpmath.mpf(amplitude)
    phi = mpmath.asin(mpmath.sqrt(share)) + mpmath.pi * s / (2 * A)
    if phi <= 0:
        return mpmath.mpf(0), -mpmath.inf
    if phi >= mpmath.pi / 2:
        return -mpmath.inf, mpmath.mpf(0)
    return 2 * mpmath.log(mpmath.cos(phi)), 2 * mpmath.log(mpmath.sin(phi))


def autograd_fisher(head: CategoricalHead, scores: Tensor) -> Tensor:
    """sum_k p_k grad log p_k grad log p_k^T from the Jacobian of the probabilities, (S, S)."""
    p = head.probs(scores)
    jacobian = torch.autograd.functional.jacobian(head.probs, scores)  # (K, S)
    inside = p > 0
    return jacobian[inside].T @ (jacobian[inside] / p[inside, None])


def make_heads(K: int) -> list[CategoricalHead]:
    """All built-in heads over K categories."""
    return [make_head(name, K) for name in HEADS]
