"""Gradients of log p at random categories in closed form, which the Fisher monitors draw."""

import pytest
import torch
from cases import CATEGORIES, FUSED, CauchyHead, Flattened, make, random_scores, use_kernels

from catnat import SoftmaxHead, SparsemaxHead, make_head
from catnat.fisher import sampled_scores
from catnat.ops import native

CLOSED = ("softmax", "sparsemax", *FUSED)
CERTAIN = 1 - 2**-24  # the largest level in float32
built = pytest.mark.skipif(native.library() is None, reason="the C kernels were not built")


class Tempered(SoftmaxHead):
    """A softmax whose log-probabilities are not those of its scores alone."""

    def log_probs(self, scores):
        return super().log_probs(scores / 2)


class Sharpened(SparsemaxHead):
    """A sparsemax whose log-probabilities are not those of its scores alone."""

    def log_probs(self, scores):
        return super().log_probs(2 * scores)


def all_gradients(head, scores):
    """grad_s log p(k) of every category k, by autograd in float64: (B, S) -> (B, K, S)."""
    leaf = scores.double().requires_grad_()
    columns = head.log_probs(leaf).sum(0)
    return torch.stack([torch.autograd.grad(k, leaf, retain_graph=True)[0] for k in columns], 1)


def left_to_right(head):
    """The categories in the order in which the levels pass them."""
    K = head.num_categories
    if not head.fisher_is_diagonal:
        return torch.arange(K)
    lowest = 1 << (2 * K - 1).bit_length() - 1  # leaves of the lowest level of a tree come first
    leaves = torch.tensor([*range(lowest - K, K), *range(lowest - K)])
    return leaves if head.order is None else head.classes[leaves]


def drawn(head, scores, levels):
    """The category of every level, by the distribution function in float64, and its distance.

    The distance is that from the level to the nearest value of the function.
    """
    order = left_to_right(head)
    reached = head.probs(scores.double())[:, order].cumsum(-1)
    after = reached[None] - levels.double()[..., None]  # (M, B, K)
    place = (after <= 0).sum(-1).clamp_max(head.num_categories - 1)
    return order[place], after.abs().amin(-1)


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("name", CLOSED)
def test_every_level_of_instructions_draws_as_autograd_and_the_distribution_function_say(
    name, level, monkeypatch
):
    use_kernels(level, monkeypatch)
    torch.manual_seed(0)
    for K in (*CATEGORIES, 33, 100):
        orders = [None, torch.randperm(K).tolist()] if name in FUSED else [None]
        for order in orders:
            head = make(name, K) if order is None else make(name, K, order=order)
            scores, levels = 1.5 * torch.randn(40, head.num_scores), torch.rand(30, 40)
            got = head._gradients_at(scores, levels)
            assert got.dtype == torch.float32 and got.shape == (30, 40, head.num_scores)
            category, distance = drawn(head, scores, levels)
            want = all_gradients(head, scores)[torch.arange(40), category]
            near = (got - want).abs() <= 2e-5 * (1 + want.abs())
            assert (near.all(-1) | (distance < 1e-6)).all(), (K, order)
            assert near.all(-1).float().mean() > 0.99


@built
@pytest.mark.parametrize("name", CLOSED)
def test_the_general_way_draws_the_same_from_the_same_levels(name, monkeypatch):
    head = make(name, 8)
    scores = torch.randn(2, 50, head.num_scores)
    got = sampled_scores(head, scores, 3, torch.Generator().manual_seed(1))
    monkeypatch.setattr(native, "library", lambda: None)
    assert head._gradients_at(scores, torch.rand(3, 2, 50)) is None
    want = sampled_scores(head, scores, 3, torch.Generator().manual_seed(1))
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


@built
@pytest.mark.parametrize("K", [2, 5, 18])
@pytest.mark.parametrize("name", CLOSED)
def test_a_category_is_drawn_as_often_as_its_probability_says(name, K):
    torch.manual_seed(K)
    order = {"order": torch.randperm(K).tolist()} if name in FUSED else {}
    head, count = make(name, K, **order), 20_000
    mask = torch.arange(K) != 1
    free = random_scores(head, rows=1).float()
    levels = ((torch.arange(count) + 0.5) / count)[:, None]
    for scores in (free, 2 * free, head.masked(free, mask) if K > 2 else free):
        got = head._gradients_at(scores, levels)[:, 0]
        possible = head.probs(scores)[0] > 0
        table = all_gradients(head, scores)[0, possible].float()  # (possible categories, S)
        distance, category = (got[:, None] - table).abs().amax(-1).min(-1)
        assert distance.max() < 1e-3
        times = torch.bincount(category, minlength=len(table))
        assert (times - count * head.probs(scores)[0, possible]).abs().max() <= 2


@built
@pytest.mark.parametrize("name", FUSED)
def test_a_certain_split_goes_its_way_at_every_level_and_has_no_gradient(name):
    head = make(name, 4)
    far = [torch.inf, 3.4e38, 1e38] if name != "natural" else [torch.inf, 3.4e38, 1e6, 3.15]
    levels = torch.tensor([0.0, 2**-24, 0.5, CERTAIN])[:, None]
    for s in far:
        for bits in ((0, 0), (0, 1), (1, 0), (1, 1)):
            signs = torch.full((1, 3), 1.0 - 2.0 * bits[1])  # the other split goes another way
            signs[0, 0], signs[0, 1 + bits[0]] = 2.0 * bits[0] - 1, 2.0 * bits[1] - 1
            assert torch.equal(head._gradients_at(s * signs, levels), torch.zeros(4, 1, 3))
        half = torch.tensor([[s, 0.3, 0.0]])  # the root is certain, its right child is not
        got = head._gradients_at(half, levels)
        want = all_gradients(head, half)[0, [2, 2, 3, 3]].float()
        assert torch.allclose(got[:, 0], want, atol=1e-6)


