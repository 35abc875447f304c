"""Every finite score of every dtype: finite log-probabilities, sum 1, finite gradients."""

import math

import mpmath
import pytest
import torch
from cases import (
    DTYPES,
    GRID,
    LIKE_NATURAL,
    TREES,
    exact_log_probs,
    leaf_path,
    make,
    slow,
    unusual_scores,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from catnat import CatnatHead, NaturalHead, make_head
from catnat.kernels import cpu
from catnat.numerics import LOG_ZERO

EDGE = math.pi  # A/2 of the natural head


def neighbours(x):
    """x and the numbers just inside and outside it, in float32 and in float64."""
    out = [x]
    for dtype in (torch.float32, torch.float64):
        t = torch.tensor(x, dtype=dtype)
        out += [t.item()] + [
            torch.nextafter(t, torch.tensor(to, dtype=dtype)).item() for to in (math.inf, -math.inf)
        ]
    return out


SPECIAL = [0.0, -0.0, 1e308, -1e308, 1e-30, *neighbours(EDGE), *neighbours(-EDGE), 50.0, -104.0]
magnitudes = st.builds(
    lambda sign, exponent: sign * 10.0**exponent,
    st.sampled_from((-1.0, 1.0)),
    st.floats(-30, 30, allow_nan=False),
)
scores_of = st.one_of(
    st.floats(-4, 4, allow_nan=False, width=32), magnitudes, st.sampled_from(SPECIAL)
)


@pytest.mark.parametrize("name", GRID)
@settings(max_examples=100)
@given(data=st.data())
def test_any_finite_score(name, data):
    K = data.draw(st.sampled_from((2, 3, 5, 8, 18)))
    dtype = data.draw(st.sampled_from(DTYPES))
    options = {}
    if name in TREES:
        options["center"] = data.draw(st.sampled_from((0.0, EDGE, -1.0)))
    if name.startswith("natural"):
        options["amplitude"] = data.draw(st.sampled_from((2 * EDGE, 1.0, 1e-3, 1e3)))
    head = make(name, K, **options)
    values = data.draw(st.lists(scores_of, min_size=head.num_scores, max_size=head.num_scores))
    limit = torch.finfo(dtype).max
    leaf = torch.tensor(values, dtype=torch.float64).clamp(-limit, limit).to(dtype)
    scores = leaf.requires_grad_()
    out = head.log_probs(scores)
    eps = torch.finfo(out.dtype).eps
    assert out.isfinite().all() and (out <= 4 * eps).all()
    p = head.probs(scores.detach())
    assert abs(p.double().sum().item() - 1) < 8 * eps * max(1.0, math.log2(K))
    weight = torch.linspace(-1, 1, K, dtype=out.dtype)
    (grad,) = torch.autograd.grad((out * weight).sum(), scores)
    assert grad.dtype == dtype and grad.isfinite().all()
    assert not grad[head.saturated(scores.detach())].any()


@pytest.mark.parametrize("K", [2, 5, 18])
@pytest.mark.parametrize("name", GRID)
@settings(max_examples=15)
@given(data=st.data())
def test_float32_against_sixty_digits(name, K, data):
    head = make(name, K)
    near = st.builds(lambda s, e: s * (EDGE - 10.0**-e), st.sampled_from((-1, 1)), st.floats(0, 7))
    one = st.one_of(st.floats(-4, 4, width=32), st.floats(-60, 60, width=32), near)
    values = data.draw(st.lists(one, min_size=head.num_scores, max_size=head.num_scores))
    scores = torch.tensor(values, dtype=torch.float32)
    got = head.log_probs(scores)
    for x, want in zip(got.tolist(), exact_log_probs(name, scores.tolist()), strict=True):
        if name == "sparsemax" and want < math.log(1e-9):
            # a difference of numbers near 1, taken in float64: exact to 1e-16, but not to its size
            assert abs(math.exp(x) - mpmath.exp(want)) < 1e-15
        elif want == -mpmath.inf:
            assert x <= LOG_ZERO
        else:
            assert abs(x - want) <= 2e-6 * (1 + abs(want))


@pytest.mark.parametrize("name", TREES)
def test_log_probabilities_near_zero_keep_their_relative_accuracy(name):
    """p = 1 - tiny: log p must not be rounded as log of a rounded p."""
    head = make(name, 2)
    scores = torch.tensor([3.0, 3.1, 3.14] if name == "natural" else [5.0, 9.0, 14.0])[:, None]
    for row, got in zip(scores.tolist(), head.log_probs(scores)[:, 1].tolist(), strict=True):
        want = exact_log_probs(name, row)[1]
        assert abs(got / want - 1) < 1e-6


@pytest.mark.parametrize("K", [2, 3, 8, 18])
@pytest.mark.parametrize("name", GRID)
def test_gradcheck(name, K):
    head = make(name, K)
    scale = 0.2 if name == "sparsemax" else 1.5
    scores = scale * torch.randn(2, head.num_scores, dtype=torch.float64)
    scores = scores.clamp(-2.5, 2.5).requires_grad_()
    assert torch.autograd.gradcheck(head.log_probs, scores)
    assert torch.autograd.gradgradcheck(head.log_probs, scores)


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", GRID)
def test_second_derivatives_in_float32(name, K):
    """The fused float32 path is differentiable twice, too."""
    head = make(name, K)
    scores = torch.randn(4, head.num_scores)
    weight = torch.randn(4, K)

    def hessian_vector(s):
        s = s.clone().requires_grad_()
        loss = (head.log_probs(s) * weight.to(s)).sum()
        (grad,) = torch.autograd.grad(loss, s, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), s)[0]

    want = hessian_vector(scores.double()).float()
    assert torch.allclose(hessian_vector(scores), want, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRID)
