"""Which leaf a class has, and scores that start from frequencies."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest
import torch
from cases import CATNAT, CauchyHead, autograd_fisher

from catnat import make_head

ORDER = [3, 0, 4, 1, 2]  # the leaf of class 0 is 3
CLASSES = [1, 3, 4, 0, 2]  # the class of leaf 0 is 1


def ordered(name, K=5, order=ORDER, **options):
    if name == "own":
        return CauchyHead(K, order=order, **options)
    return make_head(name, K, order=order, **options)


TREES = (*CATNAT, "own")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TREES)
def test_class_k_has_the_probability_of_leaf_order_k(name, dtype):
    head, plain = ordered(name), ordered(name, order=None)
    scores = torch.randn(7, 4, dtype=dtype)
    for method in ("log_probs", "probs"):
        leaves = getattr(plain, method)(scores)
        got = getattr(head, method)(scores)
        assert torch.equal(got, leaves[:, ORDER])
        assert torch.equal(got[:, CLASSES], leaves)
    q = head(scores)
    assert torch.equal(q.mode, plain.probs(scores)[:, ORDER].argmax(-1))
    value = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    picked = plain.log_probs(scores).gather(-1, torch.tensor(ORDER)[value][:, None])[:, 0]
    assert torch.allclose(q.log_prob(value), picked)


@pytest.mark.parametrize("name", TREES)
def test_gradients_and_the_fisher_matrix_know_the_order(name):
    head, plain = ordered(name), ordered(name, order=None)
    scores = torch.randn(4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian
    assert torch.equal(jacobian(head.log_probs, scores), jacobian(plain.log_probs, scores)[ORDER])
    assert torch.allclose(head.fisher(scores), autograd_fisher(head, scores), atol=1e-9)
    assert torch.equal(head.fisher(scores), plain.fisher(scores))  # a permutation changes nothing
    assert torch.equal(
        head.step_fishers(scores[None, None]), plain.step_fishers(scores[None, None])
    )
    assert torch.allclose(head(scores).entropy(), plain(scores).entropy())


@pytest.mark.parametrize("name", TREES)
def test_the_inverse_knows_the_order(name):
    head = ordered(name)
    p = torch.softmax(torch.randn(6, 5, dtype=torch.float64), -1)
    assert torch.allclose(head.probs(head.inverse(p)), p, atol=1e-9)
    assert torch.allclose(
        head.probs(torch.zeros(4, dtype=torch.float64)), torch.tensor(0.2).double()
    )


@pytest.mark.parametrize("name", TREES)
def test_an_ordered_head_under_transforms_and_in_copies(name):
    head, scores = ordered(name), torch.randn(3, 4)
    want = head.log_probs(scores)
    torch._dynamo.reset()
    compiled = torch.compile(ordered(name).log_probs, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(scores), want, atol=1e-6)
    assert torch.allclose(torch.func.vmap(head.log_probs)(scores), want, atol=1e-6)
    for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), head.half().double()):
        assert torch.equal(again.log_probs(scores), want)
    assert not head.state_dict()  # the order is an option, not a weight
    with torch.device("meta"):
        far = ordered(name)
    assert torch.equal(far.log_probs(scores), want)
    assert torch.equal(far.to_empty(device="cpu").log_probs(scores), want)


@pytest.mark.parametrize(
    "order", [torch.tensor(ORDER), numpy.array(ORDER), tuple(ORDER), list(map(numpy.int64, ORDER))]
)
def test_an_order_may_be_a_list_or_a_tensor(order):
    assert make_head("sigmoid", 5, order=order).order == tuple(ORDER)
