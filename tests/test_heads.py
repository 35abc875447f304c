"""Heads: names and options, the exact definition, inverses, and the company they keep in torch."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re

import numpy
import pytest
import torch
from cases import (
    CATEGORIES,
    COMPILED,
    GRID,
    HEADS,
    SEARCHED,
    TREES,
    CauchyHead,
    autograd_fisher,
    exact_log_probs,
    make,
    random_scores,
    slow,
)
from entmax import sparsemax

from catnat import CatnatHead, HeadCategorical, NaturalHead, SigmoidHead, head_names, make_head
from catnat.heads import _ALIASES, _REGISTRY, CategoricalHead
from catnat.tree import right_shares

# ------------------------------------------------------------------------ names and options


def test_names_and_aliases():
    assert HEADS[:4] == ("softmax", "sparsemax", "sigmoid", "natural")
    assert isinstance(make_head("catnat-sigmoid", 4), SigmoidHead)
    assert isinstance(make_head("catnat-natural", 4), NaturalHead)
    assert [make_head(name, 5).num_scores for name in HEADS[:4]] == [5, 5, 4, 4]
    assert [make_head(name, 5).name for name in HEADS] == list(HEADS)


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match=r"unknown head 'softmx'; choose from softmax, sparsemax"):
        make_head("softmx", 4)


@pytest.mark.parametrize("K", [1, 0, -3, True, 2.0, "4"])
@pytest.mark.parametrize("name", GRID)
def test_bad_number_of_categories_is_named(name, K):
    with pytest.raises(ValueError, match=f"num_categories must .* got {K!r}"):
        make(name, K)


@pytest.mark.parametrize("option", ["tail", "mix", "amplitude", "center"])
@pytest.mark.parametrize("value", ["0.1", None, [0.1]])
def test_an_option_that_is_no_number_is_named(option, value):
    with pytest.raises(TypeError, match=re.escape(f"{option} must be a number, got {value!r}")):
        make_head("natural", 4, **{option: value})


def test_unknown_option_lists_the_choices():
    with pytest.raises(ValueError, match="'sigmoid' has no option 'amplitude'; its options: cent"):
        make_head("sigmoid", 4, amplitude=1.0)
    with pytest.raises(ValueError, match="'softmax' has no option 'center'; its options: mix"):
        make_head("softmax", 4, center=1.0)


@pytest.mark.parametrize(
    "option", [{"amplitude": 0.0}, {"amplitude": -1.0}, {"amplitude": 1e20}, {"center": math.nan}]
)
def test_bad_option_value_is_named(option):
    (name, value), *_ = option.items()
    with pytest.raises(ValueError, match=f"{name} must .*, got {re.escape(repr(value))}"):
        make_head("natural", 4, **option)


def test_a_finished_head_is_checked():
    head = make_head("natural", 4)
    assert make_head(head, 4) is head
    with pytest.raises(ValueError, match="head has 4 categories, 5 are needed"):
        make_head(head, 5)
    with pytest.raises(ValueError, match=r"options \['center'\] given with a finished head"):
        make_head(head, 4, center=1.0)


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
        _REGISTRY.pop("mine")
        _ALIASES.pop("my-own")


@pytest.mark.parametrize("name", GRID)
def test_wrong_scores_are_named(name):
    head = make(name, 5)
    with pytest.raises(ValueError, match=rf"takes {head.num_scores} scores .* got shape \(2, 7\)"):
        head.log_probs(torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64"):
        head.log_probs(torch.zeros(head.num_scores, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected 5 probabilities"):
        head.inverse(torch.ones(4) / 4)


@pytest.mark.parametrize("mix", [0.0, 0.1])
@pytest.mark.parametrize("name", HEADS)
def test_scores_that_are_no_tensor_are_named(name, mix):
    head = make_head(name, 3, mix=mix)
    zeros = [0.0] * head.num_scores
    for scores, kind in ((zeros, "list"), (numpy.array(zeros), "ndarray"), (None, "NoneType")):
        for use in (head, head.log_probs, head.fisher, head.fisher_diagonal, head.allowed):
            with pytest.raises(TypeError, match=f"scores must be a torch tensor, got {kind}; "):
                use(scores)


@pytest.mark.parametrize("mix", [0.0, 0.1])
@pytest.mark.parametrize("name", HEADS)
def test_the_inverse_refuses_what_is_no_probability_vector(name, mix):
    head = make_head(name, 3, mix=mix)
    good = torch.tensor([0.2, 0.3, 0.5])
    for bad, got in (
        ([-0.2, 0.7, 0.5], "got the lowest -0.2 and the sum 1"),
        ([0.2, 0.3, 0.4], "got the lowest 0.2 and the sum 0.9"),
        ([2.0, 3.0, 5.0], "got the lowest 2 and the sum 10"),
    ):
        with pytest.raises(ValueError, match=f"must be >= 0 and sum to 1, {re.escape(got)}"):
            head.inverse(torch.tensor(bad))
        rows = torch.stack((good, torch.tensor(bad)))
        with pytest.raises(ValueError, match=r"sum to 1, got in row \(1,\) the lowest"):
            head.inverse(rows)
        # Where nobody may look at the values, the scores are NaN.
        scores = torch.func.vmap(head.inverse)(rows)
        assert scores.isnan().any(-1).tolist() == [False, True]
    with pytest.raises(TypeError, match="expected a torch tensor over categories, got list"):
        head.inverse([0.2, 0.3, 0.5])
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64"):
        head.inverse(torch.tensor([0, 0, 1]))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):  # rounding is no mistake
        assert head.inverse(torch.full((3,), 1 / 3, dtype=dtype)).isfinite().all()
    rounded = torch.tensor([0.4 + 1e-8, 0.6, -1e-8])
    assert make_head(name, 3).inverse(rounded).isfinite().all()


def test_an_incomplete_head_says_what_is_missing():
    with pytest.raises(TypeError, match="abstract"):
        CategoricalHead(3)
    head = CatnatHead(4)
    with pytest.raises(NotImplementedError, match="must override log_split"):
        head.log_probs(torch.zeros(3))

    class Half(NaturalHead):
        def log_split(self, x):
            return x, x

    with pytest.raises(TypeError, match="Half overrides log_split"):
        Half(4)


def test_a_head_with_options_of_its_own():
    class SharpHead(CatnatHead):
        def __init__(self, num_categories, sharp=2.0, **kwargs):
            super().__init__(num_categories, **kwargs)
            self.sharp = sharp

        def log_split(self, x):
            return tuple(torch.nn.functional.logsigmoid(sign * self.sharp * x) for sign in (-1, 1))

    SharpHead.__init_subclass__.__func__(SharpHead, name="sharp")
    try:
        head = make_head("sharp", 5, sharp=3.0, center=0.5)
        assert (head.sharp, head.center) == (3.0, 0.5)
        assert torch.allclose(head.probs(torch.full((4,), 0.5)), torch.full((5,), 0.2), atol=1e-6)
        with pytest.raises(
            ValueError, match=r"head 'sharp' does not take these options: .*'sharpp'"
        ):
            make_head("sharp", 5, sharpp=3.0)
    finally:
        _REGISTRY.pop("sharp")


def test_integers_of_numpy():
    head = make_head("natural", numpy.int64(5))
    assert head.num_categories == 5 and type(head.num_categories) is int


@pytest.mark.parametrize("name", GRID)
def test_built_on_the_meta_device(name):
    with torch.device("meta"):
        head = make(name, 5)
    assert head.probs(torch.zeros(head.num_scores)).shape == (5,)


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


def test_numbering_of_nodes_at_four_categories():
    a, b, c = torch.sigmoid(torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64))
    p = make_head("sigmoid", 4).probs(torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64))
    # category bits 00, 01, 10, 11: bit 1 takes a(s), node 1 is below bit 0, node 2 below bit 1
    want = torch.stack([(1 - a) * (1 - b), (1 - a) * b, a * (1 - c), a * c])
    assert torch.allclose(p, want, atol=1e-15)


@pytest.mark.parametrize("K", [2, 3, 5, 18, 1000, 131072])
@pytest.mark.parametrize("name", GRID)
def test_zero_scores_are_uniform(name, K):
    head = make(name, K)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 4e-6)):
        p = head.probs(torch.zeros(head.num_scores, dtype=dtype))
        assert (p * K - 1).abs().max() < tolerance


@pytest.mark.parametrize("name", TREES)
def test_uniform_at_zero_can_be_turned_off(name):
    p = make(name, 3, uniform_at_zero=False).probs(torch.zeros(2))
    assert torch.allclose(p, torch.tensor([0.5, 0.25, 0.25]))
    assert torch.equal(right_shares(16), torch.full((15,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("K", [4, 5])
@pytest.mark.parametrize("name", TREES)
def test_center_shifts_the_scores(name, K):
    scores = torch.randn(3, K - 1, dtype=torch.float64)
    shifted = make(name, K, center=0.7).log_probs(scores + 0.7)
    assert torch.allclose(shifted, make(name, K).log_probs(scores), atol=1e-13)


def test_amplitude_stretches_the_scores():
    scores = torch.rand(3, 7, dtype=torch.float64) - 0.5
    narrow = make_head("natural", 8, amplitude=1.0).log_probs(scores)
    wide = make_head("natural", 8, amplitude=10.0).log_probs(10 * scores)
    assert torch.allclose(narrow, wide, atol=1e-12)
    assert torch.equal(
        make_head("natural", 2, amplitude=1.0).probs(torch.tensor([0.5])), torch.tensor([0.0, 1.0])
    )


def test_sigmoid_and_natural_have_the_same_slope_at_zero():
    for name in ("sigmoid", "natural"):
        head = make(name, 2)
        slope = torch.autograd.functional.jacobian(head.probs, torch.zeros(1))[1, 0]
        assert slope == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("K", CATEGORIES)
def test_sparsemax_is_entmax_s(K):
    head = make_head("sparsemax", K)
    for scale in (0.1, 1.0, 10.0):
        scores = random_scores(head, rows=50, scale=scale)
        assert (head.probs(scores) - sparsemax(scores, dim=-1)).abs().max() < 1e-12


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
        assert (head.probs(head.inverse(p)) - p).abs().max() < (1e-6 if name in SEARCHED else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
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
        assert (back - p).abs().max() < (1e-5 if name in SEARCHED else 1e-6)
        if name not in SEARCHED:  # a search ends before infinity
            assert torch.equal(back == 0, p == 0)
    broken = torch.full((K,), 1 / K, dtype=dtype)
    broken[0] = torch.nan
    assert head.inverse(broken).isnan().any()


# ---------------------------------------------------------------- a head known by log_split


@pytest.mark.parametrize("K", [2, 5, 8])
def test_a_head_of_one_method(K):
    head = CauchyHead(K)
    scores = random_scores(head, rows=3)
    assert torch.allclose(head.probs(scores).sum(-1), torch.ones(3, dtype=torch.float64))
    assert (head.probs(torch.zeros(K - 1, dtype=torch.float64)) - 1 / K).abs().max() < 1e-9
    p = torch.softmax(torch.randn(4, K, dtype=torch.float64), -1)
    assert (head.probs(head.inverse(p)) - p).abs().max() < 1e-9
    for row in scores:
        assert torch.allclose(head.fisher(row), autograd_fisher(head, row), atol=1e-9)
    assert torch.equal(copy.deepcopy(head).log_probs(scores), head.log_probs(scores))
    away = CauchyHead(K, center=1.0)
    assert torch.allclose(away.log_probs(scores + 1.0), head.log_probs(scores), atol=1e-9)


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

    def test_layout_does_not_matter(self, name, K):
        head = make(name, K)
        scores = torch.randn(head.num_scores, 6).t()
        same = torch.allclose if name in SEARCHED else torch.equal
        assert same(head.log_probs(scores), head.log_probs(scores.contiguous()))
        leaf = torch.randn(6, head.num_scores, requires_grad=True)
        weight = torch.randn(K, 6)
        (strided,) = torch.autograd.grad((head.log_probs(leaf).t() * weight).sum(), leaf)
        (plain,) = torch.autograd.grad((head.log_probs(leaf) * weight.t().contiguous()).sum(), leaf)
        assert same(strided, plain)

    def test_func_transforms(self, name, K):
        head = make(name, K)
        scores = torch.randn(6, head.num_scores)
        jacobian = torch.func.vmap(torch.func.jacrev(head.log_probs))(scores)
        forward = torch.func.vmap(torch.func.jacfwd(head.log_probs))(scores)
        assert torch.allclose(jacobian, forward, atol=1e-5)
        leaf = scores.clone().requires_grad_()
        (want,) = torch.autograd.grad(head.log_probs(leaf)[:, 1].sum(), leaf)
        assert torch.allclose(jacobian[:, 1], want, atol=1e-4, rtol=1e-4)
        got = torch.func.grad(lambda s: head(s).entropy().sum())(scores)
        (want,) = torch.autograd.grad(head(leaf).entropy().sum(), leaf)
        assert torch.allclose(got, want, atol=1e-5)
        assert torch.allclose(
            torch.func.vmap(head.log_probs, in_dims=1, out_dims=1)(
                scores[:, None].expand(6, 3, -1)
            ),
            head.log_probs(scores)[:, None].expand(6, 3, -1),
            atol=1e-5,
        )

    def test_autocast(self, name, K):
        head = make(name, K)
        net = torch.nn.Linear(4, head.num_scores)
        x = torch.randn(6, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q = head(net(x))
        assert q.logits.dtype == torch.float32
        assert torch.allclose(q.probs.sum(-1), torch.ones(6), atol=1e-6)
        q.entropy().sum().backward()
        assert net.weight.grad is not None and net.weight.grad.isfinite().all()

    def test_copies(self, name, K):
        head = make(name, K)
        scores = torch.randn(3, head.num_scores)
        want = head.log_probs(scores)
        stream = io.BytesIO()
        torch.save(head, stream)
        stream.seek(0)
        copies = (
            copy.deepcopy(head),
            pickle.loads(pickle.dumps(head)),
            torch.load(stream, weights_only=False),
        )
        for again in copies:
            assert torch.equal(again.log_probs(scores), want)

    def test_state_dict_is_empty_and_casts_keep_precision(self, name, K):
        head = make(name, K)
        scores = torch.randn(3, head.num_scores, dtype=torch.float64)
        want = head.log_probs(scores)
        assert not head.state_dict() and not list(head.parameters())
        for cast in (head.half(), head.bfloat16(), head.double(), head.float(), head.to("cpu")):
            assert torch.equal(cast.log_probs(scores), want)
        assert make(name, K).to("meta") is not None

    def test_forward_gives_a_distribution(self, name, K):
        head = make(name, K)
        q = head(torch.randn(3, head.num_scores))
        assert isinstance(q, HeadCategorical)
        assert q.batch_shape == (3,) and q.event_shape == ()
        assert repr(head).startswith(type(head).__name__)
