"""RowAdam: torch's SparseAdam and Adam, on the rows in use."""

import copy

import pytest
import torch

from catnat import TreeLinear
from catnat.ops import adam_rows, known_rows
from catnat.optim import RowAdam


def twins(count=2, sparse=(True, False), head="sigmoid", K=60):
    torch.manual_seed(0)
    first = TreeLinear(4, K, head, sparse=sparse[0], upper_levels=2)
    others = [copy.deepcopy(first) for _ in range(count - 1)]
    for other, each in zip(others, sparse[1:], strict=True):
        other.sparse = each
    return first, *others


def train(layer, optimizer, steps, few=3, schedule=None, seed=1):
    noise = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = schedule(step)
        hidden = torch.randn(few, 4, generator=noise).to(layer.weight.dtype)
        target = torch.randint(layer.num_categories, (few,), generator=noise)
        optimizer.zero_grad()
        layer(hidden, target).backward()
        optimizer.step()


@pytest.mark.parametrize("kernels", [True, False])
def test_rows_in_use_are_updated_as_by_sparse_adam(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(adam_rows, "_kernel", lambda: None)
    ours, theirs = twins(sparse=(True, True))
    train(ours, RowAdam(ours.parameters(), 0.05), 30)
    train(theirs, torch.optim.SparseAdam(theirs.parameters(), 0.05), 30)
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-7)])
@pytest.mark.parametrize("schedule", [None, lambda step: 0.05 / (1 + step % 7)])
def test_decay_dense_is_adam_on_dense_gradients(dtype, atol, schedule):
    ours, theirs = (each.to(dtype) for each in twins())
    untouched = ours.weight.detach().clone()
    optimizer = RowAdam(ours.parameters(), 0.05, decay="dense")
    train(ours, optimizer, 60, schedule=schedule)
    train(theirs, torch.optim.Adam(theirs.parameters(), 0.05), 60, schedule=schedule)
    assert not torch.equal(ours.weight, untouched)
    optimizer.catch_up()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=atol)
    torch.testing.assert_close(ours.bias, theirs.bias, rtol=0, atol=atol)


def test_reading_all_scores_brings_all_rows_up_to_date():
    (layer,) = twins(1, sparse=(True,))
    optimizer = RowAdam(layer.parameters(), 0.05, decay="dense")
    train(layer, optimizer, 20)
    stale, hidden = layer.weight.detach().clone(), torch.randn(2, 4)
    read = layer.log_probs(hidden)
    assert not torch.equal(layer.weight, stale)
    optimizer.catch_up()
    assert torch.equal(layer.log_probs(hidden), read)


def test_long_gaps_decay_to_nothing_more():
    ours, theirs = twins()
    optimizers = (
        RowAdam(ours.parameters(), 0.01, decay="dense"),
        torch.optim.Adam(theirs.parameters(), 0.01),
    )
    for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
        train(layer, optimizer, 1, few=20)
        for _ in range(240):  # one class alone
            optimizer.zero_grad()
            layer(torch.ones(1, 4), torch.tensor([7])).backward()
            optimizer.step()
    optimizers[0].catch_up()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-4, atol=1e-5)


def test_dense_parameters_are_optimized_as_by_adam():
    torch.manual_seed(2)
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    kinds = RowAdam, torch.optim.Adam
    inputs = torch.randn(10, 4)
    for model, kind in zip(models, kinds, strict=True):
        optimizer = kind(model.parameters(), 0.1)
        for _ in range(10):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("decay", ["sparse", "dense"])
def test_dense_and_sparse_parameters_together_and_gradients_that_add_up(decay):
    torch.manual_seed(3)
    layer = TreeLinear(4, 50, "natural", sparse=True)
    body = torch.nn.Linear(4, 4)
    optimizer = RowAdam([*body.parameters(), *layer.parameters()], 0.05, decay=decay)
    hidden, target = torch.randn(32, 4), torch.arange(32)
    before = float(layer(body(hidden), target).detach())
    for _ in range(30):
        optimizer.zero_grad()
        layer(body(hidden[:16]), target[:16]).backward()
        layer(body(hidden[16:]), target[16:]).backward()  # two sparse gradients, added
        optimizer.step()
    assert float(layer(body(hidden), target).detach()) < 0.6 * before


