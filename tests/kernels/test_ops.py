"""The C kernels against plain torch, and the tree functions against each other."""

import math
from ctypes.util import find_library
from types import SimpleNamespace

import pytest
import torch
from cases import CATEGORIES, TREES, awkward_scores, make, slopes_of, use_kernels

from catnat.heads.nodes import subtree_sums
from catnat.kernels import cpu, dispatch, reference
from catnat.kernels.dispatch import tree_fisher, tree_log_probs
from catnat.numerics import LOG_ZERO

built = pytest.mark.skipif(cpu.library() is None, reason="the C kernels were not built")
SIZES = [*CATEGORIES, 31, 33, 100, 1000, 2049]


@built
@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("name", TREES)
def test_tree_kernels_agree_with_plain_torch(name, K):
    head = make(name, K)
    scores = awkward_scores(37, K - 1, 0.05).requires_grad_()
    exact = scores.detach().double()
    constants = head.constants(exact)
    plain = head.constants(scores)
    got = out = tree_log_probs(scores, head.activation, plain)
    want = reference.tree_log_probs(exact, head.activation, constants)
    assert torch.equal(got < LOG_ZERO / 2, want < LOG_ZERO / 2) or name != "natural"
    assert ((got - want).abs() <= 2e-6 * (1 + want.abs())).all()
    want = reference.tree_log_probs(scores, head.activation, plain)
    assert torch.allclose(got, want, rtol=2e-6, atol=2e-6)

    grad = torch.randn(37, K)
    (got,) = torch.autograd.grad(out, scores, grad)
    want = torch.func.vjp(lambda s: reference.tree_log_probs(s, head.activation, constants), exact)
    (want,) = want[1](grad.double())
    left, right = subtree_sums(grad.abs().double())  # what rounding is relative to
    slopes = slopes_of(head.activation, exact, constants)
    scale = left * slopes[0] + right * slopes[1]
    assert ((got - want).abs() <= 4e-6 * (scale + 1e-6)).all()

    got = tree_fisher(scores.detach(), head.activation, plain)
    want = head.fisher_diagonal(exact)
    assert ((got - want).abs() <= 1e-5 * want + 1e-20).all()


@built
@pytest.mark.parametrize("K", SIZES)
def test_sparsemax_kernels_agree_with_plain_torch(K):
    scores = (awkward_scores(37, K, 0.05) * torch.logspace(-3, 1, 37)[:, None]).requires_grad_()
    probs = reference.sparsemax_probs(scores.detach().double())
    got = dispatch.sparsemax_log_probs(scores)
    assert torch.equal(got <= LOG_ZERO, probs <= 0)
    assert torch.allclose(got.double().exp(), probs, rtol=2e-6, atol=1e-14)
    grad = torch.randn(37, K)
    (back,) = torch.autograd.grad(got, scores, grad)
    exact = scores.detach().double()
    (want,) = torch.func.vjp(reference.sparsemax_log_probs, exact)[1](grad.double())
    size = torch.where(probs > 0, grad.abs() / probs.clamp_min(1e-300), 0.0).amax(-1, keepdim=True)
    assert ((back - want).abs() <= 4e-6 * size).all()
    assert not back[got <= LOG_ZERO].any()


@built
@pytest.mark.parametrize("name", ["sparsemax", *TREES])
def test_threads_do_not_change_anything(name, monkeypatch):
    monkeypatch.setattr(cpu, "PARALLEL", 1)
    head = make(name, 18)
    scores = torch.randn(101, head.num_scores, requires_grad=True)
    grad = torch.randn(101, 18)
    value = torch.randint(18, (3, 101))
    generator = torch.Generator()

    def results():
        out = head.log_probs(scores)
        chosen = head.log_prob(scores, value)
        (of_chosen,) = torch.autograd.grad(chosen.sum(), scores)
        drawn = head.sample(scores, (3,), generator.manual_seed(0))
        fisher = head.fisher_diagonal(scores.detach())
        return out, chosen, of_chosen, drawn, fisher, *torch.autograd.grad(out, scores, grad)

    alone = results()
    for threads in (2, 3, 200):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        torch.testing.assert_close(results(), alone, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["sparsemax", "softmax", *TREES])
