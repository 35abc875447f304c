"""HeadNLL: the semantics of F.cross_entropy, for every head."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, HEADS, LIKE_NATURAL, random_scores, slow

from catnat import HeadProbe, make_head
from catnat.losses import HeadNLL

K = 5
OPTIONS = [
    {},
    {"weight": torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0]).double()},
    {"label_smoothing": 0.3},
    {"label_smoothing": 1.0, "weight": torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0]).double()},
    {"ignore_index": 2},
    {"ignore_index": -1, "label_smoothing": 0.1, "weight": torch.arange(1.0, 6).double()},
]


def both(scores, target, **options):
    """Value and gradient of our loss and of torch's, for softmax."""
    results = []
    for loss in (
        lambda s: HeadNLL("softmax", K, **options)(s, target),
        lambda s: F.cross_entropy(
            s.movedim(-1, 1) if s.dim() > 2 else s, theirs(target), **options
        ),
    ):
        leaf = scores.detach().clone().requires_grad_()
        value = loss(leaf)
        value.sum().backward()
        results += [value.detach(), leaf.grad]
    return results


def theirs(target):
    """Torch wants classes in the second dimension, and their probabilities too."""
    soft = target.is_floating_point() and target.dim() > 2
    return target.movedim(-1, 1) if soft else target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(7,), (), (3, 4), (0,)])
def test_softmax_is_torchs_cross_entropy(shape, options, reduction):
    scores = torch.randn(*shape, K, dtype=torch.float64)
    nothing_counts = torch.full(shape, options.get("ignore_index", -100))
    targets = [torch.randint(K, shape), nothing_counts]
    if "ignore_index" not in options:
        targets.append(torch.rand(*shape, K, dtype=torch.float64).softmax(-1))
    elif targets[0].numel() > 1:
        targets[0].view(-1)[0] = options["ignore_index"]
    for target in targets:
        value, gradient, want, want_gradient = both(scores, target, reduction=reduction, **options)
        assert value.shape == want.shape
        assert torch.allclose(value, want, equal_nan=True)
        assert torch.allclose(gradient, want_gradient, equal_nan=True, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HEADS)
def test_every_head_and_dtype(name, dtype):
    head = make_head(name, K)
    scores = random_scores(head, 20).to(dtype).requires_grad_()
    target = torch.randint(K, (20,))
    loss = HeadNLL(head)(scores, target)
    want = -head.log_probs(scores).gather(-1, target[:, None]).mean()
    assert loss.dtype == want.dtype
    assert torch.allclose(loss, want)
    loss.backward()
    assert scores.grad.isfinite().all() and scores.grad.dtype == dtype
    # A smoothed label is the expectation over labels.
    smooth = HeadNLL(head, label_smoothing=0.2)(scores, target)
    uniform = -head.log_probs(scores).mean()
    assert torch.allclose(smooth, 0.8 * want + 0.2 * uniform, rtol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_ignored_rows_get_no_gradient(name):
    head = make_head(name, K)
    scores = random_scores(head, 4, scale=0.1).requires_grad_()
    HeadNLL(head, label_smoothing=0.1)(scores, torch.tensor([0, -100, 2, -100])).backward()
    assert (scores.grad[[1, 3]] == 0).all()
    assert scores.grad[0].any()


def test_the_module():
    weight = torch.arange(1.0, K + 1)
    loss = HeadNLL("natural", K, weight=weight, ignore_index=1, reduction="sum", amplitude=3.0)
    scores = torch.randn(6, loss.head.num_scores)
    target = torch.arange(6) % K
    assert loss.head.amplitude == 3.0
    assert dict(loss.named_buffers())["weight"] is weight
    assert loss.double().weight.dtype == torch.float64
    with HeadProbe(loss) as probe:
        loss(scores, target)
    assert [name for name, _, _ in probe] == ["head"]


@pytest.mark.parametrize("name", [slow(n) if n in LIKE_NATURAL else n for n in HEADS])
def test_compiled_and_batched_it_is_the_same(name):
    torch._dynamo.reset()
    loss = HeadNLL(name, K, label_smoothing=0.1, reduction="none")
    scores = torch.randn(6, loss.head.num_scores)
    target = torch.arange(6) % K
    want = loss(scores, target)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(scores, target), want, rtol=1e-4)
    assert torch.allclose(torch.func.vmap(loss)(scores, target), want, rtol=1e-4)


def test_bad_input_is_named():
    head = make_head("natural", K)
    scores = torch.zeros(3, K - 1)
    with pytest.raises(ValueError, match=r"target must be \(3,\) categories or \(3, 5\) prob"):
        HeadNLL(head)(scores, torch.zeros(3))
    with pytest.raises(ValueError, match="unknown reduction 'avg'; choose from mean, sum, none"):
        HeadNLL(head, reduction="avg")
    with pytest.raises(ValueError, match=r"label_smoothing must lie in 0\.\.1, got 1\.5"):
        HeadNLL(head, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"weight must have shape \(5,\), got \(4,\)"):
        HeadNLL(head, weight=torch.ones(4))


@pytest.mark.parametrize("options", [{}, {"weight": torch.ones(K)}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("label", [K, -1, 2**40])
@pytest.mark.parametrize("name", HEADS)
def test_a_label_that_is_not_a_category_is_named_and_is_nan_where_values_are_not_seen(
    name, label, options
):
    loss = HeadNLL(name, K, reduction="none", **options)
    loss.head.validate_args = False  # the check is the loss's own
    scores = torch.zeros(2, loss.head.num_scores)
    target = torch.tensor([0, label])
    with pytest.raises(ValueError, match=f"target must be a category from 0 to 4, got {label}$"):
        loss(scores, target)
    unseen = torch.func.vmap(loss)(scores, target)  # as on a GPU, values are not looked at
    assert unseen.isnan().tolist() == [False, True]


def test_the_layout_of_torch_gets_an_error_that_says_how_to_mend_it():
    loss = HeadNLL("softmax", K)
    scores = torch.randn(2, K, 3)
    labels = torch.zeros(2, 3, dtype=torch.int64)
    for target in (labels, torch.rand(2, K, 3)):
        with pytest.raises(ValueError, match=r"dim=1 takes scores \(N, C"):
            loss(scores, target)
    assert torch.allclose(loss(scores.movedim(1, -1), labels), F.cross_entropy(scores, labels))


@pytest.mark.parametrize("soft", [False, True])
def test_dim_takes_the_layout_of_cross_entropy_also_where_it_is_square(soft):
    scores = torch.randn(2, 4, 4)
    target = torch.softmax(torch.randn(2, 4, 4), 1) if soft else torch.randint(4, (2, 4))
    loss = HeadNLL("softmax", 4, dim=1)
    assert torch.allclose(loss(scores, target), F.cross_entropy(scores, target))
    mask = torch.rand(2, 4, 4) < 2
    assert torch.allclose(loss(scores, target, mask), F.cross_entropy(scores, target))
    one, label = torch.randn(4), torch.tensor(2)
    assert torch.allclose(loss(one, label), F.cross_entropy(one, label))


def test_natural_by_name_has_a_tail():
    for name in ("natural", "catnat-natural"):
        assert HeadNLL(name, 4).head.tail == 0.05
    assert HeadNLL("natural", 4, tail=0.0).head.tail == 0
    assert HeadNLL(make_head("natural", 4)).head.tail == 0
