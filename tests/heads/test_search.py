"""The likeliest categories and draws without replacement, against all log-probabilities."""

import itertools

import pytest
import torch
from cases import HEADS, CauchyHead, Flattened, random_mask, random_scores
from scipy.stats import chisquare

from catnat import HeadCategorical, MixedHead, distributions, make_head
from catnat.heads import search, tree
from catnat.heads.search import SearchTree, best_leaves, draw_leaves
from catnat.numerics import floored_sums


@pytest.fixture
def always_search(monkeypatch):
    """Let trees of every size be searched."""
    for module in (tree, distributions):
        monkeypatch.setattr(module, "SEARCH_FROM", 1)
    monkeypatch.setattr(tree, "_WALK_FROM", 0)


def search_tree(head, scores):
    flat = scores.reshape(-1, head.num_scores)
    found = SearchTree(flat, head.num_categories, head.activation, head.constants(scores))
    return found, torch.arange(len(flat))


def trees(K):
    named = [make_head(name, K) for name in ("sigmoid", "natural")]
    order = torch.randperm(K).tolist()
    return [*named, make_head("natural", K, tail=0.05, order=order), CauchyHead(K)]


# ------------------------------------------------------------------------------------ topk


@pytest.mark.parametrize("k", [1, 20])
@pytest.mark.parametrize("K", [2, 3, 20, 65, 1000, 4099])
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_the_likeliest_leaves_are_those_of_the_full_sort(K, k, scale):
    torch.manual_seed(K)
    k = min(k, K)
    for head in trees(K):
        scores = random_scores(head, rows=5, scale=scale)
        nodes, rows = search_tree(head, scores)
        values, leaves = best_leaves(nodes, rows, k)
        full = nodes.first_leaves(rows, K - 1)
        assert torch.equal(floored_sums(full).sort(1).values, head.log_probs(scores).sort(1).values)
        torch.testing.assert_close(floored_sums(values), floored_sums(full).topk(k).values)
        torch.testing.assert_close(floored_sums(full.gather(1, leaves)), floored_sums(values))
        assert all(len(set(row)) == k for row in leaves.tolist())


@pytest.mark.parametrize("width", [2, 4, 16])
def test_rows_that_a_narrow_beam_does_not_certify_go_on_until_they_are_exact(width, monkeypatch):
    monkeypatch.setattr(search, "BEAM", width)
    monkeypatch.setattr(search, "_FULL_SHARE", 1)
    full_rows = []
    monkeypatch.setattr(search, "_of_all", lambda *given: full_rows.append(given))
    torch.manual_seed(width)
    head = make_head("sigmoid", 777)
    scores = random_scores(head, rows=200, scale=0.7)
    nodes, rows = search_tree(head, scores)
    beam_values, _, bound = search._by_beam(nodes, rows, 3)
    full = head.log_probs(scores).topk(3)
    is_open = bound > beam_values[:, -1]
    wrong = (beam_values - full.values).abs().amax(1) > 1e-9
    assert is_open.any() and not (wrong & ~is_open).any()  # a certified row is right
    values, leaves = best_leaves(nodes, rows, 3)
    torch.testing.assert_close(values, full.values)
    assert torch.equal(leaves, full.indices) and not full_rows


def test_ties_give_distinct_categories_with_the_right_values(always_search):
    for K in (8, 130, 3001):
        head = make_head("sigmoid", K)
        for scores in (torch.zeros(3, K - 1), torch.randint(2, (3, K - 1)).float()):
            scores = scores.double()
            values, classes = head.topk(scores, 7)
            full = head.log_probs(scores)
            torch.testing.assert_close(values, full.topk(7).values)
            torch.testing.assert_close(full.gather(1, classes), values)
            assert all(len(set(row)) == 7 for row in classes.tolist())


def test_a_floor_cuts_the_search_off_and_keeps_what_is_above_exact():
    torch.manual_seed(0)
    head = make_head("sigmoid", 3000)
    scores = random_scores(head, rows=50, scale=0.3)
    nodes, rows = search_tree(head, scores)
    full = head.log_probs(scores).topk(10).values
    floor = full[:, 4] - 1e-9
    values, _ = best_leaves(nodes, rows, 10, floor)
    torch.testing.assert_close(values[:, :5], full[:, :5])
    assert (values[:, 5:] <= full[:, 5:] + 1e-9).all()


