"""natural with a tail: the paper's split in the middle, an exponential beyond."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from cases import DTYPES, autograd_fisher, exact_log_probs
from cases_cli import last, run

from catnat import make_head
from catnat.numerics import LOG_ZERO, largest_score
from catnat.ops import native, reference
from catnat.splits import CustomSplit, NaturalSplit
from catnat.tree import subtree_sums

TAILS = (1e-12, 0.005, 0.05, 0.4)
SIZES = (2, 3, 5, 8, 18)
built = pytest.mark.skipif(native.library() is None, reason="the C kernels were not built")


@pytest.mark.parametrize("amplitude", [2 * math.pi, 1.3])
@pytest.mark.parametrize("K", [3, 8, 18])
@pytest.mark.parametrize("tail", TAILS)
def test_definition_in_sixty_digits(tail, K, amplitude):
    head = make_head("natural", K, tail=tail, amplitude=amplitude)
    scores = amplitude * (0.5 * torch.randn(6, K - 1, dtype=torch.float64)).float()
    exact = [
        [float(x) for x in exact_log_probs("natural", row.tolist(), tail=tail, amplitude=amplitude)]
        for row in scores
    ]
    want = torch.tensor(exact, dtype=torch.float64)
    assert (want[:, 0] < math.log(tail)).any() or tail < 1e-3
    for got, error in ((head.log_probs(scores.double()), 1e-12), (head.log_probs(scores), 2e-6)):
        assert ((got - want).abs() <= error * (1 + want.abs())).all()


def test_without_a_tail_the_split_is_the_papers_bit_for_bit():
    scores = torch.cat((4 * torch.randn(50, 7), torch.tensor([[math.pi, -math.pi] * 3 + [9.0]])))
    for dtype in (torch.float32, torch.float64):
        plain, zero = make_head("natural", 8), make_head("natural", 8, tail=0)
        assert torch.equal(plain.log_probs(scores.to(dtype)), zero.log_probs(scores.to(dtype)))
        left, right = NaturalSplit().log_split(scores.to(dtype), None)
        outside = scores.abs() > 3.2
        assert (torch.minimum(left, right)[outside] == LOG_ZERO).all()
        assert (torch.maximum(left, right)[outside] == 0).all()


@pytest.mark.parametrize("tail", [0.005, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_middle_is_the_papers_split_bit_for_bit(tail, dtype, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    head, paper = make_head("natural", 2, tail=tail), make_head("natural", 2)
    scores = torch.linspace(-4, 4, 801, dtype=dtype)[:, None]
    middle = paper.probs(scores).amin(-1) > tail * (1 + 1e-6)
    assert 0.3 < middle.float().mean() < 0.8
    for method in ("log_probs", "information", "fisher_diagonal"):
        got, want = getattr(head, method)(scores), getattr(paper, method)(scores)
        assert torch.equal(got[middle], want[middle])
        assert not torch.equal(got[~middle], want[~middle])
    assert (head.information(scores)[middle] == 0.25).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tail", TAILS)
def test_value_and_slope_meet_at_the_joint(tail, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(native, "library", lambda: None)
    head = make_head("natural", 2, tail=tail)
    split = head.split
    width = split.joint / 2
    for dtype, error in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        joint = math.pi - split.joint
        scores = torch.tensor([[-joint - 1e-9 * width], [-joint + 1e-9 * width]], dtype=dtype)
        if dtype == torch.float32 and tail < 1e-3:
            continue  # float32 has no numbers this close to the joint
        scores.requires_grad_()
        for log_probs in head.log_probs(scores).unbind(-1):
            (grad,) = torch.autograd.grad(log_probs.sum(), scores, retain_graph=True)
            assert torch.allclose(log_probs[0], log_probs[1], rtol=error * 10)
            assert torch.allclose(grad[0], grad[1], rtol=error * 1000)
        fisher = head.fisher_diagonal(scores.detach())
        assert torch.allclose(fisher, torch.full_like(fisher, 0.25), rtol=error * 1000)


@pytest.mark.parametrize("K", [2, 3, 5, 8])
@pytest.mark.parametrize("tail", TAILS)
def test_fisher_is_diagonal_and_agrees_with_autograd(tail, K):
    head = make_head("natural", K, tail=tail)
    for row in 2.5 * torch.randn(10, K - 1, dtype=torch.float64):
        exact = autograd_fisher(head, row)
        assert torch.allclose(head.fisher(row), exact, atol=1e-9)
        assert torch.allclose(head.fisher_diagonal(row), exact.diagonal(), atol=1e-9)
        single = head.fisher(row.float()).double()
        assert torch.allclose(single, exact, rtol=1e-4, atol=1e-5)
    scores, grad = torch.randn(2, 4, K - 1, dtype=torch.float64) * 2
    diagonal = head.fisher_diagonal(scores)
    want = torch.where(diagonal == 0, 0.0, grad / diagonal)
    assert torch.allclose(head.natural_gradient(scores, grad), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["plain", "fused", "vmap"])
def test_no_score_is_without_gradient(dtype, how, monkeypatch):
    if how == "plain":
        monkeypatch.setattr(native, "library", lambda: None)
    head = make_head("natural", 4, tail=0.05)
    log_probs = torch.func.vmap(head.log_probs) if how == "vmap" else head.log_probs
    for size in (3.0, 3.2, 10.0, 1e3, 6e4):
        for sign in (1, -1):
            scores = torch.full((1, 3), sign * size, dtype=dtype, requires_grad=True)
            unlikely = 0 if sign > 0 else 3
            (grad,) = torch.autograd.grad(log_probs(scores)[0, unlikely], scores)
            path = [0, 1] if sign > 0 else [0, 2]
            want = -sign * head.split.steepness
            assert grad[0, path].tolist() == pytest.approx([want, want], rel=1e-2)
            assert not head.saturated(scores.detach()).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["plain", "fused", "vmap"])
@pytest.mark.parametrize("K", [4, 5])
def test_infinite_scores_are_certain_and_nan_is_never_silent(how, dtype, K, monkeypatch):
    if how == "plain":
        monkeypatch.setattr(native, "library", lambda: None)
    head = make_head("natural", K, tail=0.05)
    log_probs = torch.func.vmap(head.log_probs) if how == "vmap" else head.log_probs
    scores = torch.randn(5, K - 1).to(dtype)
    scores[0, 0], scores[1, 0], scores[2] = math.inf, -math.inf, math.inf
    scores[3], scores[4, 0] = torch.finfo(dtype).max, math.nan
    leaf = scores.clone().requires_grad_()
    out = log_probs(leaf)
    assert out[:4].isfinite().all() and out[4].isnan().all()
    certain = out[:2].double().exp()
    below = int(subtree_sums(torch.ones(K))[0][0])  # leaves on the left of the root
    assert torch.allclose(certain.sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-6)
    assert (certain == 0).sum(-1).tolist() == [below, K - below]
    assert (out[2].double().exp() == 1).sum() == 1 and (out[2].double().exp() == 0).sum() == K - 1
    (grad,) = torch.autograd.grad((out * torch.linspace(1, 2, K)).sum(), leaf)
    assert not grad[scores.isinf()].any() and grad[:4].isfinite().all() and grad[4, 0].isnan()
    fisher = head.fisher_diagonal(scores)
    assert not fisher[scores.isinf()].any() and fisher[:4].isfinite().all()
    assert fisher[4].isnan().all()
    assert head.diagnostics(scores)[-1] == 0


@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("tail", TAILS)
def test_the_inverse_reaches_into_the_tail(tail, K):
    head = make_head("natural", K, tail=tail)
    for spread in (0.5, 4.0, 12.0):
        p = torch.softmax(spread * torch.randn(20, K, dtype=torch.float64), -1)
        back = head.log_probs(head.inverse(p))
        assert torch.allclose(back, p.log(), atol=1e-6, rtol=1e-6)
        assert torch.allclose(head.probs(head.inverse(p.float())), p.float(), atol=1e-5)
    for dtype in (torch.float32, torch.float64):
        for p in torch.eye(K, dtype=dtype):
            scores = head.inverse(p)
            assert scores.isfinite().all()
            assert torch.equal(head.probs(scores), p)
        broken = torch.full((K,), 1 / K, dtype=dtype)
        broken[0] = math.nan
        assert head.inverse(broken).isnan().any()


@pytest.mark.parametrize("tail", [0.05, 0.34, 0.45, 0.4999])
@pytest.mark.parametrize("K", [3, 5, 18, 1000])
def test_zero_scores_are_uniform_even_where_a_centre_lies_in_the_tail(K, tail):
    head = make_head("natural", K, tail=tail)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 4e-6)):
        p = head.probs(torch.zeros(K - 1, dtype=dtype))
        assert (p * K - 1).abs().max() < tolerance


@pytest.mark.parametrize("K", [2, 3, 8])
@pytest.mark.parametrize("tail", [0.005, 0.05, 0.4])
def test_first_and_second_derivatives(tail, K):
    head = make_head("natural", K, tail=tail)
    scores = 2.5 * torch.randn(2, K - 1, dtype=torch.float64)
    scores.requires_grad_()
    assert torch.autograd.gradcheck(head.log_probs, scores)
    assert torch.autograd.gradgradcheck(head.log_probs, scores)


@pytest.mark.parametrize("tail", [-0.1, 0.5, 1.0, 1e-31, math.nan, math.inf])
def test_a_bad_tail_is_named(tail):
    with pytest.raises(ValueError, match=r"tail must be 0 or lie in \[1e-30, 0.5\), got "):
        make_head("natural", 4, tail=tail)


def test_the_tail_is_an_option_like_the_others():
    head = make_head("natural", 5, tail=0.05)
    assert "tail=0.05" in repr(head) and "tail" not in repr(make_head("natural", 5))
    with pytest.raises(AttributeError, match="tail of a NaturalHead cannot change"):
        head.tail = 0.1
    with pytest.raises(ValueError, match="'sigmoid' has no option 'tail'"):
        make_head("sigmoid", 5, tail=0.05)
    scores = 4 * torch.randn(3, 4)
    for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), head.half()):
        assert torch.equal(again.log_probs(scores), head.log_probs(scores))


@pytest.mark.parametrize("options", [{"amplitude": 1e-15}, {"amplitude": 1e15}, {}])
@pytest.mark.parametrize("tail", [1e-30, 1e-12, 0.4999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_options_stay_finite(dtype, tail, options):
    head = make_head("natural", 5, tail=tail, **options)
    for size in (0.0, 1e-20, 1.0, 3.2, 1e4, torch.finfo(dtype).max):
        scores = torch.full((2, 4), size, dtype=dtype)
        scores[1] *= -1
        scores.requires_grad_()
        out = head.log_probs(scores)
        assert out.isfinite().all() and (out >= -4 * largest_score(out.dtype)).all()
        assert torch.allclose(out.exp().sum(-1).double(), torch.ones(2, dtype=torch.float64))
        (grad,) = torch.autograd.grad(out.sum(), scores)
        assert grad.isfinite().all()
        assert head.fisher_diagonal(scores.detach()).isfinite().all()


# ------------------------------------------------------------------- a split by its function alone


def cauchy(x):
    one = torch.ones_like(x)
    return torch.log(torch.atan2(one, x) / torch.pi), torch.log(torch.atan2(one, -x) / torch.pi)


def explodes(x):
    """Not a number at infinity, with a gradient that is none either."""
    y = x.sinh()
    return torch.nn.functional.logsigmoid(-y + 0 * x), torch.nn.functional.logsigmoid(y - 0 * x)


@pytest.mark.parametrize("function", [cauchy, explodes])
@pytest.mark.parametrize("how", ["plain", "vmap", "compiled"])
def test_a_custom_split_is_certain_at_infinite_scores(function, how):
    split = CustomSplit(function)
    scores = torch.tensor([[math.inf, -math.inf, 0.5]])
    constants = split.node_constants(torch.tensor([0.0, 1.0, -1.0]), torch.float32)

    def log_probs(s):
        return reference.tree_log_probs(s, split, constants)

    def fisher(s):
        left, right = split.slopes(s, constants)
        return left * right

    if how == "vmap":
        log_probs, fisher = torch.func.vmap(log_probs), torch.func.vmap(fisher)
    if how == "compiled":
        torch._dynamo.reset()
        log_probs = torch.compile(log_probs, fullgraph=True, backend="aot_eager")
        fisher = torch.compile(fisher, fullgraph=True, backend="aot_eager")
    leaf = scores.clone().requires_grad_()
    out = log_probs(leaf)
    assert (out.exp() == 0).tolist() == [[True, True, False, False]]
    assert out[0, 0] == LOG_ZERO and out[0, 1] == 2 * LOG_ZERO
    (grad,) = torch.autograd.grad((out * torch.arange(1.0, 5.0)).sum(), leaf)
    assert grad[0, :2].tolist() == [0.0, 0.0] and grad[0, 2].isfinite() and grad[0, 2] != 0
    assert fisher(scores)[0, :2].tolist() == [0.0, 0.0] and fisher(scores)[0, 2] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_custom_split_has_a_finite_gradient_at_the_largest_scores(dtype):
    """The derivative of log(atan2(1, x)) is 0 times infinity there."""
    limit = torch.finfo(dtype).max
    scores = torch.tensor([limit, -limit, 0.5], dtype=dtype, requires_grad=True)
    out = reference.tree_log_probs(scores, CustomSplit(cauchy), None)
    (grad,) = torch.autograd.grad(out[0] + 2 * out[1] + out[3], scores)
    assert out.isfinite().all() and grad.isfinite().all() and grad[:2].tolist() == [0.0, 0.0]


# ----------------------------------------------------------------------------------- C and Triton


def awkward_scores(rows: int, S: int) -> torch.Tensor:
    """Scores of many sizes, some on, just inside and beyond the edges."""
    scores = torch.randn(rows, S) * 10 ** (torch.rand(rows, 1) * 3 - 1.5)
    edge = torch.tensor([math.pi, -math.pi, 3.1415925, 3.14, 4.0, -1e20, 1e20, 0.0])
    take = torch.rand(rows, S) < 0.05
    return torch.where(take, edge[torch.randint(len(edge), (rows, S))], scores)


@built
@pytest.mark.parametrize("K", [2, 5, 33, 1025])
@pytest.mark.parametrize("tail", TAILS)
def test_the_c_kernels_agree_with_plain_torch(tail, K):
    head = make_head("natural", K, tail=tail)
    scores, grad = awkward_scores(37, K - 1), torch.randn(37, K)
    exact, given = scores.double(), (head.split, head.constants32)
    got = native.tree_forward(scores, *given)
    want = reference.tree_log_probs(exact, head.split, head.constants64)
    assert ((got - want).abs() <= 2e-6 * (1 + want.abs())).all()
    got = native.tree_backward(scores, grad, *given)
    want = reference.tree_vjp(exact, grad.double(), head.split, head.constants64)
    left, right = subtree_sums(grad.abs().double())  # what rounding is relative to
    slopes = head.split.slopes(exact, head.constants64)
    scale = left * slopes[0] + right * slopes[1]
    assert ((got - want).abs() <= 4e-6 * (scale + 1e-6)).all()
    got = native.tree_fisher(scores, *given)
    want = head.fisher_diagonal(exact)
    assert ((got[:, :-1] - want).abs() <= 1e-5 * want + 1e-20).all()
    assert not got[:, -1].any()


# --------------------------------------------------------------------- where users can pass a tail


def test_train_py_takes_a_tail(workspace, capfd):
    assert run(*workspace, "--head_options.tail=0.05") == 0
    kept = last()["hyper_parameters"]
    assert kept["head"] == "natural" and kept["head_options"] == {"tail": 0.05}
    capfd.readouterr()
    assert run(*workspace, "--head_options.tail=0.7") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "tail must be 0 or lie in [1e-30, 0.5), got 0.7" in line


@pytest.mark.parametrize("kind", ["PPO", "HeadPPO"])
def test_policies_take_a_tail(kind, tmp_path):
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    from cases_sb3 import SMALL, Guess

    from catnat.sb3 import HeadActorCriticPolicy, HeadPPO

    algorithm = HeadPPO if kind == "HeadPPO" else stable_baselines3.PPO
    options = {"head": "natural", "head_options": {"tail": 0.05}}
    model = algorithm(HeadActorCriticPolicy, Guess(), policy_kwargs=options, **SMALL).learn(32)
    model.save(tmp_path / "it")
    (head,) = algorithm.load(tmp_path / "it", device="cpu").policy.heads
    assert head.tail == 0.05 and not head.saturated(torch.full((4,), 9.0)).any()