@built
@pytest.mark.parametrize("name", CLOSED)
def test_no_level_draws_an_impossible_category(name):
    head = make(name, 5)
    levels = torch.tensor([0.0, 2**-24, 0.3, 0.7, CERTAIN, 1 - 1e-12], dtype=torch.float64)
    for allowed in range(1, 32):
        mask = torch.tensor([bool(allowed >> k & 1) for k in range(5)])
        scores = head.masked(torch.randn(head.num_scores), mask)
        got = head._gradients_at(scores, levels)
        table = all_gradients(head, scores[None])[0, mask].float()
        assert (got[:, None] - table).abs().amax(-1).amin(-1).max() < 1e-5
        if name not in FUSED:
            assert (got[:, ~mask] == 0).all()


@built
def test_softmax_gives_far_categories_no_gradient_and_stays_finite():
    head = make_head("softmax", 4)
    scores = torch.tensor([[3e38, -3e38, 0.0, -torch.inf], [200.0, 0.0, 199.0, 0.0]])
    got = head._gradients_at(scores, torch.tensor([[0.0, 0.5], [CERTAIN, CERTAIN]]))
    assert got.isfinite().all() and (got[:, 0] == 0).all()
    p = torch.tensor(1.0).sigmoid()
    assert torch.allclose(got[0, 1], torch.tensor([1 - p, 0, p - 1, 0]))
    assert torch.allclose(got[1, 1], torch.tensor([-p, 0, p, 0]))


@built
def test_sparsemax_has_no_gradient_outside_of_its_support_nor_where_one_category_is_certain():
    head = make_head("sparsemax", 4)
    scores = torch.tensor([[0.5, 0.3, -2.0, -torch.inf], [3e38, 0.0, 1e38, -3e38]])
    got = head._gradients_at(scores, torch.tensor([[0.0, 0.5], [CERTAIN, CERTAIN]]))
    assert (got[:, 1] == 0).all()  # p = (0.6, 0.4, 0, 0) in the first row, (1, 0, 0, 0) here
    assert torch.allclose(got[0, 0], torch.tensor([0.5, -0.5, 0, 0]) / 0.6)
    assert torch.allclose(got[1, 0], torch.tensor([-0.5, 0.5, 0, 0]) / 0.4)


@built
def test_a_gradient_that_depends_on_a_nan_score_is_nan():
    levels = torch.rand(200)[:, None]
    for K in (4, 5, 32):
        for name in FUSED:
            head = make(name, K)
            scores = torch.zeros(1, head.num_scores)
            scores[0, 1] = torch.nan
            got = head._gradients_at(scores, levels)
            assert got[..., 1].isnan().all() and got.isnan().sum() == 200
        for name in ("softmax", "sparsemax"):
            head = make_head(name, K)
            for bad in (torch.nan, torch.inf):
                scores = torch.zeros(2, K)
                scores[0, 1] = bad
                got = head._gradients_at(scores, levels.expand(-1, 2))
                assert got[:, 0].isnan().all() and got[:, 1].isfinite().all()
            assert head._gradients_at(scores - torch.inf, levels.expand(-1, 2)).isnan().all()


@built
@pytest.mark.parametrize("name", CLOSED)
def test_a_row_draws_alike_alone_among_many_and_with_threads(name, monkeypatch):
    head = make(name, 5)
    scores, levels = torch.randn(3000, head.num_scores), torch.rand(2, 3000)
    together = head._gradients_at(scores, levels)
    alone = [head._gradients_at(row, level) for row, level in zip(scores, levels.T, strict=True)]
    assert torch.equal(together, torch.stack(alone, 1))
    monkeypatch.setattr(native, "PARALLEL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(together, head._gradients_at(scores, levels))
    halved = head._gradients_at(scores.to(torch.bfloat16), levels)
    assert torch.equal(halved, head._gradients_at(scores.to(torch.bfloat16).float(), levels))
    empty = head._gradients_at(scores[:0], levels[:, :0])
    assert empty.shape == (2, 0, head.num_scores)


@pytest.mark.parametrize(
    "head",
    [
        make_head("sparsemax", 5, mix=0.1),
        make_head("natural", 5, mix=0.1),
        make_head("softmax", 5, mix=0.1),
        CauchyHead(5),
        Flattened(5),
        Tempered(5),
        Sharpened(5),
    ],
    ids=lambda head: type(head).__name__,
)
def test_other_heads_are_drawn_in_the_general_way(head):
    scores = torch.randn(4, head.num_scores)
    assert head._gradients_at(scores, torch.rand(2, 4)) is None
    gradients = sampled_scores(head, scores.expand(20_000, 4, -1), 1)[0]
    table = all_gradients(head, scores)
    mean = (head.probs(scores.double())[..., None] * table).sum(1)
    spread = gradients.std(0) / 20_000**0.5
    assert ((gradients.mean(0) - mean).abs() <= 5 * spread + 1e-4).all()
