"""Places of classes and the softmax of the frequent ones, however weights were loaded."""

import math

import numpy as np
import pytest
import torch
from cases_tree_linear import by_linear_and_head, layer_and_data
from torch import nn

from catnat import TreeLinear


def check_samples(layer, hidden):
    """Every class that is drawn is likely: a wrong place gives an unlikely class."""
    probs = layer.log_probs(hidden).exp()
    n = 4000
    noise = torch.Generator().manual_seed(2)
    drawn = layer.sample(hidden, (n,), noise)
    for column, row in zip(drawn.T, probs, strict=True):
        found = column.bincount(minlength=layer.num_categories) / n
        torch.testing.assert_close(found, row.float(), atol=0.05, rtol=0)


@pytest.mark.parametrize("frequent", [0, 4, [8, 2, 5]])
def test_an_order_is_stored_whatever_the_frequent_classes_are(frequent):
    layer = TreeLinear(6, 13, frequent=frequent)
    assert "order" in layer.state_dict()
    learned, hidden, _ = layer_and_data(13, "sigmoid", frequent=frequent)
    fresh = TreeLinear(6, 13, frequent=frequent, dtype=torch.float64)
    assert fresh.load_state_dict(learned.state_dict()).missing_keys == []
    torch.testing.assert_close(fresh.log_probs(hidden), learned.log_probs(hidden))


@pytest.mark.parametrize("how", ["copied", "replaced", "assigned", "meta", "from meta", "set"])
def test_samples_follow_the_order_however_it_got_there(how):
    learned, hidden, _ = layer_and_data(13, "sigmoid", frequent=[8, 2, 5])
    learned.weight.data.mul_(5)
    layer = TreeLinear(6, 13, frequent=3, dtype=torch.float64)
    check_samples(layer, hidden)  # which keeps what it derives from the order
    state = learned.state_dict()
    if how == "copied":  # as torch.distributed.checkpoint does
        for name, x in layer.state_dict().items():
            x.copy_(state[name])
    elif how == "replaced":  # as Transformers does
        layer.weight, layer.bias, layer.shortlist = learned.weight, learned.bias, learned.shortlist
        layer.order = state["order"]
    elif how == "assigned":
        layer.load_state_dict(state, assign=True)
    elif how == "set":
        layer.load_state_dict(state)
        learned.set_order(None)
        layer.set_order(None)
    else:
        with torch.device("meta"):
            layer = TreeLinear(6, 13, frequent=3, dtype=torch.float64)
        if how == "meta":
            layer.load_state_dict(state, assign=True)
        else:
            layer.to_empty(device="cpu")
            layer.load_state_dict(state)
    torch.testing.assert_close(layer.log_probs(hidden), learned.log_probs(hidden))
    torch.testing.assert_close(layer.log_probs(hidden), by_linear_and_head(layer, hidden))
    check_samples(layer, hidden)
    assert (layer.path_kl(hidden, hidden, layer.sample(hidden), learned).abs() < 1e-9).all()


def test_an_order_that_is_loaded_is_checked():
    layer = TreeLinear(6, 5)
    state = layer.state_dict() | {"order": torch.tensor([0, 1, 2, 2, 4])}
    with pytest.raises(ValueError, match=r"permutation of 0\.\.4"):
        layer.load_state_dict(state)


def test_the_shortlist_is_called():
    layer, hidden, target = layer_and_data(40, "sigmoid", frequent=8)
    seen = []
    layer.shortlist.register_forward_hook(lambda module, inputs, output: seen.append(output))
    before = layer.nll(hidden, target)
    layer.sample(hidden)
    assert [x.shape for x in seen] == [(7, 9), (7, 9)]
    layer.shortlist.register_forward_hook(lambda module, inputs, output: output + 1000.0)
    torch.testing.assert_close(layer.nll(hidden, target), before)  # a softmax takes no notice
    layer.shortlist.register_forward_hook(lambda module, inputs, output: 0 * output)
    shares = layer.log_probs(hidden)[:, layer.classes[:8]].exp()
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / 9))


@pytest.mark.filterwarnings("ignore")
def test_a_shortlist_is_quantized():
    layer, hidden, target = layer_and_data(400, "sigmoid", frequent=8, dtype=torch.float32)
    expected = layer.nll(hidden, target)
    small = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), dtype=torch.qint8)
    assert not isinstance(small[0].shortlist, nn.Linear)
    torch.testing.assert_close(small[0].nll(hidden, target), expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("frequent", [0, 10, 100, 900])
def test_zero_hidden_states_find_all_classes_about_equally_likely(frequent):
    torch.manual_seed(0)
    layer = TreeLinear(256, 2000, frequent=frequent)
    every = layer.nll(torch.zeros(2000, 256), torch.arange(2000))
    assert abs(every.item() - math.log(2000)) < 0.01


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_frequent_classes_are_a_list_an_array_or_a_tensor(kind):
    layer = TreeLinear(4, 9, frequent=kind([3, 7]))
    assert layer.classes[:2].tolist() == [3, 7]
    assert TreeLinear(4, 9, frequent=kind(2) if kind is not list else 2).num_frequent == 2


def test_counts_that_contradict_the_frequent_classes_are_noticed(recwarn):
    counts = torch.tensor([1, 1, 50, 1, 40, 1, 1, 1, 4])
    TreeLinear(4, 9, frequent=[4, 2]).start_from_counts(counts)
    TreeLinear(4, 9).start_from_counts(counts)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"have 2.0% of the counts.*have 90.0%"):
        TreeLinear(4, 9, frequent=2).start_from_counts(counts)
