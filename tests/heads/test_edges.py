"""Scores that are not finite, and the boundary of the simplex: one rule in every implementation.

The rule is written down in catnat/numerics.py.
"""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, GRID, LIKE_NATURAL, TREES, leaf_path, make, slow
from torch import Tensor

from catnat import CategoricalHead, CatnatHead, NaturalHead, make_head
from catnat.kernels import cpu
from catnat.numerics import LOG_ZERO

ROWS = ("finite", "nan at the root", "nan at a leaf", "inf", "-inf", "all inf", "all -inf", "mixed")
NAN, INF = torch.nan, torch.inf


def scores_of(head: CategoricalHead, dtype: torch.dtype) -> Tensor:
    """One row of scores for each of ROWS."""
    scores = torch.randn(len(ROWS), head.num_scores, generator=torch.Generator().manual_seed(0))
    scores[1, 0] = scores[2, -1] = NAN
    scores[3, 0], scores[4, 0], scores[5], scores[6] = INF, -INF, INF, -INF
    scores[7, 0], scores[7, -1] = -INF, INF
    return scores.to(dtype)


def is_nan(head: CategoricalHead, scores: Tensor) -> Tensor:
    """Which log-probabilities must be NaN, (*, S) -> (*, K)."""
    if isinstance(head, CatnatHead):
        paths = [
            [node for node, _ in leaf_path(k, head.num_categories)]
            for k in range(head.num_categories)
        ]
        return torch.stack([scores[:, path].isnan().any(-1) for path in paths], -1)
    broken = scores.isnan().any(-1) | (scores == INF).any(-1) | (scores == -INF).all(-1)
    return broken[:, None].expand(-1, head.num_categories)


def values(head: CategoricalHead, how: str):
    """log_probs, their gradient, and the Fisher diagonal, as one function of scores."""

    def all_three(scores: Tensor) -> tuple[Tensor, ...]:
        weight = torch.linspace(1, 2, head.num_categories)
        if how == "vmap":
            transform = torch.func.vmap(head.log_probs)
            out = transform(scores)
            grad = torch.func.vmap(torch.func.grad(lambda s: (head.log_probs(s) * weight).sum()))(
                scores
            )
            return out, grad, torch.func.vmap(head.fisher_diagonal)(scores)
        log_probs, fisher = head.log_probs, head.fisher_diagonal
        if how == "compiled":
            torch._dynamo.reset()
            log_probs = torch.compile(log_probs, fullgraph=True, backend="aot_eager")
            fisher = torch.compile(fisher, fullgraph=True, backend="aot_eager")
        leaf = scores.clone().requires_grad_()
        out = log_probs(leaf)
        (grad,) = torch.autograd.grad((out * weight).sum(), leaf)
        return out.detach(), grad, fisher(scores)

    return all_three


def is_slow(name: str, how: str, dtype: torch.dtype) -> bool:
    other = how in ("vmap", "compiled") and dtype != torch.float32
    return other or (how == "compiled" and name in (*LIKE_NATURAL, "sparsemax"))


WAYS = [
    (slow if is_slow(name, how, dtype) else pytest.param)(name, how, dtype)
    for name in GRID
    for how in ("plain", "cpu", "vmap", "compiled")
    for dtype in DTYPES
]


@pytest.mark.parametrize(("name", "how", "dtype"), WAYS)
@pytest.mark.parametrize("K", [4, 5])
def test_one_rule_for_scores_that_are_not_finite(name, K, how, dtype, monkeypatch):
    if how == "cpu" and cpu.library() is None:
        pytest.skip("the C kernels were not built")
    if how == "compiled" and K == 4:
        pytest.skip("slow, and the same as with 5 categories")
    if how == "plain":
        monkeypatch.setattr(cpu, "library", lambda: None)
    head = make(name, K)
    scores = scores_of(head, dtype)
    out, grad, fisher = values(head, how)(scores)
    broken = is_nan(head, scores)
    assert torch.equal(out.isnan(), broken)
    assert not out.isinf().any() and not grad.isinf().any()
    # An infinite score means what a very large one means.
    large = scores.double().clamp(-1e6, 1e6)
    want = head.probs(large)
    assert torch.allclose(out.double().exp()[~broken], want[~broken], atol=1e-5)
    settled = scores.isinf() & ~broken.any(-1, keepdim=True)
    assert not grad[settled].any()
    if name in TREES:
        assert torch.equal(grad.isnan(), scores.isnan())
        below = [[*(n for n, _ in leaf_path(node + 1 - K, K)), node] for node in range(K - 1)]
        lost = torch.stack([scores[:, path].isnan().any(-1) for path in below], -1)
        assert torch.equal(fisher.isnan(), lost)
        assert not fisher[scores.isinf()].any()
    else:
        assert torch.equal(fisher.isnan(), broken)
    saturated = head.saturated(scores)
    assert not saturated[scores.isnan()].any()
    if isinstance(head, NaturalHead) and not head.tail:
        assert torch.equal(saturated[3:7], torch.cat((scores[3:5].isinf(), scores[5:7].isinf())))


@pytest.mark.parametrize("name", GRID)
def test_log_probabilities_of_many_impossible_categories_can_be_added(name):
    head = make(name, 4)
    scores = torch.zeros(50, head.num_scores)
    largest = torch.finfo(torch.float32).max
    scores[:, 0] = largest if name in TREES else -largest  # category 0 is impossible
    q = torch.distributions.Independent(head(scores), 1)
    total = q.log_prob(torch.zeros(50, dtype=torch.int64))
    assert total.isfinite()
    masked = torch.zeros(50, head.num_scores)
    masked[:, 0] = -INF
    q = torch.distributions.Independent(head(masked), 1)
    assert q.log_prob(torch.full((50,), 0 if name not in TREES else 3)).isfinite()


# ----------------------------------------------------------------- the floor of softmax


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", [*range(len(ROWS)), slice(None), slice(0)])
def test_the_floor_of_softmax_is_a_clamp_in_values_and_both_derivatives(row, dtype):
    """Rows one by one and together: a NaN in one row must not hide the floor of another."""
    head = make_head("softmax", 5)
    scores = torch.cat((scores_of(head, dtype), torch.zeros(1, 5, dtype=dtype)))
    scores[-1, 1], scores[-1, 2] = -torch.finfo(dtype).max, torch.finfo(dtype).max
    weight = torch.linspace(1, 2, 5)

    def clamped(scores: Tensor) -> Tensor:
        out = torch.log_softmax(scores.to(torch.promote_types(dtype, torch.float32)), -1)
        impossible = out == -INF  # has the floor of every impossible category
        return out.clamp_min(-torch.finfo(out.dtype).max / 2**24).masked_fill(impossible, LOG_ZERO)

    results = []
    for log_probs in (head.log_probs, clamped):
        leaf = scores[row].clone().requires_grad_()
        out = log_probs(leaf)
        (grad,) = torch.autograd.grad((out * weight).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), leaf)
        results.append((out, grad, second))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


# ----------------------------------------------------------------- the boundary of the simplex


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [4, 64, 1000])
def test_the_inverse_of_sparsemax_keeps_zeros(K, dtype):
    head = make_head("sparsemax", K)
    p = head.probs(0.5 * torch.randn(400, K, dtype=torch.float64)).to(dtype)
    assert (p == 0).any()
    back = head.probs(head.inverse(p))
    assert not back[p == 0].any()
    assert torch.allclose(
        back,
        (p / p.sum(-1, keepdim=True)).to(back.dtype),
        atol=1e-2 if dtype.itemsize == 2 else 1e-6,
    )
