"""Heads of one's own may be masked and mixed; steep gradients and smoothed labels of any head."""

import pytest
import torch
from cases import HEADS, Sharp

from catnat import make_head
from catnat.heads.mixed import MixedHead
from catnat.losses import HeadNLL


class Tempered(Sharp):
    """One score more than there are categories: softmax(2 t s)."""

    def log_probs(self, scores):
        return super().log_probs(scores[..., :1] * scores[..., 1:])

    def inverse(self, probs):
        return torch.cat([torch.ones_like(probs[..., :1]), super().inverse(probs)], -1)


def test_a_head_with_more_scores_than_categories_may_be_mixed_but_not_masked():
    head = Tempered(3)
    head.num_scores = 4
    probs = torch.tensor([[0.2, 0.3, 0.5]])
    mixed = MixedHead(head, 0.3)
    torch.testing.assert_close(mixed(mixed.inverse(probs)).probs, probs)
    with pytest.raises(NotImplementedError, match="4 scores for 3 categories: it must override"):
        head(torch.ones(1, 4), mask=probs > 0.2)


def test_a_gradient_scaler_sees_that_a_steep_gradient_overflows():
    head = make_head("natural", 2)
    scaler = torch.amp.GradScaler("cpu")
    scores = torch.full((32, 1), 0.5).half()
    scores[0] = 3.13  # just inside pi, where the slope is steep, with a label on the other side
    label = torch.ones(32, dtype=torch.long)
    label[0] = 0
    scores.requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = -head(scores).log_prob(label).mean()
    scaler.scale(loss).backward()
    assert scores.grad[0].isinf() and scores.grad[1:].isfinite().all()
    scores.grad = None
    (65536 * -head(scores).log_prob(label).mean()).backward()  # no scaler: finite, as promised
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("make", [lambda: Sharp(3), lambda: make_head("softmax", 3)])
def test_a_head_of_ones_own_takes_masks(make):
    head = make()
    scores = torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([True, True, False])
    q = head(scores, mask=mask)
    p = q.probs[:, :2]
    assert torch.allclose(q.entropy(), -(p * p.log()).sum(-1)) and (q.probs[:, 2] == 0).all()
    (gradient,) = torch.autograd.grad(q.entropy().sum(), scores)
    assert gradient.isfinite().all() and (gradient[:, 2] == 0).all()


def test_a_head_of_ones_own_is_checked_and_mixed():
    with pytest.raises(ValueError, match=r"expected 3 scores in the last dimension, got \(2, 7"):
        Sharp(3)(torch.zeros(2, 7))
    steep = Sharp(3)(torch.tensor([60000.0, 0, 0]).half())  # 2 s overflows in half precision
    assert steep.probs.tolist() == [1, 0, 0]
    mixed = MixedHead(Sharp(3), 0.1)
    q = mixed(torch.zeros(3), mask=torch.tensor([True, True, False]))
    assert torch.allclose(q.probs, torch.tensor([0.5, 0.5, 0.0])) and q.entropy().isfinite()


@pytest.mark.parametrize("name", HEADS)
def test_label_smoothing_stays_among_the_allowed_categories(name):
    head = make_head(name, 4)
    scores = torch.randn(5, head.num_scores, dtype=torch.float64) / 4
    target = torch.tensor([0, 1, 2, 0, 1])
    mask = torch.tensor([True, True, True, False])
    logs = head(scores, mask=mask).logits
    want = -0.8 * logs[range(5), target] - 0.2 * logs[:, :3].mean(-1)
    loss = HeadNLL(head, label_smoothing=0.2, reduction="none")
    assert torch.allclose(loss(scores, target, mask), want)
    soft = torch.nn.functional.one_hot(target, 4).double()
    assert torch.allclose(loss(scores, soft, mask), want, rtol=1e-12)
