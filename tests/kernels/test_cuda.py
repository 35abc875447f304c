"""The Triton kernels against plain torch. Needs a CUDA device; skipped elsewhere."""

import math

import pytest
import torch
from cases import HEADS, awkward_scores, slopes_of

from catnat import make_head
from catnat.heads.nodes import subtree_sums
from catnat.kernels.dispatch import tree_sample
from catnat.numerics import LOG_ZERO

pytestmark = pytest.mark.gpu
CATEGORIES = [2, 3, 5, 18, 32, 256, 1000, 16384, 131072]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("K", CATEGORIES)
def test_kernels_agree_with_float64(name, K):
    head = make_head(name, K).cuda()
    for rows in (1, 3, 65):
        if rows * K > 4_000_000:
            continue
        scores = awkward_scores(rows, head.num_scores, 0.02).cuda().requires_grad_()
        exact = scores.detach().double().requires_grad_()
        out = head.log_probs(scores)
        truth = head.log_probs(exact)
        impossible = truth < LOG_ZERO / 2
        assert torch.equal(out < LOG_ZERO / 2, impossible)
        error = (out.double() - truth).abs() / (1 + truth.abs())
        assert error[~impossible].max() < 2e-6
        grad = torch.randn(out.shape, device="cuda") / math.sqrt(K)
        (got,) = torch.autograd.grad(out, scores, grad)
        (want,) = torch.autograd.grad(truth, exact, grad.double())
        assert got.isfinite().all()
        if name in ("sigmoid", "natural"):  # rounding is relative to what is added up
            left, right = subtree_sums(grad.abs().double())
            slopes = slopes_of(head.activation, exact.detach(), head.constants(exact))
            size = left * slopes[0] + right * slopes[1]
            fisher = head.fisher_diagonal(scores.detach())
            exact_fisher = head.fisher_diagonal(exact.detach())
            assert torch.allclose(fisher.double(), exact_fisher, rtol=1e-5, atol=1e-12)
        else:
            size = want.abs().amax(-1, keepdim=True) * K
        assert ((got - want).abs() <= 2e-5 * (size + 1e-6)).all()
        plain = head.cpu().log_probs(scores.detach().cpu())
        head.cuda()
        assert torch.allclose(out.detach().cpu(), plain, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("name", ["sigmoid", "natural"])
@pytest.mark.parametrize("K", [*CATEGORIES, 2**20 + 1])
def test_the_path_kernels_agree_with_float64(name, K):
    head = make_head(name, K).cuda()
    scores = torch.randn(3, K - 1, device="cuda").clamp(-2, 2).requires_grad_()
    exact = scores.detach().double().requires_grad_()
    for shape in ((3,), (40, 3)):
        value = torch.randint(K, shape, device="cuda")
        grad = torch.randn(shape, device="cuda")
        out = head.log_prob(scores, value)
        truth = head.log_prob(exact, value)
        assert ((out - truth).abs() <= 3e-6 * (1 + truth.abs())).all()
        (got,) = torch.autograd.grad(out, scores, grad)
        (want,) = torch.autograd.grad(truth, exact, grad.double())
        assert torch.allclose(got.double(), want, atol=1e-4, rtol=1e-5)
        assert not got[want == 0].any()
    height = (K - 1).bit_length()
    noise = torch.rand(500, 3, height, dtype=torch.float64, device="cuda")
    ours = tree_sample(scores, noise, head.activation, head.constants(scores))
    theirs = tree_sample(exact, noise, head.activation, head.constants(exact))
    assert (ours == theirs).float().mean() > 0.99 and ours.min() >= 0 and ours.max() < K
    wrong = head.log_prob(scores, torch.tensor([-1, 0, K], device="cuda"))
    assert wrong.isnan().tolist() == [True, False, True]
    broken = scores.detach().clone()
    broken[1, 0] = torch.nan
    assert (head.sample(broken, (4,)) == -1).any(0).tolist() == [False, True, False]
    generator = torch.Generator("cuda").manual_seed(1)
    first = head(scores).sample((4,), generator=generator)
    generator.manual_seed(1)
    assert torch.equal(first, head.sample(scores, (4,), generator=generator))


@pytest.mark.parametrize("name", ["sigmoid", "natural"])
@pytest.mark.parametrize("K", [5, 32])
def test_paths_compile_in_one_graph(name, K):
    head = make_head(name, K).cuda()
    scores = torch.randn(50, K - 1, device="cuda", requires_grad=True)
    value = torch.randint(K, (2, 50), device="cuda")

    def step(scores):
        q = head(scores)
        return q.log_prob(value), q.sample((3,))

    out, drawn = torch.compile(step, fullgraph=True)(scores)
    want = head.log_prob(scores, value)
    assert torch.allclose(out, want, atol=1e-5)
    (got,) = torch.autograd.grad(out.sum(), scores)
    assert torch.allclose(got, torch.autograd.grad(want.sum(), scores)[0], atol=1e-4)
    assert drawn.shape == (3, 50) and drawn.min() >= 0 and drawn.max() < K


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("K", [4, 5, 18])
def test_scores_that_are_not_finite_mean_the_same_as_on_the_cpu(name, K):
    head = make_head(name, K)
    scores = torch.randn(6, head.num_scores)
    scores[0, 0] = scores[1, -1] = torch.nan
    scores[2, 0] = torch.inf
    scores[3, -1] = -torch.inf
    scores[4] = torch.inf
    scores[5, 0] = -1e38
    results = []
    for device in ("cpu", "cuda"):
        leaf = scores.to(device).requires_grad_()
        head.to(device)
        out = head.log_probs(leaf)
        (grad,) = torch.autograd.grad((out * torch.arange(K, device=device)).sum(), leaf)
        seen = (out, grad, head.fisher_diagonal(leaf.detach()), head.saturated(leaf.detach()))
        results.append([x.detach().float().cpu() for x in seen])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("K", [4, 5])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_built_for_a_device_works_there(name, K):
    with torch.device("cuda"):
        head = make_head(name, K)
    assert all(buffer.is_cuda for buffer in head.buffers())
    scores = torch.randn(3, head.num_scores, device="cuda")
    want = make_head(name, K).log_probs(scores.cpu())
    assert torch.allclose(head.log_probs(scores).cpu(), want, atol=1e-5)
    stranger = make_head(name, K)  # never moved: its constants follow the scores
    assert torch.allclose(stranger.log_probs(scores).cpu(), want, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("K", [5, 32])
def test_compiles_in_one_graph(name, K):
    head = make_head(name, K).cuda()
    scores = torch.randn(50, head.num_scores, device="cuda", requires_grad=True)
    compiled = torch.compile(
        lambda s: head(s).entropy().sum() + head.log_probs(s)[:, 0].sum(), fullgraph=True
    )
    (got,) = torch.autograd.grad(compiled(scores), scores)
    plain = head(scores).entropy().sum() + head.log_probs(scores)[:, 0].sum()
    (want,) = torch.autograd.grad(plain, scores)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_captured_in_a_cuda_graph(name):
    head = make_head(name, 32).cuda()
    scores = torch.randn(50, head.num_scores, device="cuda", requires_grad=True)

    def step():
        sample = head(scores).rsample(estimator="gumbel", temperature=0.5)
        return torch.autograd.grad((sample * torch.arange(32, device="cuda")).sum(), scores)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert out.isfinite().all()
    assert not torch.equal(first, out)  # fresh noise on every replay
