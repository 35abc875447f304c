"""Trees: tails, orders of classes, and constants that follow options, parameters and devices."""

import copy
import io
import math
import pickle

import numpy
import pytest
import torch
from cases import (
    CATNAT,
    DTYPES,
    GRID,
    CauchyHead,
    assert_uniform,
    autograd_fisher,
    both_floats,
    exact_log_probs,
    make,
    slow,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from catnat import CatnatHead, NaturalHead, SigmoidHead, make_head
from catnat.heads.activations import CustomActivation
from catnat.kernels import cpu, reference
from catnat.numerics import LOG_ZERO, largest_score

TAILS = (1e-12, 0.005, 0.05, 0.4)


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


@pytest.mark.parametrize("tail", [0.005, 0.05])
@both_floats
def test_the_middle_is_the_papers_split_bit_for_bit(tail, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda: None)
    head = make_head("natural", 2, tail=tail)
    paper = make_head("natural", 2)
    scores = torch.linspace(-4, 4, 801, dtype=dtype)[:, None]
    middle = paper.probs(scores).amin(-1) > tail * (1 + 1e-6)
    assert 0.3 < middle.float().mean() < 0.8
    for method in ("log_probs", "information", "fisher_diagonal"):
        got = getattr(head, method)(scores)
        want = getattr(paper, method)(scores)
        assert torch.equal(got[middle], want[middle])
        assert not torch.equal(got[~middle], want[~middle])
    assert (head.information(scores)[middle] == 0.25).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["plain", "fused", "vmap"])
def test_no_score_is_without_gradient(dtype, how, monkeypatch):
    if how == "plain":
        monkeypatch.setattr(cpu, "library", lambda: None)
    head = make_head("natural", 4, tail=0.05)
    log_probs = torch.func.vmap(head.log_probs) if how == "vmap" else head.log_probs
    for size in (3.0, 3.2, 10.0, 1e3, 6e4):
        for sign in (1, -1):
            scores = torch.full((1, 3), sign * size, dtype=dtype, requires_grad=True)
            unlikely = 0 if sign > 0 else 3
            (grad,) = torch.autograd.grad(log_probs(scores)[0, unlikely], scores)
            path = [0, 1] if sign > 0 else [0, 2]
            want = -sign * head.activation.steepness
            assert grad[0, path].tolist() == pytest.approx([want, want], rel=1e-2)
            assert not head.saturated(scores.detach()).any()


@pytest.mark.parametrize("tail", [0.05, 0.34, 0.45, 0.4999])
@pytest.mark.parametrize("K", [3, 5, 18, 1000])
def test_zero_scores_are_uniform_even_where_a_center_lies_in_the_tail(K, tail):
    assert_uniform(make_head("natural", K, tail=tail))


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


def explodes(x):
    """NaN at infinity, and so is its gradient."""
    y = x.sinh()
    return torch.nn.functional.logsigmoid(-y + 0 * x), torch.nn.functional.logsigmoid(y - 0 * x)


@pytest.mark.parametrize("function", [CauchyHead(2).log_activation, explodes])
@pytest.mark.parametrize("how", ["plain", "vmap"])
def test_a_custom_split_is_certain_at_infinite_scores(function, how):
    activation = CustomActivation(function)
    scores = torch.tensor([[math.inf, -math.inf, 0.5]])
    constants = activation.node_constants(torch.tensor([0.0, 1.0, -1.0]), torch.float32)

    def log_probs(s):
        return reference.tree_log_probs(s, activation, constants)

    def fisher(s):
        return activation.information(s, constants)

    if how == "vmap":
        log_probs = torch.func.vmap(log_probs)
        fisher = torch.func.vmap(fisher)
    leaf = scores.clone().requires_grad_()
    out = log_probs(leaf)
    assert (out.exp() == 0).tolist() == [[True, True, False, False]]
    assert out[0, 0] == LOG_ZERO and out[0, 1] == LOG_ZERO
    (grad,) = torch.autograd.grad((out * torch.arange(1.0, 5.0)).sum(), leaf)
    assert grad[0, :2].tolist() == [0.0, 0.0] and grad[0, 2].isfinite() and grad[0, 2] != 0
    assert fisher(scores)[0, :2].tolist() == [0.0, 0.0] and fisher(scores)[0, 2] > 0


