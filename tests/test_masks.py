"""Masks: forbidden categories are impossible, and everything else follows from filled scores."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from cases import (
    CATEGORIES,
    CATNAT,
    DTYPES,
    FUSED,
    GRID,
    HEADS,
    LIKE_NATURAL,
    CauchyHead,
    autograd_fisher,
    exact_split,
    leaf_path,
    own_splits,
    random_scores,
    slow,
)
from cases import make as make_case
from entmax import sparsemax
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from catnat import (
    CategoricalHead,
    HeadProbe,
    NaturalHead,
    SigmoidHead,
    make_head,
)
from catnat.callbacks import FisherMonitor
from catnat.fisher import off_diagonal_mass, score_fisher
from catnat.numerics import safe_log


class SquaredHead(CategoricalHead):
    """p_k ~ softplus(s_k)^2: a head of somebody's own with one score for each category."""

    def log_probs(self, scores):
        weight = torch.nn.functional.softplus(self._checked(scores)).square()
        return safe_log(weight / weight.sum(-1, keepdim=True))

    def inverse(self, probs):
        return probs.sqrt().expm1().log()

    def fisher(self, scores):
        return torch.stack([autograd_fisher(self, each) for each in scores])


ALL = (*GRID, CauchyHead, SquaredHead)


def make(kind, K: int) -> CategoricalHead:
    return make_case(kind, K) if isinstance(kind, str) else kind(K)


def random_mask(rows: int, K: int) -> Tensor:
    mask = torch.rand(rows, K) < 0.5
    mask[torch.arange(rows), torch.randint(K, (rows,))] = True
    return mask


def restricted(name: str, head: CategoricalHead, scores: Tensor, mask: Tensor) -> Tensor:
    """One row's probabilities by the definition, (S,) and (K,) -> (K,)."""
    if name in ("softmax", "sparsemax"):
        over = {"softmax": torch.softmax, "sparsemax": sparsemax}[name]
        return torch.zeros(mask.shape, dtype=scores.dtype).masked_scatter(
            mask, over(scores[mask], -1)
        )
    K, probs = head.num_categories, []
    bits = [[b for c in range(K) if mask[c] for i, b in leaf_path(c, K) if i == node]
            for node in range(K - 1)]  # fmt: skip
    # At a node with two open sides zero must give the share of the allowed leaves.
    shares = [mpmath.mpf(sum(b)) / len(b) if len(set(b)) == 2 else mpmath.mpf(0.5) for b in bits]
    if isinstance(head, (SigmoidHead, NaturalHead)):
        both = [exact_split(head, mpmath.mpf(float(s)), share)
                for s, share in zip(scores, shares, strict=True)]  # fmt: skip
    else:
        both = own_splits(head, scores.tolist(), shares)
    for k in range(K):
        p = 1.0
        for node, bit in leaf_path(k, K):
            open_bits = set(bits[node])
            p *= float(mpmath.exp(both[node][bit])) if len(open_bits) == 2 else bit in open_bits
        probs.append(p)
    return torch.tensor(probs, dtype=scores.dtype)


@pytest.mark.parametrize("K", CATEGORIES)
@pytest.mark.parametrize("name", HEADS)
def test_the_probabilities_are_those_of_the_head_without_the_forbidden_categories(name, K):
    head = make_head(name, K)
    scores, mask = random_scores(head, 5), random_mask(5, K)
    got = head(scores, mask=mask).probs
    for row, each, allowed in zip(got, scores, mask, strict=True):
        assert torch.allclose(row, restricted(name, head, each, allowed), atol=1e-12)


