"""The kernels of the Fisher monitor: exact and drawn matrices from one pass over the scores."""

import pytest
import torch
from cases import CATEGORIES, FUSED, CauchyHead, Flattened, make, use_kernels

from catnat import NaturalHead, SoftmaxHead, SparsemaxHead, make_head
from catnat.callbacks.fisher_diagnostics import HeadHistory, StepNoise
from catnat.fisher import paired_mean_fishers
from catnat.ops import native

built = pytest.mark.skipif(native.library() is None, reason="the C kernels were not built")


FLAT = ["softmax", "sparsemax"]  # heads without a tree


class Doubled(NaturalHead):
    """A head with diagnostics of its own."""

    def diagnostics(self, scores):
        return 2 * super().diagnostics(scores)


class DoubledSparsemax(SparsemaxHead):
    """The same without a tree."""

    def diagnostics(self, scores):
        return 2 * super().diagnostics(scores)


class Halved(SoftmaxHead):
    """A head with probabilities of its own."""

    def log_probs(self, scores):
        return super().log_probs(scores / 2)


def in_two_passes(head, scores, levels):
    return head.diagnostics(scores), paired_mean_fishers(head, scores, levels)


def close(got, want):
    """Equal but for rounding, relative to the largest entry of a step; NaN at the same places."""
    scale = want.nan_to_num().abs().flatten(-2).amax(-1)[..., None, None]
    near = (got - want).abs() <= 1e-5 * scale + 1e-12
    return bool((near | (got.isnan() & want.isnan())).all())


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("name", FUSED)
def test_every_level_of_instructions_gives_what_two_passes_give(name, level, monkeypatch):
    use_kernels(level, monkeypatch)
    for K in (*CATEGORIES, 33, 100, 300, 1100):
        head = make(name, K, order=torch.randperm(K).tolist())
        for rows, draws in ((1, 2), (70, 2), (70, 5), (1500 if K < 9 else 40, 3)):
            scores = 1.5 * torch.randn(3, rows, K - 1)
            levels = torch.rand(draws, 3, rows)
            exact, pairs = head._observe(scores, levels)
            want = in_two_passes(head, scores, levels)
            assert exact.dtype == pairs.dtype == torch.float32
            assert exact.shape == (3, K) and pairs.shape == (2, 3, K - 1, K - 1)
            assert torch.allclose(exact, want[0], rtol=1e-5, atol=1e-7), (K, rows, draws)
            assert close(pairs, want[1]), (K, rows, draws)


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("name", FLAT)
def test_every_level_gives_what_two_passes_give_without_a_tree(name, level, monkeypatch):
    use_kernels(level, monkeypatch)
    for K in (2, 3, 7, 8, 9, 16, 18, 32, 33, 63, 64):
        head = make_head(name, K)
        for rows, draws in ((1, 2), (70, 2), (70, 5), (1500 if K < 9 else 130, 3)):
            scores = 1.5 * torch.randn(3, rows, K)
            levels = torch.rand(draws, 3, rows)
            exact, pairs = head._observe(scores, levels)
            want = in_two_passes(head, scores, levels)
            assert exact.dtype == pairs.dtype == torch.float32
            assert exact.shape == (3, K * K + 1) and pairs.shape == (2, 3, K, K)
            assert close(exact[:, None], want[0][:, None]), (K, rows, draws)
            assert close(pairs, want[1]), (K, rows, draws)


@built
@pytest.mark.parametrize("name", FLAT)
def test_it_meets_the_exact_matrix_without_a_tree(name):
    head = make_head(name, 5)
    scores, levels = 0.02 * torch.randn(2, 8, 5), torch.rand(40, 2, 5000)
    exact, pairs = head._observe(scores.repeat(1, 625, 1), levels)
    want = torch.stack([head.mean_fisher(each) for each in scores.double()])
    saturated = head.saturated(scores).double().mean((1, 2))
    assert torch.allclose(exact[:, :-1].double(), want.flatten(1), rtol=1e-5, atol=1e-6)
    assert torch.allclose(exact[:, -1].double(), saturated)
    assert (pairs - want).abs().max() < 0.02 * want.max()
    assert torch.equal(pairs, pairs.mT)


@built
def test_a_certain_category_of_softmax_keeps_small_entries():
    head = make_head("softmax", 3)
    scores = torch.tensor([[[20.0, 0.0, 1.0], [21.0, 2.0, 0.0]]])
    exact, _ = head._observe(scores, torch.rand(2, 1, 2))
    want = head.mean_fisher(scores.double()).flatten()
    assert torch.allclose(exact[0, :-1].double(), want, rtol=1e-5, atol=0)


