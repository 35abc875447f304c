"""Heads: names and options, the exact definition, inverses, and the company they keep in torch."""

import copy
import math
import pickle

import pytest
import torch
from cases import (
    CATEGORIES,
    CATNAT,
    COMPILED,
    DTYPES,
    GRID,
    HEADS,
    TREES,
    assert_uniform,
    both_floats,
    exact_log_probs,
    make,
    random_scores,
    slow,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import jacrev, vmap

from catnat import CatnatHead, NaturalHead, SigmoidHead, head_names, make_head
from catnat.heads.base import ALIASES, REGISTRY

# ------------------------------------------------------------------------ names and options


def test_names_and_aliases():
    assert HEADS[:4] == ("softmax", "sparsemax", "sigmoid", "natural")
    assert isinstance(make_head("catnat-sigmoid", 4), SigmoidHead)
    assert isinstance(make_head("catnat-natural", 4), NaturalHead)
    assert [make_head(name, 5).num_scores for name in HEADS[:4]] == [5, 5, 4, 4]
    assert [make_head(name, 5).name for name in HEADS] == list(HEADS)


@pytest.mark.parametrize(
    ("name", "K", "options", "said"),
    [
        ("softmx", 4, {}, "unknown head 'softmx'; did you mean softmax. choose from softmax"),
        *(("natural", K, {}, f"num_categories must .* got {K!r}") for K in (1, True, 2.0, "4")),
        ("softmax", 4, {"center": 1.0}, "'softmax' has no option 'center'; choose from mix"),
        ("natural", 4, {"amplitude": -1.0}, "amplitude must .*, got -1"),
        ("natural", 4, {"center": math.nan}, "center must .*, got nan"),
        ("natural", 4, {"tail": 0.5}, r"tail must be 0 or lie in \[1e-30, 0.5\), got 0.5"),
        ("natural", 5, {"order": [0, 0, 1, 2, 3]}, r"order must be a permutation of 0\.\.4, got "),
        ("softmax", 4, {"mix": 1.0}, "mix must lie in .* got 1"),
        (make_head("natural", 4), 5, {}, "head must have 5 categories, got 4"),
        (make_head("natural", 4), 4, {"center": 1.0}, "cannot be set on the existing head"),
    ],
)
def test_wrong_options_are_named_with_the_choices(name, K, options, said):
    with pytest.raises(ValueError, match=said):
        make_head(name, K, **options)


def test_a_subclass_registers_itself():
    try:

        class MyHead(SigmoidHead, name="mine", aliases=("my-own",)):
            """A head of another project."""

        assert "mine" in head_names()
        assert isinstance(make_head("my-own", 3), MyHead)
        with pytest.raises(ValueError, match=r"head name 'mine' is taken by .*MyHead"):

            class Other(SigmoidHead, name="mine"):
                """Takes a name that is taken."""
    finally:
        REGISTRY.pop("mine")
        ALIASES.pop("my-own")


@pytest.mark.parametrize("name", GRID)
def test_wrong_scores_are_named(name):
    head = make(name, 5)
    with pytest.raises(ValueError, match=rf"expected {head.num_scores} scores .* got \(2, 7\)"):
        head.log_probs(torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64"):
        head.log_probs(torch.zeros(head.num_scores, dtype=torch.int64))
    for use in (head, head.log_probs, head.fisher, head.allowed):
        with pytest.raises(TypeError, match="scores must be a torch tensor, got list"):
            use([0.0] * head.num_scores)


@pytest.mark.parametrize("mix", [0.0, 0.1])
@pytest.mark.parametrize("name", HEADS)
def test_the_inverse_refuses_what_is_not_a_probability_vector(name, mix):
    head = make_head(name, 3, mix=mix)
    for bad in ([-0.2, 0.7, 0.5], [0.2, 0.3, 0.4]):
        rows = torch.tensor([[0.2, 0.3, 0.5], bad])
        with pytest.raises(ValueError, match="sum to 1, got a row with minimum"):
            head.inverse(rows)
        # Where values are not looked at, the scores are NaN.
        scores = torch.func.vmap(head.inverse)(rows)
        assert scores.isnan().any(-1).tolist() == [False, True]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):  # rounding is not a mistake
        assert head.inverse(torch.full((3,), 1 / 3, dtype=dtype)).isfinite().all()


def test_an_incomplete_head_says_what_is_missing():
    with pytest.raises(NotImplementedError, match="must override log_activation"):
        CatnatHead(4).log_probs(torch.zeros(3))

    class Half(NaturalHead):
        def log_activation(self, x):
            return x, x

    with pytest.raises(TypeError, match="Half overrides log_activation"):
        Half(4)


# ------------------------------------------------------------------------------- definition


@pytest.mark.parametrize("K", [*CATEGORIES, 1000])
@pytest.mark.parametrize("name", GRID)
def test_definition(name, K):
    head = make(name, K)
    for scale in (0.3, 2.0):
        scores = random_scores(head, rows=2, scale=scale)
        for row, out in zip(scores, head.log_probs(scores), strict=True):
            exact = [max(float(x), -1000.0) for x in exact_log_probs(name, row.tolist())]
            want = torch.tensor(exact, dtype=torch.float64)
            assert torch.equal(out <= -1000, want <= -1000)
            assert torch.allclose(out.exp(), want.exp(), rtol=1e-12, atol=1e-15)
            if name != "sparsemax":  # its small probabilities are differences of large numbers
                possible = want > -1000
                assert torch.allclose(out[possible], want[possible], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("K", [2, 3, 5, 18, 1000, 131072])
@pytest.mark.parametrize("name", GRID)
def test_zero_scores_are_uniform(name, K):
    assert_uniform(make(name, K), single=4e-6)


@pytest.mark.parametrize("name", TREES)
def test_uniform_at_zero_can_be_turned_off(name):
    p = make(name, 3, uniform_at_zero=False).probs(torch.zeros(2))
    assert torch.allclose(p, torch.tensor([0.5, 0.25, 0.25]))


@pytest.mark.parametrize("K", [4, 5])
@pytest.mark.parametrize("name", TREES)
def test_center_shifts_the_scores(name, K):
    scores = torch.randn(3, K - 1, dtype=torch.float64)
    shifted = make(name, K, center=0.7).log_probs(scores + 0.7)
    assert torch.allclose(shifted, make(name, K).log_probs(scores), atol=1e-13)


# ---------------------------------------------------------------------------------- inverse


@pytest.mark.parametrize("K", [*CATEGORIES, 1000])
@pytest.mark.parametrize("name", GRID)
def test_inverse(name, K):
    head = make(name, K)
    for spread in (0.5, 3.0):
        p = torch.softmax(spread * torch.randn(20, K), -1)
        assert head.inverse(p).dtype == torch.float32
        assert (head.probs(head.inverse(p)) - p).abs().max() < 1e-6
        p = p.double() / p.double().sum(-1, keepdim=True)
        assert (head.probs(head.inverse(p)) - p).abs().max() < 1e-12


@both_floats
@pytest.mark.parametrize("K", CATEGORIES)
@pytest.mark.parametrize("name", GRID)
def test_inverse_on_the_boundary(name, K, dtype):
    head = make(name, K)
    corners = torch.eye(K, dtype=dtype)
    half = torch.zeros(K, dtype=dtype)
    half[:2] = 0.5
    for p in (*corners, half):
        scores = head.inverse(p)
        assert scores.isfinite().all()
        back = head.probs(scores)
        assert (back - p).abs().max() < 1e-6
        assert torch.equal(back == 0, p == 0)
    broken = torch.full((K,), 1 / K, dtype=dtype)
    broken[0] = torch.nan
    assert head.inverse(broken).isnan().any()


# ------------------------------------------------------------------------ the rest of torch


@pytest.mark.parametrize("K", [5, slow(8)])
@pytest.mark.parametrize("name", COMPILED)
def test_compile(name, K):
    head = make(name, K)
    scores = torch.randn(6, head.num_scores, requires_grad=True)

    def loss(s):
        q = head(s)
        return q.entropy().sum() + q.log_prob(torch.zeros(6, dtype=torch.int64)).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(scores), scores)
    (want,) = torch.autograd.grad(loss(scores), scores)
    assert torch.allclose(compiled(scores), loss(scores), atol=1e-5)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("K", [5, 8])
@pytest.mark.parametrize("name", GRID)
class TestCompany:
    def test_shapes(self, name, K):
        head = make(name, K)
        S = head.num_scores
        for shape in ((), (1,), (0,), (2, 3), (2, 0, 3)):
            scores = torch.randn(*shape, S, requires_grad=True)
            out = head.log_probs(scores)
            assert out.shape == (*shape, K)
            out.sum().backward()
            assert scores.grad is not None and scores.grad.shape == scores.shape
            assert head.fisher(scores.detach()).shape == (*shape, S, S)
            assert head.fisher_diagonal(scores.detach()).shape == (*shape, S)
            assert head.saturated(scores.detach()).shape == (*shape, S)

    def test_the_layout_of_a_gradient_does_not_matter(self, name, K):
        head = make(name, K)
        leaf = torch.randn(6, head.num_scores, requires_grad=True)
        weight = torch.randn(K, 6)
        (strided,) = torch.autograd.grad((head.log_probs(leaf).t() * weight).sum(), leaf)
        (plain,) = torch.autograd.grad((head.log_probs(leaf) * weight.t().contiguous()).sum(), leaf)
        assert torch.equal(strided, plain)

    def test_func_transforms(self, name, K):
        head = make(name, K)
        scores = torch.randn(6, head.num_scores)
        jacobian = torch.func.vmap(torch.func.jacrev(head.log_probs))(scores)
        forward = torch.func.vmap(torch.func.jacfwd(head.log_probs))(scores)
        assert torch.allclose(jacobian, forward, atol=1e-5)
        leaf = scores.clone().requires_grad_()
        (want,) = torch.autograd.grad(head.log_probs(leaf)[:, 1].sum(), leaf)
        assert torch.allclose(jacobian[:, 1], want, atol=1e-4, rtol=1e-4)

    def test_state_dict_is_empty_and_copies_and_casts_are_the_same(self, name, K):
        head = make(name, K)
        scores = torch.randn(3, head.num_scores, dtype=torch.float64)
        want = head.log_probs(scores)
        assert not head.state_dict() and not list(head.parameters())
        copies = (copy.deepcopy(head), pickle.loads(pickle.dumps(head)))
        for again in (*copies, head.half(), head.bfloat16(), head.float(), head.to("cpu")):
            assert torch.equal(again.log_probs(scores), want)


ROWS = 20
EXAMPLES = 60
OPTIONS = {
    "mix": st.sampled_from([0.0, 0.0, 1e-6, 0.01, 0.5]),
    "tail": st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.4]),  # of natural alone
    "ordered": st.booleans(),  # of catnat alone
    "K": st.integers(2, 12),
    "scale": st.floats(0, 30),
    "density": st.floats(0.05, 1),
    "seed": st.integers(0, 2**32),
}


