"""HeadProbe sees every call of every head, keeps no graph, and changes nothing."""

import pytest
import torch

from catnat import HeadProbe, make_head


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = make_head("natural", 4)
        self.second = make_head("softmax", 3)
        self.net = torch.nn.Linear(2, 6)

    def forward(self, x):
        scores = self.net(x)
        return self.first(scores[:, :3]).entropy() + self.second(scores[:, 3:]).entropy()


def test_remembers_the_latest_scores_of_every_head():
    model = TwoHeads()
    x = torch.randn(5, 2)
    want = model(x)
    with HeadProbe(model) as probe:
        model(torch.randn(7, 2))
        assert torch.equal(model(x), want)
        seen = {name: (head, scores) for name, head, scores in probe}
    assert list(seen) == ["first", "second"]
    assert seen["first"][0] is model.first
    assert torch.equal(seen["second"][1], model.net(x)[:, 3:])
    assert not seen["first"][1].requires_grad


def test_after_detaching_nothing_more_is_seen_and_attaching_forgets():
    model = TwoHeads()
    probe = HeadProbe(model).attach()
    probe.attach()  # twice is once
    model(torch.randn(5, 2))
    model.first(scores=torch.zeros(2, 3))
    probe.detach()
    model(torch.randn(9, 2))
    assert [scores.shape[0] for _, _, scores in probe] == [2, 5]
    assert not model.first._forward_hooks
    probe.attach()
    with pytest.raises(RuntimeError, match="no head was called since the probe was attached"):
        list(probe)


def test_says_so_when_there_is_nothing_to_see():
    with pytest.raises(ValueError, match="Linear contains no CategoricalHead"):
        HeadProbe(torch.nn.Linear(2, 2))


def test_compiled_model():
    torch._dynamo.reset()
    model = TwoHeads()
    with HeadProbe(model) as probe:
        compiled = torch.compile(model, backend="aot_eager")
        x = torch.randn(5, 2)
        compiled(x)
        assert {name for name, _, _ in probe} == {"first", "second"}
        assert torch.allclose({n: s for n, _, s in probe}["first"], model.net(x)[:, :3])