@built
@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("far", [1e6, 1e30, torch.inf])
def test_certain_categories_and_the_last_level_without_a_tree(name, far):
    head = make_head(name, 4)
    levels = torch.tensor([0.0, 1 - 2**-24])[:, None, None].expand(2, 1, 4)
    scores = -far * (1 - torch.eye(4)[None])
    scores = torch.where(scores.isnan(), 0.0, scores)
    exact, pairs = head._observe(scores, levels)
    want = in_two_passes(head, scores, levels)
    assert torch.allclose(exact, want[0]) and close(pairs, want[1])
    assert exact.isfinite().all() and pairs.isfinite().all()


@built
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", FLAT)
def test_nan_comes_out_without_a_tree(name, bad):
    head = make_head(name, 5)
    scores, levels = torch.randn(3, 50, 5), torch.rand(2, 3, 50)
    scores[1, 30, 2] = bad
    exact, pairs = head._observe(scores, levels)
    want = in_two_passes(head, scores, levels)
    assert torch.equal(exact.isnan(), want[0].isnan()) and want[0][1].isnan().any()
    assert torch.allclose(exact[:, -1], want[0][:, -1], equal_nan=True)
    assert close(pairs, want[1]) and pairs[:, [0, 2]].isfinite().all()


@built
@pytest.mark.parametrize("name", FUSED)
def test_it_meets_the_exact_matrix_in_float64(name):
    head = make(name, 6)
    scores, levels = torch.randn(2, 8, 5), torch.rand(40, 2, 5000)
    rows = scores.repeat(1, 625, 1)
    exact, pairs = head._observe(rows, levels)
    want = torch.stack([head.mean_fisher(each) for each in scores.double()])
    assert torch.allclose(exact[:, :-1].double(), want.diagonal(dim1=1, dim2=2), rtol=1e-5)
    assert (pairs - want).abs().max() < 0.02 * want.max()
    assert torch.equal(pairs, pairs.mT)


@built
@pytest.mark.parametrize("name", FUSED)
def test_certain_splits_and_the_last_level(name):
    head = make(name, 4)
    levels = torch.tensor([0.0, 1 - 2**-24])[:, None, None].expand(2, 1, 8)
    signs = torch.tensor([[a, b, c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)])[None]
    for far in (torch.inf, 3.4e38, 1e6):
        scores = far * signs
        exact, pairs = head._observe(scores, levels)
        want = in_two_passes(head, scores, levels)
        assert torch.allclose(exact, want[0], rtol=1e-5) and close(pairs, want[1])
        assert pairs.isfinite().all()


@built
@pytest.mark.parametrize("K", [2, 5, 32])
@pytest.mark.parametrize("name", FUSED)
def test_nan_comes_out_where_two_passes_have_it(name, K):
    head = make(name, K)
    scores, levels = torch.randn(3, 50, K - 1), torch.rand(2, 3, 50)
    scores[1, 30, K // 2 - 1] = torch.nan
    exact, pairs = head._observe(scores, levels)
    want = in_two_passes(head, scores, levels)
    assert torch.equal(exact.isnan(), want[0].isnan()) and want[0][1].isnan().any()
    assert torch.equal(pairs.isnan(), want[1].isnan()) and want[1][:, 1].isnan().any()
    assert close(pairs, want[1]) and pairs[:, [0, 2]].isfinite().all()


@built
@pytest.mark.parametrize("name", ["natural", *FLAT])
def test_half_precision_and_strides_are_those_of_float32(name):
    head = make_head(name, 8)
    scores = torch.randn(40, 3, head.num_scores).transpose(0, 1)
    levels = torch.rand(3, 2, 40).movedim(1, 0)
    half = scores.to(torch.bfloat16)
    for given in (scores, half):
        for got, want in zip(
            head._observe(given, levels),
            head._observe(given.float().contiguous(), levels.contiguous()),
            strict=True,
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    "head",
    [
        make_head("softmax", 65),
        make_head("sparsemax", 65),
        make_head("natural", 5, mix=0.1),
        make_head("softmax", 5, mix=0.1),
        CauchyHead(5),
        Flattened(5),
        Doubled(5),
        DoubledSparsemax(5),
        Halved(5),
    ],
    ids=lambda head: type(head).__name__,
)
def test_other_heads_take_two_passes(head):
    scores, levels = torch.randn(2, 9, head.num_scores), torch.rand(2, 2, 9)
    assert head._observe(scores, levels) is None
    history = HeadHistory(head, StepNoise("a", scores.device))
    for step, each in enumerate(scores):
        history.add(step, each, 2)
    history.compute()
    assert not history.problem
    assert torch.allclose(torch.cat(history._exact._means), head.diagnostics(scores))


@built
@pytest.mark.parametrize("name", ["natural", *FLAT])
def test_no_rows_float64_and_no_kernels_take_two_passes(name, monkeypatch):
    head = make_head(name, 4)
    scores, levels = torch.randn(2, 9, head.num_scores), torch.rand(2, 2, 9)
    assert head._observe(scores[:, :0], levels[..., :0]) is None
    assert head._observe(scores.double(), levels) is None
    assert head._observe(scores, levels) is not None
    monkeypatch.setattr(native, "library", lambda: None)
    assert head._observe(scores, levels) is None
