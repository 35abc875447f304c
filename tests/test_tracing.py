"""Tensors that are not just data: fake, traced, batched, dual. The fused paths must step aside."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cases import HEADS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.fx.experimental.proxy_tensor import make_fx

from catnat import make_head

pytestmark = pytest.mark.parametrize("name", HEADS)


def scores_for(name: str) -> tuple:
    head = make_head(name, 8)
    return head, torch.randn(3, head.num_scores)


def test_fake_tensors(name):
    head, scores = scores_for(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert head.log_probs(torch.randn(scores.shape)).shape == (3, 8)


def test_make_fx(name):
    head, scores = scores_for(name)
    traced = make_fx(lambda s: head.log_probs(s))(torch.zeros_like(scores))
    assert torch.allclose(traced(scores), head.log_probs(scores), atol=1e-5)


def test_batched_gradients(name):
    head, scores = scores_for(name)
    scores.requires_grad_()
    out = head.log_probs(scores)
    weights = torch.randn(5, 3, 8)

    def pull(weight):
        return torch.autograd.grad(out, scores, weight, retain_graph=True)[0]

    want = torch.stack([pull(weight) for weight in weights])
    assert torch.allclose(torch.func.vmap(pull)(weights), want, atol=1e-4)
    batched = torch.autograd.grad(out, scores, weights, is_grads_batched=True, retain_graph=True)
    assert torch.allclose(batched[0], want, atol=1e-4)
    row = scores[0].detach()
    rows = jacobian(head.log_probs, row, vectorize=True)
    assert torch.allclose(rows, jacobian(head.log_probs, row), atol=1e-4)


def test_forward_mode(name):
    head, scores = scores_for(name)
    direction = torch.randn_like(scores)
    with forward_ad.dual_level():
        out = head.log_probs(forward_ad.make_dual(scores, direction))
        tangent = forward_ad.unpack_dual(out).tangent
    _, want = torch.func.jvp(head.log_probs, (scores,), (direction,))
    assert torch.allclose(tangent, want, atol=1e-5)


def test_negated_views(name):
    head, scores = scores_for(name)
    assert torch.equal(head.log_probs(torch._neg_view(scores)), head.log_probs(-scores))


def test_compiled_divergence_in_a_fresh_process(name):
    code = f"""
import torch
from catnat import make_head
from torch.distributions import kl_divergence
head = make_head({name!r}, 5)
scores = torch.randn(2, 3, head.num_scores)
loss = lambda a, b: kl_divergence(head(a), head(b)).sum()
got = torch.compile(loss, fullgraph=True, backend="aot_eager")(*scores)
assert torch.allclose(got, loss(*scores), rtol=1e-4), (got, loss(*scores))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