def test_gradient_at_zero_scores(name, dtype):
    """Ties and kinks of formulas sit at zero, where networks start."""
    head = make(name, 4)
    zero = torch.zeros(head.num_scores, dtype=dtype, requires_grad=True)
    (got,) = torch.autograd.grad(head.log_probs(zero)[0], zero)
    near = torch.full((head.num_scores,), 1e-7, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(head.log_probs(near)[0], near)
    assert torch.allclose(got.double(), want, atol=1e-2 if dtype.itemsize == 2 else 1e-5)


def test_paths_agree_at_the_edge():
    """Just inside an edge that lies at zero, scores may be as small as floats get."""
    head = make_head("natural", 4, center=math.pi)
    for tiny in (1e-30, 1e-38, 1e-44):
        scores = torch.full((1, 3), tiny)
        fused = head.log_probs(scores)
        plain = torch.func.vmap(head.log_probs)(scores)
        assert fused.isfinite().all() and torch.allclose(fused, plain)
    leaf = torch.full((3,), 1e-170, dtype=torch.float64, requires_grad=True)
    q = head(leaf)
    (grad,) = torch.autograd.grad(q.entropy(), leaf)
    assert q.entropy().isfinite() and grad.isfinite().all()


def is_nan(head, scores):
    """Which log-probabilities must be NaN, (*, S) -> (*, K)."""
    if isinstance(head, CatnatHead):
        paths = [
            [node for node, _ in leaf_path(k, head.num_categories)]
            for k in range(head.num_categories)
        ]
        return torch.stack([scores[:, path].isnan().any(-1) for path in paths], -1)
    certain = (scores == torch.inf).any(-1) | (scores == -torch.inf).all(-1)
    broken = scores.isnan().any(-1) | certain
    return broken[:, None].expand(-1, head.num_categories)


def ways(head, how):
    """log_probs, their gradient, and the Fisher diagonal, as one function of scores."""

    def all_three(scores):
        weight = torch.linspace(1, 2, head.num_categories)
        if how == "vmap":
            transform = torch.func.vmap(head.log_probs)
            out = transform(scores)
            grad = torch.func.vmap(torch.func.grad(lambda s: (head.log_probs(s) * weight).sum()))(
                scores
            )
            return out, grad, torch.func.vmap(head.fisher_diagonal)(scores)
        log_probs = head.log_probs
        fisher = head.fisher_diagonal
        if how == "compiled":
            torch._dynamo.reset()
            log_probs = torch.compile(log_probs, fullgraph=True, backend="aot_eager")
            fisher = torch.compile(fisher, fullgraph=True, backend="aot_eager")
        leaf = scores.clone().requires_grad_()
        out = log_probs(leaf)
        (grad,) = torch.autograd.grad((out * weight).sum(), leaf)
        return out.detach(), grad, fisher(scores)

    return all_three


def is_slow(name, how, dtype):
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
    scores = unusual_scores(head, dtype)
    out, grad, fisher = ways(head, how)(scores)
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
        assert grad[~broken[:, 0]].isfinite().all()
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