@pytest.mark.parametrize("name", HEADS)
def test_topk_and_mode_of_every_head(name, always_search):
    torch.manual_seed(3)
    head = make_head(name, 300)
    scores = random_scores(head, rows=6, scale=0.2).view(2, 3, -1).requires_grad_()
    values, classes = head.topk(scores, 4)
    full = head.log_probs(scores).topk(4)
    torch.testing.assert_close(values, full.values)
    assert values.shape == classes.shape == (2, 3, 4)
    weight = torch.randn(2, 3, 4, dtype=torch.float64)
    got, want = (torch.autograd.grad((x * weight).sum(), scores)[0] for x in (values, full.values))
    torch.testing.assert_close(got, want)
    q = head(scores)
    likeliest = q.mode
    torch.testing.assert_close(q.log_prob(likeliest), full.values[..., 0])
    wide = head(scores).expand((5, 2, 3))
    assert wide.mode.shape == (5, 2, 3)
    torch.testing.assert_close(wide.topk(2).values, full.values[..., :2].expand(5, 2, 3, 2))
    known = HeadCategorical(head.log_probs(scores))
    torch.testing.assert_close(known.topk(4).values, values)


def test_forbidden_categories_come_last(always_search):
    torch.manual_seed(1)
    for head in (make_head("sigmoid", 500), make_head("natural", 37), make_head("softmax", 37)):
        K = head.num_categories
        mask = random_mask(4, K) & (torch.arange(K) % 5 == 0)
        mask[:, 0] = True
        masked = head.masked(random_scores(head), mask)
        values, classes = head.topk(masked, min(K, 120))
        count = mask.sum(1)
        for row in range(4):
            assert mask[row, classes[row, : count[row]]].all()
            assert not mask[row, classes[row, count[row] :]].any()
        torch.testing.assert_close(values, head.log_probs(masked).topk(values.shape[1]).values)


def test_nan_comes_first_and_other_rows_are_untouched(always_search):
    head = make_head("sigmoid", 400)
    scores = torch.randn(3, 399, dtype=torch.float64)
    scores[1, 200] = torch.nan
    values = head.topk(scores, 4).values
    full = head.log_probs(scores)
    torch.testing.assert_close(values, full.topk(4).values, equal_nan=True)
    assert values[1].isnan().any() and not values[[0, 2]].isnan().any()
    broken = best_leaves(*search_tree(head, torch.full_like(scores, torch.nan)), 4)[0]
    assert broken.isnan().all()
    assert not head.topk(scores[:0], 4).values.numel()
    assert head.topk(scores[0], 4).values.shape == (4,)


@pytest.mark.parametrize("head", [Flattened(20), MixedHead(make_head("sigmoid", 20), 0.2)])
def test_heads_that_are_not_trees_of_their_scores_compute_all(head, always_search):
    scores = random_scores(head)
    torch.testing.assert_close(head.topk(scores, 3), head.log_probs(scores).topk(3))
    assert head.sample_without_replacement(scores, 20)[0].sort(0).values.T.tolist() == [
        list(range(20)) for _ in scores
    ]


def test_under_transforms_all_categories_are_computed(always_search):
    head = make_head("sigmoid", 40)
    scores = random_scores(head)
    got = torch.func.vmap(lambda s: head.topk(s, 3).indices)(scores)
    assert torch.equal(got, head.topk(scores, 3).indices)


@pytest.mark.parametrize("k", [0, 6, 1.5, True])
def test_a_wrong_k_is_refused(k):
    head = make_head("sigmoid", 5)
    q = head(torch.zeros(4))
    for ask in (
        lambda: head.topk(torch.zeros(4), k),
        lambda: head.sample_without_replacement(torch.zeros(4), k),
        lambda: q.topk(k),
        lambda: q.sample_without_replacement(k),
    ):
        with pytest.raises(ValueError, match=rf"k must .*got {k}"):
            ask()


# ---------------------------------------------------------------- draws without replacement


def sequence_probs(probs, k):
    """The probability of each ordered k-tuple of different categories."""
    result = {}
    for order in itertools.permutations(range(len(probs)), k):
        left, p = 1.0, 1.0
        for category in order:
            p *= probs[category] / left
            left -= probs[category]
        result[order] = p
    return result


@pytest.mark.parametrize("walks", [True, False])
@pytest.mark.parametrize(("K", "k"), [(2, 1), (2, 2), (5, 2), (5, 5), (6, 3), (8, 2)])
def test_ordered_draws_have_their_probabilities_by_chi_square(K, k, walks, monkeypatch):
    monkeypatch.setattr(tree, "_WALK_FROM", 0 if walks else 2**40)
    torch.manual_seed(10 * K + k)
    n = 10_000
    for head in (*trees(K), make_head("softmax", K)):
        scores = random_scores(head, rows=1, scale=0.5)
        generator = torch.Generator().manual_seed(1)
        values, log_probs = head.sample_without_replacement(scores.expand(n, -1), k, generator)
        assert values.shape == log_probs.shape == (k, n)
        torch.testing.assert_close(log_probs, head.log_prob(scores, values))
        expected = sequence_probs(head.probs(scores)[0].tolist(), k)
        places = K ** torch.arange(k)
        keys = (values * places[:, None]).sum(0)
        counts = keys.bincount(minlength=K**k)
        orders = {sum(c * K**i for i, c in enumerate(order)): p for order, p in expected.items()}
        found = [int(counts[key]) for key in orders]
        assert sum(found) == n
        wanted = [n * p for p in orders.values()]
        rare = [i for i, x in enumerate(wanted) if x < 5]
        common = [i for i, x in enumerate(wanted) if x >= 5]
        found = [found[i] for i in common] + [sum(found[i] for i in rare)]
        wanted = [wanted[i] for i in common] + [sum(wanted[i] for i in rare)]
        if wanted[-1] < 5:
            found, wanted = (
                found[:-1],
                [w * sum(found[:-1]) / sum(wanted[:-1]) for w in wanted[:-1]],
            )
        assert len(found) == 1 or chisquare(found, wanted).pvalue > 1e-4


