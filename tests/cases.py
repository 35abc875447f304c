"""The grid of cases that the tests share, and oracles independent of the library's code."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import mpmath
import pytest
import torch
from torch import Tensor

from catnat import CategoricalHead, CatnatHead, NaturalHead, SigmoidHead, head_names, make_head
from catnat.heads.base import REGISTRY
from catnat.kernels import cpu

slow = partial(pytest.param, marks=pytest.mark.slow)
"""A case that runs with ``-m slow`` alone."""
both_floats = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])

# The heads that the package defines; a test elsewhere may have registered others.
HEADS = tuple(n for n in head_names() if REGISTRY[n].__module__.partition(".")[0] == "catnat")
OPTIONS = {"natural-tail": ("natural", {"tail": 0.05})}  # by a name of the tests
GRID = (*HEADS, *OPTIONS)
"""What every test of heads takes: names for :func:`make`."""
LIKE_NATURAL = ("sigmoid", "natural-tail")  # to a compiler
COMPILED = tuple(name if name == "natural" else slow(name) for name in GRID)
"""What a test takes that compiles each head."""
CATEGORIES = (2, 3, 4, 5, 8, 18, 32)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def make(name: str, K: int, **options: float | bool) -> CategoricalHead:
    """The head of a name in GRID."""
    head, fixed = OPTIONS.get(name, (name, {}))
    return make_head(head, K, **fixed, **options)


CATNAT = tuple(n for n in HEADS if issubclass(REGISTRY[n], CatnatHead))
TREES = tuple(n for n in GRID if isinstance(make(n, 2), CatnatHead))


def slopes_of(activation, scores: Tensor, constants: Tensor | None) -> tuple[Tensor, Tensor]:
    """-d log(1 - a)/ds and d log a/ds."""
    logs = partial(activation.log_activation, constants=constants)
    left, right = torch.func.jvp(logs, (scores,), (torch.ones_like(scores),))[1]
    return -left, right


class Sharp(CategoricalHead):
    """softmax(2 s), as in docs/own.md: it neither checks its scores nor floors anything."""

    def log_probs(self, scores):
        return torch.log_softmax(2 * scores, -1)

    def inverse(self, probs):
        return probs.log() / 2

    def fisher(self, scores):
        p = self.probs(scores)
        return 4 * (torch.diag_embed(p) - p[..., :, None] * p[..., None, :])


class CauchyHead(CatnatHead):
    """catnat with a(x) = 1/2 + arctan(x) / pi, known by its log_activation alone."""

    def log_activation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(x)
        return (
            torch.log(torch.atan2(one, x) / torch.pi),
            torch.log(torch.atan2(one, -x) / torch.pi),
        )


class Flattened(NaturalHead):
    """A tree whose log-probabilities are not those of its scores alone."""

    def log_probs(self, scores: Tensor) -> Tensor:
        return torch.logaddexp(super().log_probs(scores), torch.tensor(-2.0)).log_softmax(-1)


def random_scores(head: CategoricalHead, rows: int = 4, scale: float = 1.0) -> Tensor:
    """Normal scores in float64."""
    return scale * torch.randn(rows, head.num_scores, dtype=torch.float64)


def awkward_scores(rows: int, S: int, share: float) -> Tensor:
    """Scores of many sizes; a share lies at, just inside and beyond the edges of natural."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, S, generator=generator)
    scores *= 10 ** (torch.rand(rows, 1, generator=generator) * 3 - 1.5)
    edge = torch.tensor([math.pi, -math.pi, 3.1415925, 3.14, 4.0, -1e30, 1e30, 0.0])
    pick = torch.randint(len(edge), (rows, S), generator=generator)
    take = torch.rand(rows, S, generator=generator) < share
    return torch.where(take, edge[pick], scores)