ORDER = [3, 0, 4, 1, 2]  # the leaf of class 0 is 3
CLASSES = [1, 3, 4, 0, 2]  # the class of leaf 0 is 1


def ordered(name, K=5, order=ORDER, **options):
    if name == "own":
        return CauchyHead(K, order=order, **options)
    return make_head(name, K, order=order, **options)


TREES = (*CATNAT, "own")


@both_floats
@pytest.mark.parametrize("name", TREES)
def test_class_k_has_the_probability_of_leaf_order_k(name, dtype):
    head = ordered(name)
    plain = ordered(name, order=None)
    scores = torch.randn(7, 4, dtype=dtype)
    for method in ("log_probs", "probs"):
        leaves = getattr(plain, method)(scores)
        got = getattr(head, method)(scores)
        assert torch.equal(got, leaves[:, ORDER])
        assert torch.equal(got[:, CLASSES], leaves)
    q = head(scores)
    assert torch.equal(q.mode, plain.probs(scores)[:, ORDER].argmax(-1))
    value = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    picked = plain.log_probs(scores).gather(-1, torch.tensor(ORDER)[value][:, None])[:, 0]
    assert torch.allclose(q.log_prob(value), picked)


@pytest.mark.parametrize("name", TREES)
def test_gradients_and_the_fisher_matrix_know_the_order(name):
    head = ordered(name)
    plain = ordered(name, order=None)
    scores = torch.randn(4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian
    assert torch.equal(jacobian(head.log_probs, scores), jacobian(plain.log_probs, scores)[ORDER])
    assert torch.allclose(head.fisher(scores), autograd_fisher(head, scores), atol=1e-9)
    assert torch.equal(head.fisher(scores), plain.fisher(scores))  # a permutation changes nothing
    assert torch.allclose(head(scores).entropy(), plain(scores).entropy())
    p = torch.softmax(torch.randn(6, 5, dtype=torch.float64), -1)
    assert torch.allclose(head.probs(head.inverse(p)), p, atol=1e-9)


@pytest.mark.parametrize("name", TREES)
def test_an_ordered_head_under_transforms_and_in_copies(name):
    head = ordered(name)
    scores = torch.randn(3, 4)
    want = head.log_probs(scores)
    torch._dynamo.reset()
    compiled = torch.compile(ordered(name).log_probs, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(scores), want, atol=1e-6)
    assert torch.allclose(torch.func.vmap(head.log_probs)(scores), want, atol=1e-6)
    for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), head.half().double()):
        assert torch.equal(again.log_probs(scores), want)
    assert not head.state_dict()  # the order is an option, not a weight
    with torch.device("meta"):
        far = ordered(name)
    assert torch.equal(far.log_probs(scores), want)
    assert torch.equal(far.to_empty(device="cpu").log_probs(scores), want)


@pytest.mark.parametrize(
    "order", [torch.tensor(ORDER), numpy.array(ORDER), tuple(ORDER), list(map(numpy.int64, ORDER))]
)
def test_an_order_may_be_a_list_or_a_tensor(order):
    assert make_head("sigmoid", 5, order=order).order == tuple(ORDER)


class Learned(CatnatHead):
    """A split with a slope for the whole head and a shift for every node, both learned."""

    def __init__(self, num_categories, **options):
        super().__init__(num_categories, **options)
        self.log_slope = nn.Parameter(torch.tensor(0.3))
        self.shift = nn.Parameter(torch.linspace(-1, 1, self.num_scores))

    def log_activation(self, x):
        y = self.log_slope.exp() * x + self.shift
        return nn.functional.logsigmoid(-y), nn.functional.logsigmoid(y)


class Sharp(CatnatHead):
    """A split with a plain number."""

    sharp = 2.0

    def log_activation(self, x):
        return tuple(nn.functional.logsigmoid(sign * (self.sharp * x + 1)) for sign in (-1, 1))


