"""What holds for every head, whatever its options, scores, masks and dtype: 2,000 cases for each.

Hypothesis draws the options; every example has twenty rows of scores and masks of its own.
"""

from __future__ import annotations

import pytest
import torch
from cases import CATNAT, DTYPES, HEADS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jacrev, vmap

from catnat import CategoricalHead, make_head

ROWS, EXAMPLES = 20, 60
OPTIONS = {
    "mix": st.sampled_from([0.0, 0.0, 1e-6, 0.01, 0.5]),
    "tail": st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.4]),  # of natural alone
    "ordered": st.booleans(),  # of catnat alone
    "K": st.integers(2, 12),
    "scale": st.floats(0, 30),
    "density": st.floats(0.05, 1),
    "seed": st.integers(0, 2**32),
}


def drawn(
    name: str,
    mix: float,
    tail: float,
    ordered: bool,
    K: int,
    scale: float,
    density: float,
    seed: int,
) -> tuple[CategoricalHead, Tensor, Tensor]:
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
    head, scores, mask = drawn(name, **options)
    scores = scores.to(dtype).requires_grad_()
    q = head(scores, mask=mask)
    eps = torch.finfo(q.probs.dtype).eps
    assert (q.probs.sum(-1) - 1).abs().max() <= 64 * eps
    assert (q.probs[~mask] == 0).all()
    assert q.logits.isfinite().all()
    assert torch.equal(head.allowed(head.masked(scores, mask)), mask)
    drawn_ = q.sample((5,))
    assert mask.expand(5, ROWS, -1).gather(-1, drawn_[..., None]).all()
    chosen = q.logits.expand(5, ROWS, -1).gather(-1, drawn_[..., None])[..., 0]
    assert torch.allclose(q.log_prob(drawn_), chosen, rtol=1e-4, atol=1e-5)
    for loss in (q.entropy(), chosen, q.rsample(estimator="straight-through")[..., 0], q.logits):
        (gradient,) = torch.autograd.grad(loss.sum(), scores, retain_graph=True)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", HEADS)
@settings(max_examples=EXAMPLES)
@given(**OPTIONS)
def test_the_fisher_matrix_is_that_of_autograd(name, **options):
    head, free, mask = drawn(name, **options)
    scores = head.masked(free, mask)
    p, jacobian = head.probs(scores), vmap(jacrev(head.probs))(scores)  # (B, K), (B, K, S)
    weight = torch.where(p > 0, 1 / p, 0.0)
    want = torch.einsum("bki,bk,bkj->bij", jacobian, weight, jacobian)
    fisher = head.fisher(scores)
    tolerance = 1e-7 * (1 + want.abs().amax((-2, -1), keepdim=True))
    assert ((fisher - want).abs() <= tolerance).all()
    diagonal = fisher.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(head.fisher_diagonal(scores), diagonal, rtol=1e-7, atol=1e-12)
    if head.fisher_is_diagonal:
        assert ((want - torch.diag_embed(want.diagonal(dim1=-2, dim2=-1))).abs() <= tolerance).all()
