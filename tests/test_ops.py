"""The C kernels against plain torch, and the tree functions against each other."""

from __future__ import annotations

import math
from ctypes.util import find_library
from types import SimpleNamespace

import pytest
import torch
from cases import CATEGORIES, FUSED, leaf_path, make, use_kernels

from catnat.numerics import LOG_ZERO
from catnat.ops import native, reference
from catnat.tree import levels, path_sums, subtree_sums

built = pytest.mark.skipif(native.library() is None, reason="the C kernels were not built")
SIZES = [*CATEGORIES, 31, 33, 100, 1000, 1025, 2048, 2049, 4096, 5001]  # long from 2048 on


def awkward_scores(rows: int, S: int) -> torch.Tensor:
    """Scores of many sizes, some on, just inside and beyond the edges of the natural split."""
    scores = torch.randn(rows, S) * 10 ** (torch.rand(rows, 1) * 3 - 1.5)
    edge = torch.tensor([math.pi, -math.pi, 3.1415925, 3.14, 4.0, -1e30, 1e30, 0.0])
    take = torch.rand(rows, S) < 0.05
    return torch.where(take, edge[torch.randint(len(edge), (rows, S))], scores)


@built
@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("name", FUSED)
def test_tree_kernels_agree_with_plain_torch(name, K):
    head = make(name, K)
    scores = awkward_scores(37, K - 1)
    exact, constants = scores.double(), head.constants64
    got = native.tree_forward(scores, head.split, head.constants32)
    want = reference.tree_log_probs(exact, head.split, constants)
    assert torch.equal(got < LOG_ZERO / 2, want < LOG_ZERO / 2) or name != "natural"
    assert ((got - want).abs() <= 2e-6 * (1 + want.abs())).all()
    plain = reference.tree_log_probs(scores, head.split, head.constants32)
    assert torch.allclose(got, plain, rtol=2e-6, atol=2e-6)

    grad = torch.randn(37, K)
    got = native.tree_backward(scores, grad, head.split, head.constants32)
    want = reference.tree_vjp(exact, grad.double(), head.split, constants)
    left, right = subtree_sums(grad.abs().double())  # what rounding is relative to
    slopes = head.split.slopes(exact, constants)
    scale = left * slopes[0] + right * slopes[1]
    assert ((got - want).abs() <= 4e-6 * (scale + 1e-6)).all()


@built
@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("name", FUSED)
def test_the_fisher_kernel_agrees_with_plain_torch(name, K):
    head = make(name, K)
    scores = awkward_scores(37, K - 1)
    got = native.tree_fisher(scores, head.split, head.constants32)
    want = head.fisher_diagonal(scores.double())
    assert ((got[:, :-1] - want).abs() <= 1e-5 * want + 1e-20).all()
    assert torch.equal(got[:, :-1] == 0, (want < 1e-38)) or name != "natural"
    assert torch.allclose(got[:, -1], head.saturated(scores).float().mean(-1))
    scores[3, 0] = torch.nan
    assert native.tree_fisher(scores, head.split, head.constants32)[3, :-1].isnan().all()


@built
@pytest.mark.parametrize("K", SIZES)
def test_sparsemax_kernels_agree_with_plain_torch(K):
    scores = awkward_scores(37, K) * torch.logspace(-3, 1, 37)[:, None]
    probs = reference.sparsemax_probs(scores.double())
    got = native.sparsemax_forward(scores)
    assert torch.equal(got <= LOG_ZERO, probs <= 0)
    assert torch.allclose(got.double().exp(), probs, rtol=2e-6, atol=1e-14)
    grad = torch.randn(37, K)
    back = native.sparsemax_backward(got, grad)
    want = reference.sparsemax_vjp(scores.double(), grad.double())
    size = torch.where(probs > 0, grad.abs() / probs.clamp_min(1e-300), 0.0).amax(-1, keepdim=True)
    assert ((back - want).abs() <= 4e-6 * size).all()
    assert not back[got <= LOG_ZERO].any()


@built
@pytest.mark.parametrize("name", ["sparsemax", *FUSED])
def test_threads_do_not_change_anything(name, monkeypatch):
    monkeypatch.setattr(native, "PARALLEL", 1)
    head = make(name, 18)
    scores = torch.randn(101, head.num_scores, requires_grad=True)
    grad = torch.randn(101, 18)

    def both():
        out = head.log_probs(scores)
        fisher = head.fisher_diagonal(scores.detach())
        return out, fisher, *torch.autograd.grad(out, scores, grad)

    alone = both()
    for threads in (2, 3, 200):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        assert all(torch.equal(a, b) for a, b in zip(both(), alone, strict=True))


