"""Masks: forbidden categories are impossible, and everything else follows from filled scores."""

from functools import partial

import mpmath
import pytest
import torch
from cases import (
    CATEGORIES,
    CATNAT,
    GRID,
    HEADS,
    LIKE_NATURAL,
    CauchyHead,
    assert_same_however_called,
    autograd_fisher,
    both_floats,
    exact_split,
    leaf_path,
    random_mask,
    random_scores,
    slow,
)
from cases import make as make_case
from entmax import sparsemax

from catnat import CategoricalHead, SoftmaxHead, make_head
from catnat.numerics import LOG_ZERO, safe_log


class SquaredHead(CategoricalHead):
    """p_k ~ softplus(s_k)^2: a head of somebody's own with one score for each category."""

    def log_probs(self, scores):
        weight = torch.nn.functional.softplus(self._checked(scores)).square()
        return safe_log(weight / weight.sum(-1, keepdim=True))

    def inverse(self, probs):
        return probs.sqrt().expm1().log()

    def fisher(self, scores):
        return torch.stack([autograd_fisher(self, row) for row in scores])


ALL = (*GRID, CauchyHead, SquaredHead)


def make(kind, K):
    return make_case(kind, K) if isinstance(kind, str) else kind(K)


def restricted(name, head, scores, mask):
    """One row's probabilities by the definition, (S,) and (K,) -> (K,)."""
    if name in ("softmax", "sparsemax"):
        over = {"softmax": torch.softmax, "sparsemax": sparsemax}[name]
        return torch.zeros(mask.shape, dtype=scores.dtype).masked_scatter(
            mask, over(scores[mask], -1)
        )
    K = head.num_categories
    probs = []
    bits = [
        [b for c in range(K) if mask[c] for i, b in leaf_path(c, K) if i == node]
        for node in range(K - 1)
    ]
    # At a node with two open sides zero must give the share of the allowed leaves.
    shares = [mpmath.mpf(sum(b)) / len(b) if len(set(b)) == 2 else mpmath.mpf(0.5) for b in bits]
    splits = [
        exact_split(head, mpmath.mpf(float(s)), share)
        for s, share in zip(scores, shares, strict=True)
    ]
    for k in range(K):
        p = 1.0
        for node, bit in leaf_path(k, K):
            open_bits = set(bits[node])
            p *= float(mpmath.exp(splits[node][bit])) if len(open_bits) == 2 else bit in open_bits
        probs.append(p)
    return torch.tensor(probs, dtype=scores.dtype)


@pytest.mark.parametrize("K", CATEGORIES)
@pytest.mark.parametrize("name", HEADS)
def test_the_probabilities_are_those_of_the_head_without_the_forbidden_categories(name, K):
    head = make_head(name, K)
    scores = random_scores(head, 5)
    mask = random_mask(5, K)
    got = head(scores, mask=mask).probs
    for row, row_scores, allowed in zip(got, scores, mask, strict=True):
        assert torch.allclose(row, restricted(name, head, row_scores, allowed), atol=1e-12)