def test_the_first_draw_of_a_large_tree_is_a_sample():
    torch.manual_seed(0)
    head = make_head("natural", 1003)
    scores = random_scores(head, rows=1, scale=1.0).expand(4000, -1)
    noise = torch.Generator().manual_seed(2)
    values = head.sample_without_replacement(scores, 6, noise)[0]
    assert all(len(set(column)) == 6 for column in values.T[:200].tolist())
    probs = head.probs(scores[0])
    top = probs.topk(20).indices
    found = [int((values[0] == k).sum()) for k in top]
    rest = 1 - float(probs[top].sum())
    expected = [4000 * float(probs[k]) for k in top]
    assert chisquare([*found, 4000 - sum(found)], [*expected, 4000 * rest]).pvalue > 1e-4


def test_gradients_and_shapes_of_draws_from_a_distribution(always_search):
    for name in HEADS:
        head = make_head(name, 9)
        scores = (random_scores(head, rows=6) / 10).view(2, 3, -1).requires_grad_()
        for q in (head(scores), HeadCategorical(head.log_probs(scores))):
            values, log_probs = q.sample_without_replacement(4, torch.Generator().manual_seed(1))
            assert values.shape == log_probs.shape == (4, 2, 3) and values.dtype == torch.int64
            torch.testing.assert_close(log_probs, head.log_prob(scores, values))
            (got,) = torch.autograd.grad(log_probs.sum(), scores)
            (want,) = torch.autograd.grad(head.log_prob(scores, values).sum(), scores)
            torch.testing.assert_close(got, want)
        assert head(scores).expand((5, 2, 3)).sample_without_replacement(2)[0].shape == (2, 5, 2, 3)


def test_impossible_categories_come_last_in_draws(always_search):
    for head in (
        make_head("natural", 12, tail=0.05),
        make_head("sigmoid", 12),
        make_head("softmax", 12),
    ):
        mask = random_mask(50, 12)
        masked = head.masked(random_scores(head, rows=50), mask)
        values, log_probs = head.sample_without_replacement(masked, 12)
        assert torch.equal(values.sort(0).values, torch.arange(12)[:, None].expand(12, 50))
        possible = mask.gather(1, values.T)
        assert torch.equal(possible, possible.int().sort(1, descending=True).values.bool())
        assert torch.equal(log_probs.T.exp() > 0, possible)


def test_an_activation_with_infinite_logarithms_draws_every_leaf_once():
    head = CauchyHead(6)
    never = torch.full((1, 5), -torch.inf, dtype=torch.float64)
    nodes, rows = search_tree(head, never)
    nodes.logs_at = lambda rows, at: (torch.zeros(at.shape).double(), never[:, :1].expand(at.shape))
    leaves, _ = draw_leaves(nodes, rows, 6, None)
    assert sorted(leaves[0].tolist()) == list(range(6))


def test_a_nan_score_that_matters_is_an_error_and_another_one_is_not(always_search):
    for head in (make_head("sigmoid", 8), make_head("softmax", 8)):
        scores = torch.zeros(2, head.num_scores)
        scores[1, 0] = torch.nan
        with pytest.raises(ValueError, match="no category to sample"):
            head.sample_without_replacement(scores, 2)
    scores = torch.zeros(7)
    scores[0] = torch.inf  # all to the right
    scores[1] = torch.nan
    assert (make_head("sigmoid", 8).sample_without_replacement(scores, 2)[0] >= 4).all()


def test_a_generator_decides_every_draw(always_search):
    head = make_head("sigmoid", 100)
    scores = random_scores(head)
    drawn = [
        head.sample_without_replacement(scores, 5, torch.Generator().manual_seed(s))[0]
        for s in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_tree_over_many_categories_is_searched_without_all_log_probabilities():
    torch.manual_seed(0)
    head = make_head("sigmoid", K := 200_003)
    scores = 3 * torch.randn(2, K - 1)
    q = head(scores)
    found, drawn = q.topk(4), q.sample_without_replacement(4)[0]
    likeliest = q.mode
    assert "logits" not in vars(q)
    torch.testing.assert_close(found.values, q.logits.topk(4).values)
    assert torch.equal(likeliest, q.logits.argmax(-1)) and torch.equal(
        found.indices[:, 0], likeliest
    )
    assert all(len(set(column)) == 4 for column in drawn.T.tolist())
