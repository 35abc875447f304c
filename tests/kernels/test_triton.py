"""The Triton kernels, run by Triton's interpreter on the CPU, against plain torch in float64."""

import pytest
from cases import run_interpreted

from catnat.kernels.dispatch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

TREE = """
import torch
from catnat import make_head
from catnat.kernels import dispatch, reference
from catnat.kernels.dispatch import tree_log_probs

dispatch.kernels_for = lambda *given: "triton"  # on the CPU, which the interpreter takes
torch.manual_seed(0)
sizes = {"sigmoid": (2, 5, 100), "natural": (3, 32), "tail": (5,)}
for K in (2, 3, 5, 8, 18, 32, 100):
    for name, tail in (("sigmoid", {}), ("natural", {}), ("natural", {"tail": 0.05})):
        if K not in sizes["tail" if tail else name]:
            continue  # Triton's interpreter is slow
        head = make_head(name, K, **tail)
        scores, grad = 2 * torch.randn(9, K - 1), torch.randn(9, K)
        scores[0, 0], scores[1, 0], scores[2, 0], scores[3, 0] = 3.15, -3.2, 0.0, 3.1415925
        exact = scores.double().requires_grad_()
        out = tree_log_probs(scores.requires_grad_(), head.activation, head.constants(scores))
        want = reference.tree_log_probs(exact, head.activation, head.constants(exact))
        assert ((out - want).abs() <= 2e-6 * (1 + want.abs())).all(), (name, K)
        (got,) = torch.autograd.grad(out, scores, grad)
        want = torch.autograd.grad(want, exact, grad.double())[0]
        size = want.abs().amax(-1, keepdim=True)
        assert ((got - want).abs() <= 2e-6 * (1 + size)).all(), (name, K)
        edges = torch.randn(6, K - 1)
        edges[0, 0] = edges[1, -1] = torch.nan
        edges[2, 0], edges[3, -1], edges[4], edges[5] = torch.inf, -torch.inf, torch.inf, 1e38
        given = (edges.requires_grad_(), head.activation, head.constants(edges))
        grad = torch.randn(6, K)
        same = dict(rtol=1e-5, atol=1e-5, equal_nan=True)
        out = tree_log_probs(*given)
        assert torch.allclose(out, reference.tree_log_probs(*given), **same), (name, K)
        (got,) = torch.autograd.grad(out, edges, grad)
        want = torch.autograd.grad(reference.tree_log_probs(*given), edges, grad)[0]
        assert torch.allclose(got, want, **same), (name, K)
"""

PATH = """
from catnat.kernels.dispatch import tree_log_prob, tree_sample

sizes = {"sigmoid": (2, 18, 1000), "natural": (3, 32), "tail": (5, 32)}
for K in (2, 3, 5, 18, 32, 1000):
    for name, tail in (("sigmoid", {}), ("natural", {}), ("natural", {"tail": 0.05})):
        if K not in sizes["tail" if tail else name]:
            continue
        head, H = make_head(name, K, **tail), (K - 1).bit_length()
        scores, leaf, grad = 2 * torch.randn(7, K - 1), torch.randint(K, (3, 7)), torch.randn(3, 7)
        scores[0, 0], scores[1, 0], scores[2, 0], scores[3, 0] = 3.15, -3.2, 0.0, 3.1415925
        leaf[0, :4] = torch.tensor([0, K - 1, -1, K])
        exact, given = scores.double(), (head.activation, head.constants(scores))
        exact.requires_grad_()
        out = tree_log_prob(scores.requires_grad_(), leaf, *given)
        want = reference.tree_log_prob(exact, leaf, head.activation, head.constants(exact))
        assert want[0, 2:4].isnan().all() and want.isnan().sum() == 2
        near = (out - want).abs() <= 3e-6 * (1 + want.abs())
        assert (near | (out.isnan() & want.isnan())).all(), (name, K)
        (got,) = torch.autograd.grad(out, scores, grad)
        want = torch.autograd.grad(want, exact, grad.double())[0]
        size = want.abs().nan_to_num().amax(-1, keepdim=True)
        near = (got - want).abs() <= 3e-6 * (1 + size)
        lost = got.isnan() & (want.isnan() | (want == 0))  # 0: saturated, above what is not a leaf
        assert (near | lost).all() and not got[4:].isnan().any(), (name, K)
        assert torch.equal(got == 0, (want == 0) & ~lost), (name, K)
        scores = scores.detach()
        scores[4, 0], scores[5], scores[6] = torch.nan, torch.inf, -torch.inf
        uniforms = torch.rand(3, 7, H, dtype=torch.float64)
        uniforms[0], uniforms[1] = 0, 1 - 2.0**-53
        got = tree_sample(scores, uniforms, *given)
        want = reference.tree_sample(scores, uniforms, *given)
        assert (got[:, 4] == -1).all() and torch.equal(got, want), (name, K)
"""

SPARSEMAX = """
from catnat.kernels.dispatch import sparsemax_log_probs

for K in (2, 3, 18, 100):
    scores, grad = torch.randn(9, K) * torch.logspace(-2, 1, 9)[:, None], torch.randn(9, K)
    probs = reference.sparsemax_probs(scores.double())
    out = sparsemax_log_probs(scores.requires_grad_())
    assert torch.equal(out <= -1000, probs <= 0), K
    assert torch.allclose(out.double().exp(), probs, rtol=2e-6, atol=1e-14), K
    (back,) = torch.autograd.grad(out, scores, grad)
    exact = scores.detach().double()
    (want,) = torch.func.vjp(reference.sparsemax_log_probs, exact)[1](grad.double())
    assert ((back - want).abs() <= 1e-5 * (1 + want.abs().amax(-1, keepdim=True))).all(), K
    scores = scores.detach()
    scores[1, 0], scores[2, 0], scores[3] = torch.nan, torch.inf, -torch.inf
    out = sparsemax_log_probs(scores)
    assert out[1:4].isnan().all() and out[4:].isfinite().all(), K
    scores[4, 0] = -torch.inf
    out = sparsemax_log_probs(scores.requires_grad_())
    assert torch.allclose(out[4].exp(), reference.sparsemax_probs(scores[4]), atol=1e-6), K
    assert torch.autograd.grad(out, scores, grad)[0][1].isnan().all(), K
"""

SOFTMAX = """
from catnat.kernels.dispatch import softmax_log_probs

largest = torch.finfo(torch.float32).max
for K in (2, 18, 100):
    scores, grad = 3 * torch.randn(9, K), torch.randn(9, K)
    scores[1, 0], scores[2, 0], scores[3] = torch.nan, torch.inf, -torch.inf
    scores[4, 0], scores[5, 0], scores[6, 0] = -torch.inf, -1e38, -1000
    scores[7, 0], scores[7, 1] = largest, -largest
    scores[6, 1:] = 0
    results = []
    for function in (softmax_log_probs, reference.softmax_log_probs):
        out = function(scores.requires_grad_())
        (back,) = torch.autograd.grad(out, scores, grad)
        (twice,) = torch.autograd.grad(function(scores), scores, grad, create_graph=True)
        results.append((out, back, twice))
    for ours, theirs in zip(*results):
        assert torch.allclose(ours, theirs, rtol=2e-6, atol=2e-6, equal_nan=True), K
"""


def test_interpreted_kernels():
    run_interpreted(TREE + PATH + SPARSEMAX + SOFTMAX)