def unusual_scores(head: CategoricalHead, dtype: torch.dtype) -> Tensor:
    """Rows with NaN at the root and at a leaf, with infinities, and with the largest numbers."""
    scores = torch.randn(9, head.num_scores, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[1, 0] = scores[2, -1] = torch.nan
    scores[3, 0] = torch.inf
    scores[4, 0] = -torch.inf
    scores[5] = torch.inf
    scores[6] = -torch.inf
    for row, size in ((7, torch.inf), (8, torch.finfo(dtype).max)):
        scores[row, 0] = -size
        scores[row, -1] = size
    return scores


def random_mask(rows: int, K: int) -> Tensor:
    """Half of the categories at random, and at least one in every row."""
    mask = torch.rand(rows, K) < 0.5
    mask[torch.arange(rows), torch.randint(K, (rows,))] = True
    return mask


def assert_uniform(head: CategoricalHead, double: float = 1e-12, single: float = 2e-6) -> None:
    """Zero scores give every category 1/K, up to these relative errors."""
    for dtype, tolerance in ((torch.float64, double), (torch.float32, single)):
        p = head.probs(torch.zeros(3, head.num_scores, dtype=dtype))
        assert (p * head.num_categories - 1).abs().max() < tolerance


def assert_same_however_called(head: CategoricalHead, *transforms: Callable) -> None:
    """Log-probabilities under a mask: row by row, under autocast and as transformed."""
    scores = random_scores(head, 6).float()
    mask = random_mask(6, head.num_categories)

    def log_probs(s: Tensor, m: Tensor) -> Tensor:
        return head(s, mask=m).logits

    want = log_probs(scores, mask)
    for transform in (torch.func.vmap, *transforms):
        assert torch.allclose(transform(log_probs)(scores, mask), want, rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(log_probs(scores, mask), want)


def leaf_path(k: int, K: int) -> list[tuple[int, int]]:
    """(score index, bit) of every split above category k, root first."""
    path = []
    node = K + k
    while node > 1:
        path.append((node // 2 - 1, node % 2))
        node //= 2
    return path[::-1]


def leaf_count(node: int, K: int) -> int:
    """Leaves below a heap node, by recursion."""
    return 1 if node >= K else leaf_count(2 * node, K) + leaf_count(2 * node + 1, K)


def exact_log_probs(name: str, scores: list[float], **options: float | bool) -> list[mpmath.mpf]:
    """Log-probabilities by the definition in 60 digits; -inf for probability 0."""
    with mpmath.workdps(60):
        s = [mpmath.mpf(x) for x in scores]
        if name == "softmax":
            top = max(s)
            total = sum(mpmath.exp(x - top) for x in s)
            return [x - top - mpmath.log(total) for x in s]
        if name == "sparsemax":
            ranked = sorted(s, reverse=True)
            sums = list(accumulate(ranked))
            size = max(n for n, x in enumerate(ranked, 1) if 1 + n * x > sums[n - 1])
            tau = (sums[size - 1] - 1) / size
            return [mpmath.log(x - tau) if x > tau else -mpmath.inf for x in s]
        K = len(s) + 1
        head = make(name, K, **options)
        shares = [mpmath.mpf(leaf_count(2 * j + 1, K)) / leaf_count(j, K) for j in range(1, K)]
        edges = [exact_split(head, x, share) for x, share in zip(s, shares, strict=True)]
        return [mpmath.fsum(edges[i][bit] for i, bit in leaf_path(k, K)) for k in range(K)]


def exact_split(
    head: SigmoidHead | NaturalHead, s: mpmath.mpf, share: mpmath.mpf
) -> tuple[mpmath.mpf, mpmath.mpf]:
    """log(1 - a(s)) and log a(s) of a node at which zero must give the share."""
    if isinstance(head, SigmoidHead):
        x = s + mpmath.log(share) - mpmath.log(1 - share)
        return -mpmath.log1p(mpmath.exp(x)), -mpmath.log1p(mpmath.exp(-x))
    # Angles on the quarter circle from a = 0 to a = 1, which is A wide in scores.
    joint = mpmath.asin(mpmath.sqrt(head.tail))
    rare = min(share, 1 - share)
    start = mpmath.asin(mpmath.sqrt(rare))
    if rare < head.tail:
        start = joint + mpmath.log(rare / head.tail) * mpmath.tan(joint) / 2
    start = start if share <= 0.5 else mpmath.pi / 2 - start
    phi = start + mpmath.pi * s / (2 * mpmath.mpf(head.amplitude))
    depth = min(phi, mpmath.pi / 2 - phi)  # from the nearer end of the quarter circle
    if depth > joint:
        return 2 * mpmath.log(mpmath.cos(phi)), 2 * mpmath.log(mpmath.sin(phi))
    log_rare = -mpmath.inf
    if head.tail:
        log_rare = mpmath.log(head.tail) - (joint - depth) * 2 / mpmath.tan(joint)
    logs = (mpmath.log1p(-mpmath.exp(log_rare)), log_rare)
    return logs if phi < mpmath.pi / 4 else logs[::-1]


def autograd_fisher(head: CategoricalHead, scores: Tensor) -> Tensor:
    """sum_k p_k grad log p_k grad log p_k^T from the Jacobian of the probabilities, (S, S)."""
    p = head.probs(scores)
    jacobian = torch.autograd.functional.jacobian(head.probs, scores)  # (K, S)
    inside = p > 0
    return jacobian[inside].T @ (jacobian[inside] / p[inside, None])


def run_interpreted(code: str) -> None:
    """Run a program in a process where Triton interprets its kernels, on the CPU."""
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def use_kernels(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the heads take the C kernels of one level of instructions; skip where there are none."""
    if level not in cpu.levels():
        pytest.skip(f"not built, or this processor has no {level}")
    kernels = cpu.load(level)
    monkeypatch.setattr(cpu, "library", lambda: kernels)