def test_transposed_scores_give_the_numbers_and_the_gradient_of_a_copy(name):
    head = make(name, 18)
    value = torch.randint(18, (4, 7))
    for scores in (torch.randn(head.num_scores, 7).T, torch.randn(7, 2 * head.num_scores)[:, ::2]):
        for function in (head.log_probs, lambda scores: head.log_prob(scores, value)):
            outputs, grads = [], []
            for memory in (scores, scores.contiguous()):
                leaf = memory.detach().requires_grad_()
                outputs.append(function(leaf))
                outputs[-1].square().sum().backward()
                grads.append(leaf.grad)
            torch.testing.assert_close(*outputs)
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize("level", cpu.LEVELS)
def test_every_level_of_instructions_gives_the_numbers_of_the_reference(level, monkeypatch):
    use_kernels(level, monkeypatch)
    torch.manual_seed(0)
    for K in (2, 3, 8, 18, 31, 32, 33, 64, 100, 257, 1024, 3003):
        for name in TREES:
            head = make(name, K)
            scores = (2 * torch.randn(5, head.num_scores)).requires_grad_()
            exact = scores.detach().double().requires_grad_()
            weight = torch.randn(5, K)
            value = torch.randint(K, (3, 5))
            for one, other in (
                (head.log_probs(scores), head.log_probs(exact)),
                (head.log_prob(scores, value), head.log_prob(exact, value)),
            ):
                assert ((one - other).abs() <= 3e-6 * (1 + other.abs())).all(), (name, K)
                w = weight if one.shape == weight.shape else weight[:, 0]
                (got,) = torch.autograd.grad((one * w).sum(), scores)
                (want,) = torch.autograd.grad((other * w).sum(), exact)
                size = want.abs().amax(-1, keepdim=True)
                assert ((got - want).abs() <= 5e-6 * (1 + size)).all(), (name, K)
            if head.fisher_is_diagonal:
                got = head.fisher_diagonal(scores.detach())
                want = head.fisher_diagonal(exact)
                assert torch.allclose(got.double(), want, rtol=2e-5, atol=1e-12), (name, K)
                twin = torch.Generator().manual_seed(K)
                drawn = head.sample(scores, (50,), twin)
                assert torch.equal(drawn, head.sample(exact, (50,), twin.manual_seed(K)))


@built
@pytest.mark.parametrize("level", cpu.LEVELS)
@pytest.mark.parametrize("name", ["sparsemax", *TREES])
def test_the_numbers_of_a_row_do_not_depend_on_the_other_rows(name, level, monkeypatch):
    use_kernels(level, monkeypatch)
    for K in (5, 18, 32, 63, 64):
        head = make(name, K)
        scores = 3 * torch.randn(35, head.num_scores)
        scores[7, 0] = torch.nan
        scores[20] = -torch.inf
        together = head.log_probs(scores)
        alone = torch.cat([head.log_probs(row[None]) for row in scores])
        assert torch.equal(together.view(torch.int32), alone.view(torch.int32)), K


@pytest.mark.parametrize("level", cpu.LEVELS)
@pytest.mark.parametrize("name", TREES)
def test_a_nan_score_makes_its_own_leaves_and_its_own_gradient_nan(name, level, monkeypatch):
    use_kernels(level, monkeypatch)
    for K in (5, 18, 64, 1024, 2049):
        head = make(name, K)
        grad = torch.randn(6, K)
        scores = 2 * torch.randn(6, K - 1)
        for row, node in enumerate((0, 1, K // 2 - 1, K // 2, K - 2)):
            scores[row, node] = math.copysign(torch.nan, (-1) ** row)
        leaf = scores.clone().requires_grad_()
        exact = scores.double()
        out = tree_log_probs(leaf, head.activation, head.constants(leaf))
        want = reference.tree_log_probs(exact, head.activation, head.constants(exact))
        assert torch.equal(out.isnan(), want.isnan()), K
        (back,) = torch.autograd.grad(out, leaf, grad)
        assert torch.equal(back.isnan(), scores.isnan()), K
        fisher = tree_fisher(scores, head.activation, head.constants(scores))
        assert torch.equal(fisher.isnan(), head.fisher_diagonal(exact).isnan()), K


def test_kernels_that_cannot_be_loaded_are_done_without(tmp_path, monkeypatch):
    """Not a library at all, or one of another version."""
    broken = tmp_path / "_cpu.so"
    broken.write_bytes(b"not a library")
    for origin in (str(broken), find_library("c") or find_library("m")):
        spec = SimpleNamespace(origin=origin)
        monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.warns(RuntimeWarning, match="falling back to PyTorch"):
            assert cpu.library.__wrapped__() is None
