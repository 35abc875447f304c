"""The paper's Proposition, Theorem and Corollary, and everything built on the Fisher matrix."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CATEGORIES, GRID, TREES, autograd_fisher, leaf_path, make, random_scores, slow

from catnat import CategoricalHead, make_head
from catnat.fisher import (
    condition_number,
    fisher_trace,
    fisher_vector_product,
    module_scores,
    off_diagonal_mass,
    pullback_fisher,
    sampled_scores,
    score_fisher,
)

# ------------------------------------------------------------------------ the paper's claims


@pytest.mark.parametrize("K", CATEGORIES)
def test_proposition_softmax(K):
    head = make_head("softmax", K)
    for row in random_scores(head):
        p = torch.softmax(row, -1)
        claim = torch.diag(p) - torch.outer(p, p)
        assert (head.fisher(row) - claim).abs().max() < 1e-14
        assert (autograd_fisher(head, row) - claim).abs().max() < 1e-10


@pytest.mark.parametrize("K", [2, 3, 5, 8, 16, 33, 64])
def test_a_diagonal_entry_depends_on_at_most_log2_of_k_scores(K):
    """Sigmoid: on its own score and on those above it. Natural: on those above it alone."""
    deepest = math.ceil(math.log2(K))
    for name, own in (("sigmoid", 1), ("natural", 0)):
        head = make_head(name, K)
        scores = 0.5 * torch.randn(K - 1, dtype=torch.float64)
        slopes = torch.autograd.functional.jacobian(head.fisher_diagonal, scores)
        assert (slopes.abs() > 1e-13).sum(-1).max() == deepest - 1 + own


@pytest.mark.parametrize("K", CATEGORIES)
@pytest.mark.parametrize("name", TREES)
def test_theorem_catnat(name, K):
    """G is diagonal with P(node) a'^2 / (a (1 - a)); a and a' here from a two-category head."""
    head, split = (make(name, n, uniform_at_zero=False) for n in (K, 2))
    for row in random_scores(head).clamp(-2.8, 2.8):
        a = split.probs(row[:, None])[:, 1]
        slope = torch.func.vmap(torch.func.grad(lambda s: split.probs(s[None])[1]))(row)
        reach = torch.zeros(K - 1, dtype=torch.float64)
        for k, p in enumerate(head.probs(row)):
            for node, _ in leaf_path(k, K):
                reach[node] += p  # P(node) is the sum over the leaves below it
        claim = torch.diag(reach * slope**2 / (a * (1 - a)))
        assert (head.fisher(row) - claim).abs().max() < 1e-10
        assert (autograd_fisher(head, row) - claim).abs().max() < 1e-10


@pytest.mark.parametrize("amplitude", [2 * math.pi, 1.3])
@pytest.mark.parametrize("K", CATEGORIES)
def test_corollary_natural(K, amplitude):
    head = make_head("natural", K, amplitude=amplitude)
    for row in random_scores(head, scale=amplitude / 12).clamp(-amplitude / 4, amplitude / 4):
        reach = torch.zeros(K - 1, dtype=torch.float64)
        for k, p in enumerate(head.probs(row)):
            for node, _ in leaf_path(k, K):
                reach[node] += p
        claim = torch.diag(reach * (math.pi / amplitude) ** 2)
        scale = (math.pi / amplitude) ** 2
        assert (head.fisher(row) - claim).abs().max() < 1e-14 * scale * 10
        assert (autograd_fisher(head, row) - claim).abs().max() < 1e-10 * scale


def test_corollary_on_and_beyond_the_edge():
    head = make_head("natural", 2, amplitude=2.0)
    diagonal = head.fisher_diagonal(torch.tensor([[0.999], [1.0], [-1.0], [1.001]]))
    quarter = (math.pi / 2) ** 2
    assert diagonal[:, 0].tolist() == pytest.approx([quarter, quarter, quarter, 0.0])


@pytest.mark.parametrize("K", CATEGORIES)
def test_sparsemax_on_its_support(K):
    head = make_head("sparsemax", K)
    for row in random_scores(head, scale=0.3):
        fisher = head.fisher(row)
        assert (fisher - autograd_fisher(head, row)).abs().max() < 1e-10 * (1 + fisher.abs().max())
        outside = head.saturated(row)
        assert not fisher[outside].any() and not fisher[:, outside].any()


@pytest.mark.parametrize("K", [2, 3, 5, 8, *(slow(K) for K in (4, 18, 32))])
@pytest.mark.parametrize("name", GRID)
def test_monte_carlo(name, K):
    head = make(name, K)
    row = 0.1 * random_scores(head, rows=1)[0] if name == "sparsemax" else random_scores(head, 1)[0]
    gradients = sampled_scores(head, row, num_samples=40_000)  # (M, S)
    terms = gradients[:, :, None] * gradients[:, None, :]
    error = terms.std(0) / math.sqrt(len(terms))
    assert ((terms.mean(0) - head.fisher(row)).abs() < 5 * error + 1e-12).all()
    assert (gradients.mean(0).abs() < 5 * gradients.std(0) / 200 + 1e-12).all()


# --------------------------------------------------------------------------- its other forms


@pytest.mark.parametrize("K", CATEGORIES)
@pytest.mark.parametrize("name", GRID)
def test_diagonal_and_mean_agree_with_the_matrix(name, K):
    head = make(name, K)
    scores = 0.5 * random_scores(head, rows=6).view(2, 3, -1)
    fisher = head.fisher(scores)
    assert torch.allclose(head.fisher_diagonal(scores), fisher.diagonal(dim1=-2, dim2=-1))
    assert torch.allclose(head.mean_fisher(scores), fisher.mean((0, 1)), atol=1e-13)
    assert torch.allclose(head.mean_fisher(scores[0, 0]), fisher[0, 0], atol=1e-13)
    assert torch.equal(score_fisher(head, scores), fisher)


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_diagnostics_in_one_vector(name, K, dtype):
    head = make(name, K)
    scores = 2 * torch.randn(7, 3, head.num_scores, dtype=dtype)
    scores[1:3] *= 20  # saturates
    seen = head.diagnostics(scores)
    mean = head.fisher(scores.double()).mean(1).float()
    want = mean.diagonal(dim1=1, dim2=2) if head.fisher_is_diagonal else mean.flatten(1)
    assert seen.dtype == torch.float32
    assert torch.allclose(seen[:, :-1], want, rtol=1e-4, atol=1e-6)
    assert torch.allclose(seen[:, -1], head.saturated(scores).float().mean((1, 2)))
    assert torch.allclose(seen[4], head.diagnostics(scores[4]), rtol=1e-5, atol=1e-7)


def test_sampled_has_the_shape_and_its_own_generator():
    head = make_head("natural", 8)
    scores = torch.randn(2, 3, 7)
    state = torch.get_rng_state()
    draws = [
        score_fisher(head, scores, "sampled", 4, torch.Generator().manual_seed(s))
        for s in (0, 0, 1)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert draws[0].shape == (2, 3, 7, 7)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    with pytest.raises(ValueError, match="unknown kind 'empirical'; choose from exact, sampled"):
        score_fisher(head, scores, "empirical")
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        score_fisher(head, scores, "sampled", 0)


# -------------------------------------------------------------------------------- pull-back


def network(S: int) -> tuple[torch.nn.Module, torch.Tensor]:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, S))
    return net.double(), torch.randn(5, 3, dtype=torch.float64)


def parameter_jacobian(function, parameters) -> torch.Tensor:
    """(B, S, P)"""
    jacobian = torch.func.jacrev(function)(parameters)
    return torch.cat([j.flatten(2) for j in jacobian.values()], -1)


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", GRID)
def test_pull_back_is_the_fisher_matrix_of_the_network(name, K):
    """J^T G J against E[grad log p grad log p^T] with gradients in the parameters themselves."""
    head = make(name, K)
    function, parameters = module_scores(*network(head.num_scores))
    scores = function(parameters)
    pulled = pullback_fisher(parameter_jacobian(function, parameters), head.fisher(scores))
    probs = head.probs(scores)
    direct = torch.func.jacrev(lambda w: head.probs(function(w)))(parameters)
    direct = torch.cat([d.flatten(2) for d in direct.values()], -1)  # (B, K, P)
    weight = torch.where(probs > 0, 1 / torch.where(probs > 0, probs, 1.0), 0.0)
    want = torch.einsum("bk,bki,bkj->bij", weight, direct, direct)
    assert torch.allclose(pulled, want, atol=1e-10)


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", GRID)
def test_products_and_trace_without_the_jacobian(name, K):
    head = make(name, K)
    function, parameters = module_scores(*network(head.num_scores))
    fisher = head.fisher(function(parameters))
    full = pullback_fisher(parameter_jacobian(function, parameters), fisher).mean(0)
    vector = {n: torch.randn_like(p) for n, p in parameters.items()}
    product = fisher_vector_product(head, function, parameters, vector)
    flat = torch.cat([v.flatten() for v in vector.values()])
    assert list(product) == list(parameters)
    assert torch.allclose(torch.cat([p.flatten() for p in product.values()]), full @ flat)
    for chunk in (1, 7, 64):
        assert torch.allclose(fisher_trace(head, function, parameters, chunk), full.trace())


def test_dropout_and_batch_norm_are_in_evaluation_mode():
    head = make_head("sparsemax", 5)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 5)
    ).double()
    function, parameters = module_scores(net, torch.randn(6, 3, dtype=torch.float64))
    vector = {n: torch.randn_like(p) for n, p in parameters.items()}
    product = fisher_vector_product(head, function, parameters, vector)
    assert sum((vector[n] * product[n]).sum() for n in vector) >= 0
    assert fisher_trace(head, function, parameters) > 0
    assert all(module.training for module in net.modules())


def test_the_trace_takes_rows_alone_where_the_module_does():
    """One gradient for a row of inputs, not for the whole batch; and the same numbers."""
    head = make_head("natural", 5)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Unflatten(1, (2, 4))).double()
    calls = []
    net[0].register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    function, parameters = module_scores(net, torch.randn(6, 3, dtype=torch.float64))
    want = fisher_trace(head, lambda values: function(values), parameters)  # knows no inputs
    calls.clear()
    assert torch.allclose(fisher_trace(head, function, parameters), want)
    assert torch.allclose(fisher_trace(head, function, parameters, chunk_size=3), want)
    assert calls.count(1) > calls.count(6)  # inside vmap every row is a batch of one
    assert function.takes_rows_alone(parameters, function(parameters))


def test_the_trace_is_right_where_rows_are_mixed():
    class Mixes(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    head = make_head("sigmoid", 5)
    function, parameters = module_scores(Mixes(3, 4).double(), torch.randn(6, 3).double())
    fisher = head.fisher(function(parameters))
    full = pullback_fisher(parameter_jacobian(function, parameters), fisher).mean(0)
    assert torch.allclose(fisher_trace(head, function, parameters), full.trace())


@pytest.mark.parametrize("name", GRID)
def test_precision_under_autocast_and_inference_mode(name):
    head = make(name, 8)
    scores = 0.3 * torch.randn(50, head.num_scores)
    jacobian = torch.randn(50, head.num_scores, 4)
    want = head.mean_fisher(scores), pullback_fisher(jacobian, head.fisher(scores))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        got = head.mean_fisher(scores), pullback_fisher(jacobian, head.fisher(scores))
        sampled = score_fisher(head, scores, "sampled", 3)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert sampled.shape == (50, head.num_scores, head.num_scores)


# ------------------------------------------------------------------------------ diagnostics


@pytest.mark.parametrize("K", CATEGORIES)
def test_softmax_has_l1_mass_one_half_whatever_the_scores(K):
    head = make_head("softmax", K)
    masses = off_diagonal_mass(head.fisher(random_scores(head, rows=20, scale=2.0)))
    assert torch.allclose(masses, torch.full_like(masses, 0.5))


@pytest.mark.parametrize("K", CATEGORIES)
@pytest.mark.parametrize("name", TREES)
def test_catnat_has_no_mass(name, K):
    head = make(name, K)
    for norm in ("l1", "fro"):
        assert not off_diagonal_mass(head.fisher(random_scores(head)), norm).any()


def test_mass_by_hand():
    matrix = torch.tensor([[3.0, 0.0, -4.0], [0.0, 5.0, 0.0], [-4.0, 0.0, 0.0]])
    assert off_diagonal_mass(matrix) == pytest.approx(8 / 16)
    assert off_diagonal_mass(matrix, "fro") == pytest.approx(math.sqrt(32 / 66))
    assert off_diagonal_mass(torch.zeros(2, 3, 3)).tolist() == [0.0, 0.0]
    assert off_diagonal_mass(torch.ones(1, 1)) == 0
    with pytest.raises(ValueError, match="unknown norm 'l2'; choose from l1, fro"):
        off_diagonal_mass(matrix, "l2")


def test_a_sampled_matrix_shows_mass_that_is_not_there():
    """The false floor of catnat shrinks as 1/sqrt(samples)."""
    head = make_head("natural", 8)
    scores = torch.zeros(100, 7)
    floors = [
        off_diagonal_mass(score_fisher(head, scores, "sampled", m).mean(0)).item() for m in (1, 64)
    ]
    assert floors[0] > 0.1 and floors[1] < floors[0] / 3


def test_condition_number():
    assert condition_number(torch.diag(torch.tensor([4.0, 0.5, 0.0]))) == pytest.approx(8.0)
    assert condition_number(torch.zeros(3, 3)) == 1
    both = torch.stack((torch.full((3, 3), torch.nan), torch.diag(torch.tensor([1.0, 2.0, 4.0]))))
    assert condition_number(both).isnan().tolist() == [True, False]
    assert condition_number(make_head("softmax", 5).fisher(torch.zeros(5))) == pytest.approx(1.0)
    assert condition_number(make_head("natural", 8).fisher(torch.zeros(7))) == pytest.approx(4.0)


@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("name", GRID)
def test_damping_is_added_to_the_diagonal_in_every_head(name, damping):
    head = make(name, 5)
    scores = random_scores(head)
    scores[0] *= 20  # saturated and impossible
    grad = torch.randn_like(scores)
    damped = head.fisher(scores) + damping * torch.eye(head.num_scores, dtype=torch.float64)
    want = torch.linalg.solve(damped, grad)
    assert torch.allclose(head.natural_gradient(scores, grad, damping), want, rtol=1e-8)
    base = CategoricalHead._natural_gradient  # CategoricalHead's own, for any other head
    assert torch.allclose(base(head, scores, grad, damping), want, rtol=1e-8)
    with pytest.raises(ValueError, match="damping must be at least 0, got -1"):
        head.natural_gradient(scores, grad, -1)


@pytest.mark.parametrize("K", CATEGORIES)
@pytest.mark.parametrize("name", GRID)
def test_natural_gradient_is_the_pseudo_inverse(name, K):
    head = make(name, K)
    scores = random_scores(head, scale=0.5)
    grad = torch.randn_like(scores)
    want = torch.linalg.pinv(head.fisher(scores), hermitian=True, rtol=1e-12) @ grad[..., None]
    assert torch.allclose(head.natural_gradient(scores, grad), want[..., 0], atol=1e-8)
    with pytest.raises(ValueError, match=r"grad \(3,\) and scores"):
        head.natural_gradient(scores, torch.zeros(3))


def test_natural_gradient_is_damped_at_unreachable_nodes():
    head = make_head("natural", 4)
    scores = torch.tensor([10.0, 0.0, 0.0])  # node 1 cannot be reached
    out = head.natural_gradient(scores, torch.tensor([0.0, 1e-12, 1.0]), damping=1e-6)
    assert out.isfinite().all()
    assert out[1] == pytest.approx(1e-6)
    assert out[2] == pytest.approx(1 / (0.25 + 1e-6))


def test_one_natural_gradient_step_points_at_the_target():
    """In the metric of G, descent on KL(target || p) moves p along the straight line at first."""
    head = make_head("sigmoid", 5)
    target = torch.softmax(torch.randn(5, dtype=torch.float64), -1)
    scores = random_scores(head, rows=1)[0].requires_grad_()
    (grad,) = torch.autograd.grad(-(target * head.log_probs(scores)).sum(), scores)
    step = head.natural_gradient(scores.detach(), grad)
    moved = torch.func.jvp(head.probs, (scores.detach(),), (-step,))[1]
    assert torch.allclose(moved, target - head.probs(scores.detach()), atol=1e-10)