@pytest.mark.parametrize("kind", ALL)
def test_zero_scores_are_uniform_over_the_allowed_categories(kind):
    for K in (2, 3, 5, 8, 18):
        head = make(kind, K)
        mask = random_mask(30, K)
        got = head(torch.zeros(30, head.num_scores), mask=mask).probs
        assert torch.allclose(got, mask / mask.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_a_mask_that_allows_everything_changes_no_bit(kind):
    head = make(kind, 11)
    scores = random_scores(head, 20).float()
    everything = torch.ones(20, 11, dtype=torch.bool)
    assert torch.equal(head.masked(scores, everything), scores)


@pytest.mark.parametrize("name", CATNAT)
def test_a_mask_speaks_of_classes_whatever_their_order(name):
    order = [3, 0, 4, 1, 2]
    head = make_head(name, 5, order=order)
    plain = make_head(name, 5)
    scores = random_scores(head, 20)
    mask = random_mask(20, 5)
    of_leaves = torch.empty_like(mask)
    of_leaves[:, order] = mask
    assert torch.equal(head(scores, mask=mask).probs, plain(scores, mask=of_leaves).probs[:, order])
    assert torch.equal(head.allowed(head.masked(scores, mask)), mask)


@pytest.mark.parametrize("name", HEADS)
def test_masks_and_scores_broadcast(name):
    head = make_head(name, 5)
    masks = random_mask(4, 5)
    scores = random_scores(head, 3)
    want = torch.stack([torch.stack([head(s, mask=m).probs for s in scores]) for m in masks])
    assert torch.allclose(head(scores, mask=masks[:, None]).probs, want, atol=1e-12)
    assert torch.allclose(head(scores[0], masks).probs, want[:, 0], atol=1e-12)
    assert head(scores[:0], mask=masks[0]).probs.shape == (0, 5)


# --------------------------------------------------------------------------------- the company


@pytest.mark.parametrize(
    "kind", [slow(kind) if kind in (*LIKE_NATURAL, CauchyHead) else kind for kind in ALL]
)
def test_compiled_batched_and_under_autocast_it_is_the_same(kind):
    torch._dynamo.reset()
    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
    assert_same_however_called(make(kind, 5), compiled)


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", HEADS)
def test_a_row_that_allows_nothing_is_refused(name):
    head = make_head(name, 4)
    mask = torch.ones(2, 5, 4, dtype=torch.bool)
    mask[1, 3] = False
    for rows in (mask, mask[1, 3]):
        with pytest.raises(ValueError, match="a row of the mask allows no category"):
            head(torch.zeros(*rows.shape[:-1], head.num_scores), mask=rows)
    # Where the mask is not looked at, the row is NaN.
    rows = torch.func.vmap(head.masked)(torch.zeros(5, head.num_scores), mask[1])
    assert torch.equal(head.log_probs(rows).isnan().all(-1), ~mask[1].any(-1))
    assert torch.equal(head.log_probs(rows).isnan().any(-1), ~mask[1].any(-1))


def test_a_bad_mask_is_named():
    head = make_head("natural", 4)
    scores = torch.zeros(2, head.num_scores)
    with pytest.raises(ValueError, match=r"mask must be bool, True = allowed, got torch\.float32"):
        head(scores, mask=torch.ones(2, 4))
    with pytest.raises(
        ValueError, match=r"expected 4 entries of the mask in the last dimension, got \(2, 5\)"
    ):
        head(scores, mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=r"size of tensor a .* must match"):
        head(scores, mask=torch.ones(3, 4, dtype=torch.bool))


# --------------------------------------------------------------------------- masks upon masks


@pytest.mark.parametrize("kind", ALL)
def test_masking_twice_is_masking_with_both(kind):
    head = make(kind, 6)
    scores = random_scores(head, 30)
    one = random_mask(30, 6)
    other = random_mask(30, 6)
    one[:, 0] = other[:, 0] = True
    want = head(scores, mask=one & other).probs
    assert torch.allclose(head(head.masked(scores, one), mask=other).probs, want, atol=1e-12)
    assert torch.allclose(head(head.masked(scores, one), mask=one & other).probs, want, atol=1e-12)
    again = head.masked(head.masked(scores, one), one)
    assert torch.equal(again, head.masked(scores, one))
    none = one[:1] & ~one[:1]
    none[:, -1] = True
    with pytest.raises(ValueError, match="allows no category"):
        head.masked(head.masked(scores[:1], ~none), none)


@both_floats
@pytest.mark.parametrize("kind", ALL)
def test_impossible_categories_have_one_floor_in_every_head(kind, dtype):
    head = make(kind, 6)
    mask = random_mask(30, 6)
    floors = head(random_scores(head, 30).to(dtype), mask=mask).logits[~mask]
    assert (floors == LOG_ZERO).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ALL)
def test_masks_of_half_precision_are_computed_in_float32(kind, dtype):
    head = make(kind, 7)
    mask = random_mask(30, 7)
    scores = random_scores(head, 30).to(dtype)
    want = head(scores.double(), mask=mask).probs
    assert (head(scores, mask=mask).probs - want).abs().max() < 1e-6


def test_an_own_flat_head_that_does_not_read_masks_is_refused():
    class Clamped(SoftmaxHead):
        def log_probs(self, scores):
            return super().log_probs(scores.clamp(-5, 5))

    mask = torch.tensor([True, False, True])
    with pytest.raises(ValueError, match="gives a forbidden category the probability"):
        Clamped(3)(torch.zeros(3), mask=mask)