def drawn_case(
    name,
    mix,
    tail,
    ordered,
    K,
    scale,
    density,
    seed,
):
    """A head, scores (ROWS, S) in float64 and masks (ROWS, K)."""
    noise = torch.Generator().manual_seed(seed)
    options = {"tail": tail} if name == "natural" else {}
    if name in CATNAT and ordered:
        options["order"] = torch.randperm(K, generator=noise).tolist()
    head = make_head(name, K, mix=mix, **options)
    scores = scale * torch.randn(ROWS, head.num_scores, generator=noise, dtype=torch.float64)
    mask = torch.rand(ROWS, K, generator=noise) < density
    mask[torch.arange(ROWS), torch.randint(K, (ROWS,), generator=noise)] = True
    return head, scores, mask


@pytest.mark.parametrize("name", HEADS)
@settings(max_examples=EXAMPLES)
@given(dtype=st.sampled_from(DTYPES), **OPTIONS)
def test_probabilities_sum_to_1_forbidden_ones_are_0_and_gradients_finite(name, dtype, **options):
    head, scores, mask = drawn_case(name, **options)
    scores = scores.to(dtype).requires_grad_()
    q = head(scores, mask=mask)
    eps = torch.finfo(q.probs.dtype).eps
    assert (q.probs.sum(-1) - 1).abs().max() <= 64 * eps
    assert (q.probs[~mask] == 0).all()
    assert q.logits.isfinite().all()
    assert torch.equal(head.allowed(head.masked(scores, mask)), mask)
    drawn = q.sample((5,))
    assert mask.expand(5, ROWS, -1).gather(-1, drawn[..., None]).all()
    chosen = q.logits.expand(5, ROWS, -1).gather(-1, drawn[..., None])[..., 0]
    assert torch.allclose(q.log_prob(drawn), chosen, rtol=1e-4, atol=1e-5)
    for loss in (q.entropy(), chosen, q.rsample(estimator="straight-through")[..., 0], q.logits):
        (gradient,) = torch.autograd.grad(loss.sum(), scores, retain_graph=True)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", HEADS)