@pytest.mark.parametrize("kind", ALL)
def test_zero_scores_are_uniform_over_the_allowed_categories(kind):
    for K in (2, 3, 5, 8, 18):
        head, mask = make(kind, K), random_mask(30, K)
        got = head(torch.zeros(30, head.num_scores), mask=mask).probs
        assert torch.allclose(got, mask / mask.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_a_mask_that_allows_everything_changes_no_bit(kind):
    head = make(kind, 11)
    scores = random_scores(head, 20).float()
    everything = torch.ones(20, 11, dtype=torch.bool)
    assert torch.equal(head.masked(scores, everything), scores)


@pytest.mark.parametrize("name", CATNAT)
def test_without_uniform_at_zero_a_mask_moves_no_split(name):
    head = make_head(name, 6, uniform_at_zero=False)
    scores, mask = random_scores(head, 20), random_mask(20, 6)
    got = head.masked(scores, mask)
    assert torch.equal(got[got.isfinite() & (got != 0)], scores[got.isfinite() & (got != 0)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [2, 3, 5, 8, 18])
@pytest.mark.parametrize("kind", ALL)
def test_forbidden_categories_are_impossible_and_gradients_finite(kind, K, dtype):
    head = make(kind, K)
    mask = random_mask(40, K)
    scores = random_scores(head, 40, scale=3.0).to(dtype).requires_grad_()
    q = head(scores, mask=mask)
    assert (q.probs[~mask] == 0).all()
    assert torch.allclose(q.probs.sum(-1), torch.ones((), dtype=q.probs.dtype), atol=1e-5)
    assert q.logits.isfinite().all()
    drawn = q.sample((100,))
    assert mask.expand(100, -1, -1).gather(-1, drawn[..., None]).all()
    (q.entropy() + q.log_prob(drawn).mean(0)).sum().backward()
    assert scores.grad.isfinite().all()
    lone = mask.sum(-1) == 1  # nothing left to choose
    assert (scores.grad[lone] == 0).all()


@pytest.mark.parametrize("kind", ALL)
def test_a_mask_can_be_read_back_from_the_scores(kind):
    for K in (2, 5, 8):
        head = make(kind, K)
        mask = random_mask(50, K)
        assert torch.equal(head.allowed(head.masked(random_scores(head, 50), mask)), mask)
        assert head.allowed(random_scores(head)).all()


@pytest.mark.parametrize("name", CATNAT)
def test_a_mask_speaks_of_classes_whatever_their_order(name):
    order = [3, 0, 4, 1, 2]
    head, plain = make_head(name, 5, order=order), make_head(name, 5)
    scores, mask = random_scores(head, 20), random_mask(20, 5)
    of_leaves = torch.empty_like(mask)
    of_leaves[:, order] = mask
    assert torch.equal(head(scores, mask=mask).probs, plain(scores, mask=of_leaves).probs[:, order])
    assert torch.equal(head.allowed(head.masked(scores, mask)), mask)


@pytest.mark.parametrize("name", FUSED)
def test_a_masked_tree_is_still_lazy(name):
    head = make(name, 5)
    scores, mask = random_scores(head, 20).float(), random_mask(20, 5)
    q = head(scores, mask=mask)
    value = q.sample((3,))
    got = q.log_prob(value)
    assert "logits" not in vars(q)
    assert torch.allclose(got, q.logits.expand(3, -1, -1).gather(-1, value[..., None])[..., 0])
    with pytest.raises(ValueError, match="nan"):
        head(torch.full((4,), torch.nan), mask=torch.ones(5, dtype=torch.bool))


@pytest.mark.parametrize("name", HEADS)
def test_a_mask_that_allows_everything_changes_nothing(name):
    head = make_head(name, 5)
    scores = random_scores(head)
    assert torch.equal(head.masked(scores, torch.ones(5, dtype=torch.bool)), scores)


@pytest.mark.parametrize("name", HEADS)
def test_masks_and_scores_broadcast(name):
    head = make_head(name, 5)
    masks, scores = random_mask(4, 5), random_scores(head, 3)
    want = torch.stack([torch.stack([head(s, mask=m).probs for s in scores]) for m in masks])
    assert torch.allclose(head(scores, mask=masks[:, None]).probs, want, atol=1e-12)
    assert torch.allclose(head(scores[0], masks).probs, want[:, 0], atol=1e-12)
    assert head(scores[:0], mask=masks[0]).probs.shape == (0, 5)


# ------------------------------------------------------------------------------------- Fisher


@pytest.mark.parametrize("K", [2, 3, 5, 8])
@pytest.mark.parametrize("name", HEADS)
def test_the_fisher_matrix_is_that_of_autograd(name, K):
    head = make_head(name, K)
    scores = head.masked(random_scores(head, 10), random_mask(10, K))
    for row in scores:
        assert torch.allclose(head.fisher(row), autograd_fisher(head, row), atol=1e-10)
        assert torch.allclose(head.fisher_diagonal(row), head.fisher(row).diagonal(), atol=1e-10)
    assert torch.allclose(head.mean_fisher(scores), head.fisher(scores).mean(0), atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # float32 has fused kernels
@pytest.mark.parametrize("name", CATNAT)
def test_the_fisher_matrix_of_a_masked_tree_stays_diagonal(name, dtype):
    head = make_head(name, 8)
    scores = head.masked(random_scores(head, 20).to(dtype), random_mask(20, 8))
    jacobians = torch.stack([torch.func.jacrev(head.probs)(row) for row in scores.double()])
    p = head.probs(scores.double())
    weight = torch.where(p > 0, 1 / p, 0.0)
    fisher = torch.einsum("bki,bk,bkj->bij", jacobians, weight, jacobians)
    assert off_diagonal_mass(fisher).max() < 1e-12
    diagonal = head.fisher_diagonal(scores)
    assert torch.allclose(diagonal.double(), fisher.diagonal(dim1=1, dim2=2), atol=1e-6)
    assert (diagonal[scores.isinf()] == 0).all()


@pytest.mark.parametrize("name", HEADS)
def test_scores_that_do_not_matter_do_not_move_under_the_natural_gradient(name):
    head = make_head(name, 8)
    given = random_scores(head, 20).requires_grad_()
    scores = head.masked(given, random_mask(20, 8))
    scores.retain_grad()
    head.log_probs(scores).square().clamp_max(100).sum().backward()
    step = head.natural_gradient(scores, scores.grad)
    assert step.isfinite().all()
    assert (step[given.grad == 0].abs() < 1e-9).all()


@pytest.mark.parametrize("name", HEADS)
def test_a_sampled_fisher_matrix_approaches_the_exact_one(name):
    head = make_head(name, 4)
    scores = head.masked(
        head.inverse(torch.tensor([0.4, 0.3, 0.2, 0.1])), torch.tensor([True, True, False, True])
    )
    sampled = score_fisher(head, scores, "sampled", 20_000)
    assert torch.allclose(sampled, head.fisher(scores), atol=0.1)


# --------------------------------------------------------------------------------- the company


@pytest.mark.parametrize(
    "kind", [slow(kind) if kind in (*LIKE_NATURAL, CauchyHead) else kind for kind in ALL]
)
def test_compiled_batched_and_under_autocast_it_is_the_same(kind):
    torch._dynamo.reset()
    head = make(kind, 5)
    scores, mask = random_scores(head, 6).float(), random_mask(6, 5)

    def log_probs(s, m):
        return head(s, mask=m).logits

    want = log_probs(scores, mask)
    compiled = torch.compile(log_probs, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(scores, mask), want, rtol=1e-4, atol=1e-6)
    assert torch.allclose(torch.func.vmap(log_probs)(scores, mask), want, rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(log_probs(scores, mask), want)


def test_a_probe_keeps_the_masked_scores():
    head = make_head("natural", 4)
    scores, mask = random_scores(head), random_mask(4, 4)
    want = head.masked(scores, mask)
    for call in (
        lambda: head(scores, mask),
        lambda: head(scores, mask=mask),
        lambda: head(scores=scores, mask=mask),
    ):
        with HeadProbe(head) as probe:
            call()
        (seen,) = [each for _, _, each in probe]
        assert torch.equal(seen, want)


class MaskedFit(LightningModule):
    """Cross-entropy under a mask that forbids the last two of five categories."""

    def __init__(self, name: str):
        super().__init__()
        self.head = make_head(name, 5)
        self.net = torch.nn.Linear(3, self.head.num_scores)
        self.scores = []

    def training_step(self, batch, index):
        mask = torch.tensor([True, True, True, False, False])
        scores = self.net(batch)
        self.scores.append(self.head.masked(scores.detach(), mask))
        return -self.head(scores, mask=mask).log_prob(torch.zeros(len(batch))).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(32, 3), batch_size=8)


@pytest.mark.parametrize("name", HEADS)
def test_the_monitor_sees_the_masked_head(name, tmp_path):
    monitor, module = FisherMonitor(), MaskedFit(name)
    Trainer(
        max_steps=3,
        callbacks=[monitor],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    ).fit(module)
    want = off_diagonal_mass(module.head.mean_fisher(module.scores[-1]))
    assert monitor.latest["fim/off_diagonal_mass"] == pytest.approx(float(want), abs=1e-5)


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", HEADS)
def test_a_row_that_allows_nothing_is_named(name):
    head = make_head(name, 4)
    mask = torch.ones(2, 5, 4, dtype=torch.bool)
    mask[1, 3] = False
    with pytest.raises(ValueError, match=r"mask of row \(1, 3\) allows no category"):
        head(torch.zeros(2, 5, head.num_scores), mask=mask)
    with pytest.raises(ValueError, match="mask allows no category"):
        head(torch.zeros(head.num_scores), mask=mask[1, 3])
    # Where nobody may look at the mask, the row is NaN.
    rows = torch.func.vmap(head.masked)(torch.zeros(5, head.num_scores), mask[1])
    assert torch.equal(head.log_probs(rows).isnan().all(-1), ~mask[1].any(-1))
    assert torch.equal(head.log_probs(rows).isnan().any(-1), ~mask[1].any(-1))


@pytest.mark.parametrize("name", HEADS)
def test_a_bad_mask_is_named(name):
    head = make_head(name, 4)
    scores = torch.zeros(2, head.num_scores)
    for mask, got in (
        (torch.ones(2, 4), r"torch\.float32"),
        (torch.ones(2, 4, dtype=torch.uint8), r"torch\.uint8"),
        (np.ones((2, 4), dtype=bool), "ndarray"),
        ([True] * 4, "list"),
    ):
        with pytest.raises(TypeError, match=f"mask must be a tensor of bool, .* got {got}"):
            head(scores, mask=mask)
    for shape in ((2, 5), (2, 3), ()):
        with pytest.raises(ValueError, match=r"mask must have 4 categories .* got shape"):
            head(scores, mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask of shape \(3, 4\) .* scores of shape \(2, "):
        head(scores, mask=torch.ones(3, 4, dtype=torch.bool))


def test_a_head_with_other_scores_says_what_is_missing():
    class Odd(SquaredHead):
        def __init__(self, K):
            super().__init__(K)
            self.num_scores = K + 1

    with pytest.raises(NotImplementedError, match="Odd has 5 scores for 4 categories"):
        Odd(4)(torch.zeros(5), mask=torch.ones(4, dtype=torch.bool))
