"""The Triton kernels, run by Triton's interpreter on the CPU, against plain torch in float64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

TREE = """
import torch
from catnat import make_head
from catnat.ops import tree, triton_tree

torch.manual_seed(0)
for K in (2, 3, 5, 8, 18, 32, 100):
    for name in ("sigmoid", "natural"):
        head = make_head(name, K)
        scores, grad = 2 * torch.randn(9, K - 1), torch.randn(9, K)
        scores[0, 0], scores[1, 0], scores[2, 0], scores[3, 0] = 3.15, -3.2, 0.0, 3.1415925
        exact = scores.double()
        got = triton_tree.forward(scores, head.split, head.constants32)
        want = tree.reference_log_probs(exact, head.split, head.constants64)
        assert ((got - want).abs() <= 2e-6 * (1 + want.abs())).all(), (name, K)
        got = triton_tree.backward(scores, grad, head.split, head.constants32)
        want = tree.reference_vjp(exact, grad.double(), head.split, head.constants64)
        size = want.abs().amax(-1, keepdim=True)
        assert ((got - want).abs() <= 2e-6 * (1 + size)).all(), (name, K)
        got = triton_tree.fisher(scores, head.split, head.constants32)
        want = head.fisher_diagonal(exact)
        assert torch.allclose(got[:, :-1].double(), want, rtol=1e-5, atol=1e-12), (name, K)
        assert torch.allclose(got[:, -1], head.saturated(scores).float().mean(-1)), (name, K)
        scores[4, -1] = torch.nan
        out = triton_tree.forward(scores, head.split, head.constants32)
        assert out[4].isnan().any() and out[5].isfinite().all()
"""

SPARSEMAX = """
import torch
from catnat.ops import sparsemax, triton_sparsemax

torch.manual_seed(0)
for K in (2, 3, 5, 8, 18, 32, 100):
    scores, grad = torch.randn(9, K) * torch.logspace(-2, 1, 9)[:, None], torch.randn(9, K)
    probs = sparsemax.reference_probs(scores.double())
    got = triton_sparsemax.forward(scores)
    assert torch.equal(got <= -1000, probs <= 0), K
    assert torch.allclose(got.double().exp(), probs, rtol=2e-6, atol=1e-14), K
    back = triton_sparsemax.backward(got, grad)
    want = sparsemax.reference_vjp(scores.double(), grad.double())
    assert ((back - want).abs() <= 1e-5 * (1 + want.abs().amax(-1, keepdim=True))).all(), K
    scores[1, 0], scores[2, 0], scores[3] = torch.nan, torch.inf, -torch.inf
    out = triton_sparsemax.forward(scores)
    assert out[1:4].isnan().all() and out[4:].isfinite().all(), K
"""


@pytest.mark.parametrize("code", [TREE, SPARSEMAX], ids=["tree", "sparsemax"])
def test_interpreted_kernels(code):
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
