"""The paper's Proposition, Theorem and Corollary, and everything built on the Fisher matrix."""

import math

import pytest
import torch
from cases import (
    CATEGORIES,
    GRID,
    TREES,
    autograd_fisher,
    both_floats,
    leaf_path,
    make,
    random_scores,
    slow,
)

from catnat import make_head
from catnat.fisher import (
    _scores_at,
    condition_number,
    off_diagonal_mass,
    paired_mean_fishers,
    pullback_fisher,
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
    for name, own_score in (("sigmoid", 1), ("natural", 0)):
        head = make_head(name, K)
        scores = 0.5 * torch.randn(K - 1, dtype=torch.float64)
        slopes = torch.autograd.functional.jacobian(head.fisher_diagonal, scores)
        assert (slopes.abs() > 1e-13).sum(-1).max() == deepest - 1 + own_score


def reach(head, row):
    """P(node) of every node: the sum over the leaves below it."""
    out = torch.zeros(head.num_scores, dtype=torch.float64)
    for k, p in enumerate(head.probs(row)):
        for node, _ in leaf_path(k, head.num_categories):
            out[node] += p
    return out


@pytest.mark.parametrize("K", CATEGORIES)
@pytest.mark.parametrize("name", TREES)
def test_theorem_catnat(name, K):
    """G is diagonal with P(node) a'^2 / (a (1 - a)); a and a' here from a two-category head."""
    head, activation = (make(name, n, uniform_at_zero=False) for n in (K, 2))
    for row in random_scores(head).clamp(-2.8, 2.8):
        a = activation.probs(row[:, None])[:, 1]
        slope = torch.func.vmap(torch.func.grad(lambda s: activation.probs(s[None])[1]))(row)
        claim = torch.diag(reach(head, row) * slope**2 / (a * (1 - a)))
        assert (head.fisher(row) - claim).abs().max() < 1e-10
        assert (autograd_fisher(head, row) - claim).abs().max() < 1e-10


@pytest.mark.parametrize("amplitude", [2 * math.pi, 1.3])
@pytest.mark.parametrize("K", CATEGORIES)
def test_corollary_natural(K, amplitude):
    head = make_head("natural", K, amplitude=amplitude)
    for row in random_scores(head, scale=amplitude / 12).clamp(-amplitude / 4, amplitude / 4):
        scale = (math.pi / amplitude) ** 2
        claim = torch.diag(reach(head, row) * scale)
        assert (head.fisher(row) - claim).abs().max() < 1e-14 * scale * 10
        assert (autograd_fisher(head, row) - claim).abs().max() < 1e-10 * scale


def test_corollary_on_and_beyond_the_edge():
    head = make_head("natural", 2, amplitude=2.0)
    diagonal = head.fisher_diagonal(torch.tensor([[0.999], [1.0], [-1.0], [1.001]]))
    quarter = (math.pi / 2) ** 2
    assert diagonal[:, 0].tolist() == pytest.approx([quarter, quarter, quarter, 0.0])


@pytest.mark.parametrize("K", [2, 3, 5, 8, *(slow(K) for K in (4, 18, 32))])
@pytest.mark.parametrize("name", GRID)
def test_monte_carlo(name, K):
    head = make(name, K)
    row = 0.1 * random_scores(head, rows=1)[0] if name == "sparsemax" else random_scores(head, 1)[0]
    gradients = _scores_at(head, row, torch.rand(40_000, dtype=torch.float64))  # (M, S)
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


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", GRID)
@both_floats
def test_mean_fisher_matrices_of_many_steps(name, K, dtype):
    head = make(name, K)
    scores = 2 * torch.randn(7, 3, head.num_scores, dtype=dtype)
    scores[1:3] *= 20  # saturates
    seen = head.step_fishers(scores)
    mean = head.fisher(scores.double()).mean(1).float()
    want = mean.diagonal(dim1=1, dim2=2) if head.fisher_is_diagonal else mean.flatten(1)
    assert seen.dtype == torch.float32
    assert torch.allclose(seen, want, rtol=1e-4, atol=1e-6)


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
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        score_fisher(head, scores, "sampled", 0)
    with pytest.raises(ValueError, match="unknown kind 'empirical'; choose from exact, sampled"):
        score_fisher(head, scores, "empirical")
    assert torch.equal(score_fisher(head, scores), head.fisher(scores))


# -------------------------------------------------------------------------------- pull-back


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", GRID)
def test_pull_back_is_the_fisher_matrix_of_the_network(name, K):
    """J^T G J against E[grad log p grad log p^T] with gradients in the parameters themselves."""
    head = make(name, K)
    x = torch.randn(5, 3).double()
    weight = torch.randn(3, head.num_scores).double()
    scores = (x @ weight).tanh()
    jacobian = torch.func.jacrev(lambda w: (x @ w).tanh())(weight).flatten(2)  # (B, S, P)
    pulled = pullback_fisher(jacobian, head.fisher(scores))
    logs = torch.func.jacrev(lambda w: head.log_probs((x @ w).tanh()))(weight).flatten(2)
    want = torch.einsum("bk,bki,bkj->bij", head.probs(scores), logs, logs)
    assert torch.allclose(pulled, want, atol=1e-10)


# ------------------------------------------------------------------------------ diagnostics


@pytest.mark.parametrize("K", CATEGORIES)
def test_softmax_has_l1_mass_one_half_whatever_the_scores(K):
    head = make_head("softmax", K)
    masses = off_diagonal_mass(head.fisher(random_scores(head, rows=20, scale=2.0)), "l1")
    assert torch.allclose(masses, torch.full_like(masses, 0.5))


def test_mass_by_hand():
    matrix = torch.tensor([[3.0, 0.0, -4.0], [0.0, 5.0, 0.0], [-4.0, 0.0, 0.0]])
    assert off_diagonal_mass(matrix, "l1") == pytest.approx(8 / 16)
    assert off_diagonal_mass(matrix) == pytest.approx(math.sqrt(32 / 66))
    assert off_diagonal_mass(torch.zeros(2, 3, 3)).tolist() == [0.0, 0.0]
    assert off_diagonal_mass(torch.ones(1, 1)) == 0
    with pytest.raises(ValueError, match="unknown norm 'l2'; choose from l1, fro"):
        off_diagonal_mass(matrix, "l2")


def test_condition_number():
    assert condition_number(torch.diag(torch.tensor([4.0, 0.5, 0.0]))) == pytest.approx(8.0)
    for dtype in (torch.float16, torch.bfloat16):
        assert condition_number(torch.diag(torch.tensor([4.0, 2.0], dtype=dtype))) == 2
    assert condition_number(torch.zeros(3, 3)) == 1
    matrices = torch.stack(
        (torch.full((3, 3), torch.nan), torch.diag(torch.tensor([1.0, 2.0, 4.0])))
    )
    assert condition_number(matrices).isnan().tolist() == [True, False]
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


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("name", ["softmax", "natural"])
def test_the_natural_gradient_of_many_categories_needs_no_matrix(name, damping):
    head = make_head(name, 2**20)
    scores = torch.zeros(head.num_scores)
    grad = torch.randn(head.num_scores)
    assert head.natural_gradient(scores, grad, damping).isfinite().all()


# ---------------------------------------------------------------------------- rare categories


@pytest.mark.parametrize("rare", [0, 1])
def test_a_rare_category_on_either_side_is_drawn_as_often_as_it_should(rare):
    head = make_head("softmax", 2)
    scores = torch.zeros(2, dtype=torch.float64)
    scores[rare] = -21.0  # probability 7.6e-10
    draws = 2**22
    noise = torch.rand(1, draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = _scores_at(head, scores.expand(draws, 2), noise)
    assert (gradients[0, :, rare] > 0.5).sum() <= 3
    levels = torch.tensor([[1e-10 if rare == 0 else 1 - 1e-10]], dtype=torch.float64)
    assert _scores_at(head, scores[None], levels)[0, 0, rare] > 0.5


def test_the_natural_gradient_of_nearly_impossible_categories_is_finite():
    head = make_head("softmax", 2)
    for dtype, low in ((torch.float32, -86.0), (torch.float64, -707.0)):
        scores = torch.tensor([0.0, low], dtype=dtype)
        grad = torch.tensor([100.0, -100.0])
        assert head.natural_gradient(scores, grad).isfinite().all()


@pytest.mark.parametrize("rows", [1, 256])
def test_softmax_does_not_cancel_where_it_is_saturated(rows):
    """p - p^2 in float32 would be 0, or negative, in the place of the likely category."""
    head = make_head("softmax", 4)
    scores = torch.randn(rows, 4)
    scores[:, 0] += 16
    exact = head.fisher(scores.double())
    close = {"rtol": 1e-5, "atol": 0.0}
    assert torch.allclose(head.fisher(scores).double(), exact, **close)
    diagonal = exact.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(head.fisher_diagonal(scores).double(), diagonal, **close)
    mean = head.mean_fisher(scores)
    assert torch.allclose(mean.double(), exact.mean(0), **close)
    assert torch.allclose(
        head.step_fishers(scores[None])[0].double(), mean.double().flatten(), **close
    )
    assert off_diagonal_mass(mean, "l1") == pytest.approx(0.5)
    for measure in (off_diagonal_mass, condition_number):
        assert measure(mean).item() == pytest.approx(measure(exact.mean(0)).item(), rel=1e-3)


@pytest.mark.parametrize("name", GRID)
def test_results_are_float32_under_autocast(name):
    head = make(name, 8)

    scores = 0.3 * torch.randn(6, head.num_scores)
    grad = torch.randn_like(scores)

    def results(autocast):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return {
                "sampled": score_fisher(head, scores, "sampled", 3),
                "natural gradient": head.natural_gradient(scores, grad, damping=0.1),
            }

    plain = results(autocast=False)
    for what, value in results(autocast=True).items():
        assert value.dtype == torch.float32, what
        error = (value - plain[what]).norm() / plain[what].norm()
        assert error < 1e-5, what


@pytest.mark.parametrize("norm", ["l1", "fro"])
@pytest.mark.parametrize("scale", [1e-44, 1e-25, 1e-12, 1.0, 1e20, 3e38])
def test_mass_does_not_depend_on_the_scale(norm, scale):
    matrix = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    share = off_diagonal_mass(matrix * scale, norm)
    assert share == pytest.approx(0.5 if norm == "l1" else math.sqrt(0.5), rel=1e-5)
    assert off_diagonal_mass(torch.full((2, 2), math.nan), norm).isnan()


def test_condition_number_never_raises(monkeypatch):
    hard = make_head("sparsemax", 300).mean_fisher(10 * torch.randn(64, 300))  # LAPACK gives up
    value, easy = condition_number(torch.stack((hard, torch.eye(300))))
    assert easy == 1 and value.isfinite()
    assert value == pytest.approx(condition_number(hard.double()).item(), rel=0.01)
    for scale in (1e-30, 1e30):
        matrix = scale * torch.diag(torch.tensor([4.0, 2.0, 1.0]))
        assert condition_number(matrix) == pytest.approx(4.0)

    def gives_up(matrices):
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigvalsh", gives_up)
    assert condition_number(torch.eye(3).expand(2, 3, 3)).isnan().tolist() == [True, True]


STEPS = 400
ROWS = 200


@pytest.mark.parametrize("K", [2, 5, 8])
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "natural"])
def test_the_mean_over_steps_meets_the_exact_share(name, K):
    generator = torch.Generator().manual_seed(K)
    head = make_head(name, K)
    scores = torch.randn(ROWS, head.num_scores, generator=generator)
    levels = torch.rand(2, STEPS, ROWS, generator=generator)
    one, other = paired_mean_fishers(head, scores.expand(STEPS, -1, -1), levels)
    products = one * other
    off = products.masked_fill(torch.eye(len(products[0]), dtype=torch.bool), 0)
    shares = off.sum((-2, -1)) / products.sum((-2, -1))
    exact = float(off_diagonal_mass(head.mean_fisher(scores))) ** 2
    error = float(shares.std()) / STEPS**0.5
    assert abs(float(shares.mean()) - exact) <= 4 * error + 1e-3 * exact
    floor = float(off_diagonal_mass((one + other) / 2).mean())
    if name != "softmax" and K > 2:
        assert floor > 0.05 > 10 * abs(float(shares.mean()))  # one estimate alone sees noise