@pytest.mark.parametrize("name", ["sparsemax", *FUSED])
def test_works_without_the_kernels(name, monkeypatch):
    head = make(name, 18)
    scores = torch.randn(5, head.num_scores, requires_grad=True)
    out = head.log_probs(scores)
    (grad,) = torch.autograd.grad(out[:, 3].sum(), scores)
    seen = head.diagnostics(scores.detach())
    monkeypatch.setattr(native, "library", lambda: None)
    plain = head.log_probs(scores)
    (slow,) = torch.autograd.grad(plain[:, 3].sum(), scores)
    assert torch.allclose(out, plain, atol=1e-5) and torch.allclose(
        grad, slow, rtol=1e-4, atol=1e-5
    )
    assert torch.allclose(head.diagnostics(scores.detach()), seen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", native.LEVELS)
def test_every_level_of_instructions_gives_the_numbers_of_the_reference(level, monkeypatch):
    use_kernels(level, monkeypatch)
    torch.manual_seed(0)
    for K in (2, 3, 8, 18, 31, 32, 33, 64, 100, 257, 1024, 2048, 3003):
        for name in FUSED:
            head = make(name, K)
            scores = (2 * torch.randn(5, head.num_scores)).requires_grad_()
            exact = scores.detach().double().requires_grad_()
            weight, value = torch.randn(5, K), torch.randint(K, (5,))
            for one, other in (
                (head.log_probs(scores), head.log_probs(exact)),
                (head.log_prob(scores, value), head.log_prob(exact, value)),
            ):
                assert ((one - other).abs() <= 3e-6 * (1 + other.abs())).all(), (name, K)
                w = weight if one.dim() == 2 else weight[:, 0]
                (got,) = torch.autograd.grad((one * w).sum(), scores)
                (want,) = torch.autograd.grad((other * w).sum(), exact)
                size = want.abs().amax(-1, keepdim=True)
                assert ((got - want).abs() <= 5e-6 * (1 + size)).all(), (name, K)
            if head.fisher_is_diagonal:
                got, want = head.fisher_diagonal(scores.detach()), head.fisher_diagonal(exact)
                assert torch.allclose(got.double(), want, rtol=2e-5, atol=1e-12), (name, K)
                same = torch.Generator().manual_seed(K)
                drawn = head.sample(scores, (50,), same)
                assert torch.equal(drawn, head.sample(exact, (50,), same.manual_seed(K)))


@built
@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("name", ["sparsemax", *FUSED])
def test_the_numbers_of_a_row_do_not_depend_on_the_other_rows(name, level, monkeypatch):
    use_kernels(level, monkeypatch)
    for K in (5, 18, 32, 63, 64):
        head = make(name, K)
        scores = 3 * torch.randn(35, head.num_scores)
        scores[7, 0], scores[20] = torch.nan, -torch.inf
        together = head.log_probs(scores)
        alone = torch.cat([head.log_probs(row[None]) for row in scores])
        assert torch.equal(together.view(torch.int32), alone.view(torch.int32)), K


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("name", FUSED)
def test_a_nan_score_makes_its_own_leaves_and_its_own_gradient_nan(name, level, monkeypatch):
    use_kernels(level, monkeypatch)
    for K in (5, 18, 64, 1024, 2049):
        head, grad = make(name, K), torch.randn(6, K)
        scores = 2 * torch.randn(6, K - 1)
        for row, node in enumerate((0, 1, K // 2 - 1, K // 2, K - 2)):
            scores[row, node] = math.copysign(torch.nan, (-1) ** row)
        out, exact = native.tree_forward(scores, head.split, head.constants32), scores.double()
        want = reference.tree_log_probs(exact, head.split, head.constants64)
        assert torch.equal(out.isnan(), want.isnan()), K
        back = native.tree_backward(scores, grad, head.split, head.constants32)
        assert torch.equal(back.isnan(), scores.isnan()), K
        fisher = native.tree_fisher(scores, head.split, head.constants32)
        assert torch.equal(fisher[:, :-1].isnan(), head.fisher_diagonal(exact).isnan()), K


@built
def test_the_logarithm_of_a_small_probability_keeps_its_relative_accuracy():
    head = make("natural", 2)
    scores = (math.pi - torch.logspace(-6, 0.49, 20_000, dtype=torch.float64)).float()[:, None]
    got, want = head.log_probs(scores)[:, 0], head.log_probs(scores.double())[:, 0]
    assert ((got - want).abs() <= 3e-7 * want.abs()).all()


def test_torch_says_which_instructions_are_used(monkeypatch):
    for best, count in (("AVX512", 3), ("AVX2", 2), ("DEFAULT", 1), ("VSX", 1)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda best=best: best)
        monkeypatch.setattr(native, "_path", str)
        assert native.levels() == list(native.LEVELS)[3 - count :]


def test_kernels_that_cannot_be_loaded_are_done_without(tmp_path, monkeypatch):
    """Not a library at all, or one of another version."""
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"not a library")
    for origin in (str(broken), find_library("c") or find_library("m")):
        spec = SimpleNamespace(origin=origin)
        monkeypatch.setattr(native.importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.warns(RuntimeWarning, match="others take their place"):
            assert native.library.__wrapped__() is None


@pytest.mark.parametrize("K", [*CATEGORIES, 1000])
def test_paths_and_subtrees(K):
    left, right = torch.randn(2, 3, K - 1, dtype=torch.float64)
    nodes, leaves = path_sums(left, right)
    for k in range(0, K, max(1, K // 7)):
        total = torch.zeros(3, dtype=torch.float64)
        for node, bit in leaf_path(k, K):
            assert torch.allclose(nodes[:, node], total)
            total = total + (right if bit else left)[:, node]
        assert torch.allclose(leaves[:, k], total)
    # the adjoint: <path_sums(left, right), w> = <left, subtree_0(w)> + <right, subtree_1(w)>
    weight = torch.randn(3, K, dtype=torch.float64)
    below = subtree_sums(weight)
    assert torch.allclose((leaves * weight).sum(), (left * below[0] + right * below[1]).sum())


@pytest.mark.parametrize("K", CATEGORIES)
def test_levels_cover_every_node_once(K):
    assert [j for first, last in levels(K) for j in range(first, last)] == list(range(1, K))


def test_a_hundred_thousand_categories():
    for name in FUSED:
        head = make(name, 131072)
        scores = (torch.randn(2, 131071) * 0.3).requires_grad_()
        q = head(scores)
        assert torch.allclose(
            q.probs.double().sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-5
        )
        q.log_prob(q.sample()).sum().backward()
        assert 0 < scores.grad.count_nonzero() <= 2 * 17  # only the nodes on the two paths
        assert head.fisher_diagonal(scores.detach()).shape == scores.shape