@settings(max_examples=EXAMPLES)
@given(**OPTIONS)
def test_the_fisher_matrix_is_that_of_autograd(name, **options):
    head, free, mask = drawn_case(name, **options)
    scores = head.masked(free, mask)
    p = head.probs(scores)
    jacobian = vmap(jacrev(head.probs))(scores)  # (B, K), (B, K, S)
    weight = torch.where(p > 0, 1 / p, 0.0)
    want = torch.einsum("bki,bk,bkj->bij", jacobian, weight, jacobian)
    fisher = head.fisher(scores)
    tolerance = 1e-7 * (1 + want.abs().amax((-2, -1), keepdim=True))
    assert ((fisher - want).abs() <= tolerance).all()
    diagonal = fisher.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(head.fisher_diagonal(scores), diagonal, rtol=1e-7, atol=1e-12)
    if head.fisher_is_diagonal:
        assert ((want - torch.diag_embed(want.diagonal(dim1=-2, dim2=-1))).abs() <= tolerance).all()


def test_a_value_that_would_be_rounded_to_a_category_is_refused():
    value = torch.tensor(260.0, dtype=torch.bfloat16)  # 259 rounds to it
    with pytest.raises(ValueError, match="from 0 to 259, got 260"):
        make_head("softmax", 260).log_prob(torch.zeros(260), value)