# ------------------------------------------------------------------------------------ never stale


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (NaturalHead(5), "center"),
        (NaturalHead(5), "amplitude"),
        (NaturalHead(5), "activation"),
        (SigmoidHead(4), "uniform_at_zero"),
        (CauchyHead(5), "center"),
    ],
)
def test_an_option_of_a_finished_head_cannot_change(head, name):
    before = getattr(head, name)
    with pytest.raises(AttributeError, match=f"{name} of a .* cannot change; make another head"):
        setattr(head, name, 1.0)
    assert getattr(head, name) == before
    p = torch.softmax(torch.randn(3, head.num_categories), -1)
    assert torch.allclose(head.probs(head.inverse(p)), p, atol=1e-6)
    assert getattr(copy.deepcopy(head), name) is not None


@pytest.mark.parametrize("K", [2, 4, 5, 18])
def test_a_split_with_parameters_stays_uniform_at_zero_when_they_move(K):
    head = Learned(K)
    assert_uniform(head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    for _ in range(3):
        loss = head.log_probs(torch.randn(8, K - 1))[:, 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert_uniform(head)
    with torch.no_grad():
        head.shift.data.fill_(2.0)  # an optimizer that torch does not see
    assert_uniform(head)
    p = torch.softmax(torch.randn(3, K, dtype=torch.float64), -1)
    assert torch.allclose(head.probs(head.inverse(p)), p, atol=1e-9)


def test_the_gradient_of_a_split_with_parameters_knows_that_the_center_moves():
    head = Learned(5).double()
    zero = torch.zeros(4, dtype=torch.float64)
    grads = torch.autograd.grad(head.log_probs(zero)[1], list(head.parameters()))
    assert all(grad.abs().max() < 1e-7 for grad in grads)  # uniform whatever the parameters
    scores = torch.randn(2, 4, dtype=torch.float64)

    def loss(slope, shift):
        values = {"log_slope": slope, "shift": shift}
        return torch.func.functional_call(head, values, (scores,)).logits[:, 1].sum()

    parameters = tuple(p.detach().requires_grad_() for p in head.parameters())
    assert torch.autograd.gradcheck(loss, parameters, atol=1e-5)


@pytest.mark.parametrize("K", [4, 5])
def test_a_split_with_a_plain_number_follows_it(K):
    head = Sharp(K)
    assert_uniform(head)
    head.sharp = 5.0
    assert_uniform(head)
    assert torch.equal(
        head.log_probs(torch.ones(K - 1)), copy.deepcopy(head).log_probs(torch.ones(K - 1))
    )


def test_centers_are_searched_once_for_nodes_with_equal_shares(monkeypatch):
    head = Sharp(1000)
    sizes = []
    log_activation = Sharp.log_activation

    def counted(self, x):
        sizes.append(x.numel())
        return log_activation(self, x)

    monkeypatch.setattr(Sharp, "log_activation", counted)
    assert_uniform(head)
    assert sum(sizes) < 40 * head.num_scores
    assert head.log_probs(torch.zeros(2, 999, device="meta")).shape == (2, 1000)


# ------------------------------------------------------------------------------- where they are


@pytest.mark.parametrize("K", [4, 5])
@pytest.mark.parametrize("name", GRID)
def test_a_head_is_built_on_the_device_of_the_context(name, K):
    with torch.device("meta"):
        head = make(name, K)
    assert all(buffer.device.type == "meta" for buffer in head.buffers())
    scores = torch.randn(2, head.num_scores)
    want = make(name, K).log_probs(scores)
    assert torch.equal(head.to_empty(device="cpu").log_probs(scores), want)
    with torch.device("meta"):
        head = make(name, K)
    assert torch.equal(head.log_probs(scores), want)  # the constants follow the scores
    assert head.log_probs(scores.to("meta")).device.type == "meta"
    assert torch.equal(head.log_probs(scores), want)


@both_floats
@pytest.mark.parametrize("name", [*GRID, "own"])
def test_a_head_built_in_inference_mode_can_be_trained(name, dtype):
    with torch.inference_mode():
        head = CauchyHead(5) if name == "own" else make(name, 5)
        head.log_probs(torch.zeros(head.num_scores, dtype=dtype))
        head.to("cpu")
    scores = torch.randn(3, head.num_scores, dtype=dtype, requires_grad=True)
    head.log_probs(scores)[:, 0].sum().backward()
    assert scores.grad.isfinite().all() and scores.grad.any()


@pytest.mark.parametrize(("make", "K"), [(CauchyHead, 5), slow(Learned, 4)])
def test_a_head_of_ones_own_compiles_and_exports_before_an_eager_call(make, K):
    want = make(K).probs(torch.ones(2, K - 1))
    torch._dynamo.reset()
    compiled = torch.compile(make(K).probs, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(torch.ones(2, K - 1)), want, atol=1e-6)
    exported = torch.export.export(Probs(make(K)), (torch.zeros(2, K - 1),))
    assert torch.allclose(exported.module()(torch.ones(2, K - 1)), want, atol=1e-6)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert make(K).probs(torch.zeros(2, K - 1)).shape == (2, K)
    head = make(K)
    with FakeTensorMode(allow_non_fake_inputs=True):
        head.probs(torch.zeros(2, K - 1))
    assert torch.allclose(head.probs(torch.ones(2, K - 1)), want)  # nothing fake was kept


class Probs(nn.Module):
    """The probabilities of a head."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, scores):
        return self.head.probs(scores)


# ------------------------------------------------------------------------ seams of the constants


def test_a_loaded_head_has_constants_on_its_own_device():
    head = NaturalHead(5)
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    loaded = torch.load(file, map_location="meta", weights_only=False)
    scores = torch.randn(3, 4)
    assert torch.equal(loaded.probs(scores), head.probs(scores))
    assert len(pickle.dumps(NaturalHead(100_003))) < 10_000


@pytest.mark.parametrize(("K", "options"), [(5, {}), (8, {"order": [7, 6, 5, 4, 3, 2, 1, 0]})])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_fake_tensors_pass_through_trees(mode, K, options):
    head = NaturalHead(K, **options)
    scores = torch.randn(2, K - 1)
    traced = make_fx(lambda x: head.log_probs(x), tracing_mode=mode)(torch.zeros(2, K - 1))
    assert torch.allclose(traced(scores), head.log_probs(scores), atol=1e-6)
    with FakeTensorMode():
        q = head(torch.zeros(2, K - 1))
        assert q.logits.shape == (2, K) and q.sample().shape == (2,)


@pytest.mark.parametrize("mix", [0.0, 0.1])
@pytest.mark.parametrize("name", GRID)
def test_every_method_knows_the_device_meta(name, mix):
    head = make_head("softmax", 5, mix=mix) if name == "softmax" else make(name, 5)
    for dtype in (torch.float32, torch.float16):
        scores = torch.zeros(2, head.num_scores, device="meta", dtype=dtype)
        assert head.fisher(scores).shape == (2, head.num_scores, head.num_scores)
        assert head.mean_fisher(scores).shape == (head.num_scores, head.num_scores)
        assert head.natural_gradient(scores, scores).shape == scores.shape
        assert head(scores).sample().shape == (2,)


def test_path_kl_compares_trees_by_their_leaves():
    plain, one, other = (NaturalHead(5, order=order) for order in (None, ORDER, list(ORDER)))
    assert one.tree_id == other.tree_id != plain.tree_id
    q = one(torch.zeros(4))
    p = other(torch.ones(4))
    value = torch.arange(5)
    exact = torch.distributions.kl_divergence(q, p)
    assert torch.allclose(q.path_kl(p, value).mean(), exact)  # q is uniform
    assert not torch.allclose(q.path_kl(p, value), exact)
    p = plain(torch.ones(4))
    exact = torch.distributions.kl_divergence(q, p)
    assert torch.allclose(q.path_kl(p, value), exact)