def test_known_rows_are_not_looked_for_again_unless_gradients_add_up(monkeypatch):
    monkeypatch.setattr(known_rows, "_KNOWN", {})
    param = torch.nn.Parameter(torch.zeros(9, 2))

    def gradient(rows):
        indices, values = torch.tensor([rows]), torch.ones(len(rows), 2)
        known_rows.remember(indices, values)
        return torch.sparse_coo_tensor(indices, values, (9, 2), check_invariants=True)

    param.grad = gradient([1, 4, 7])
    rows, values = known_rows.rows_of(param.grad)
    assert rows.data_ptr() == param.grad._indices().data_ptr()
    assert values.data_ptr() == param.grad._values().data_ptr()
    param.grad = param.grad + gradient([4, 5, 6])
    rows, values = known_rows.rows_of(param.grad)
    assert rows.tolist() == [1, 4, 5, 6, 7] and values[:, 0].tolist() == [1, 2, 1, 1, 1]
    param.grad.add_(gradient([1, 2, 3]))
    assert known_rows.rows_of(param.grad)[0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    indices, values = torch.tensor([[3, 3]]), torch.ones(2, 2)
    unknown = torch.sparse_coo_tensor(indices, values, (9, 2), check_invariants=True)
    assert known_rows.rows_of(unknown)[0].tolist() == [3]
    layer = TreeLinear(4, 60, sparse=True)
    layer(torch.randn(3, 4), torch.tensor([3, 9, 50])).backward()
    for each in layer.parameters():  # autograd passed the memory on
        assert known_rows.rows_of(each.grad)[1].data_ptr() == each.grad._values().data_ptr()
    param.grad = layer = each = unknown = values = rows = None
    monkeypatch.setattr(known_rows, "_MOST", 1)
    gradient([1])
    assert len(known_rows._KNOWN) == 1  # what is no longer in memory is forgotten


@pytest.mark.parametrize("decay", ["sparse", "dense"])
def test_a_resumed_optimizer_goes_on_as_if_nothing_had_happened(decay, tmp_path):
    layer, straight = twins(sparse=(True, True))
    whole = RowAdam(straight.parameters(), 0.05, decay=decay)
    train(straight, whole, 20)
    train(straight, whole, 20, seed=2)
    first = RowAdam(layer.parameters(), 0.05, decay=decay)
    train(layer, first, 20)
    saved = {"optimizer": first.state_dict(), "layer": layer.state_dict()}
    torch.save(saved, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = TreeLinear(4, 60, sparse=True, upper_levels=2)
    resumed.load_state_dict(saved["layer"])
    second = RowAdam(resumed.parameters(), 0.05, decay=decay)
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, 20, seed=2)
    whole.catch_up()
    second.catch_up()
    torch.testing.assert_close(resumed.weight, straight.weight, rtol=1e-5, atol=1e-6)


def test_half_precision_and_other_shapes_work():
    for shape, dtype in (((30, 2, 3), torch.float64), ((30,), torch.bfloat16)):
        param = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = RowAdam([param], 0.1, decay="dense")
        for row in (3, 5, 3):
            index, value = torch.tensor([[row]]), torch.ones((1, *shape[1:]), dtype=dtype)
            param.grad = torch.sparse_coo_tensor(index, value, shape, check_invariants=True)
            optimizer.step()
        assert (param[3] < 0.9).all() and (param[4] == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be >= 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"beta2 must lie in \[0, 1\), got 1.0"),
        ({"decay": "lazy"}, "unknown decay 'lazy'; choose from sparse, dense"),
    ],
)
def test_wrong_options_get_one_clear_error(options, message):
    with pytest.raises(ValueError, match=message):
        RowAdam([torch.nn.Parameter(torch.zeros(3))], **options)
