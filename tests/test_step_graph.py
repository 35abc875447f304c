"""CUDA graphs of any step, and the numbers and optimizers that a captured step reads."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

from catnat import replay as graphs

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_what_can_be_captured():
    x, y = torch.zeros(3, 2), torch.zeros(3)
    assert graphs.tensors_of(x)[0] is x and graphs.tensors_of({"x": x}) is None
    pair = graphs.tensors_of([x, y])
    assert graphs.same_shapes(pair, [x, y]) and not graphs.same_shapes(pair, [x, x])
    assert not graphs.same_shapes(None, None)


@cuda
def test_a_graph_is_captured_once_and_again_after_reset():
    net = nn.Linear(3, 1).cuda()
    calls = []

    def step(x):
        calls.append(1)
        return net(x).sum()

    graph = graphs.StepGraph(step)
    x = torch.randn(5, 3, device="cuda")
    for k in range(10):
        assert torch.allclose(graph(x * k), net(x * k).sum(), rtol=1e-4, atol=1e-5)
    assert len(calls) == graphs.WARM_UP + 1
    graph.reset()
    graph(x)
    assert len(calls) == graphs.WARM_UP + 2
    graph(torch.randn(4, 3, device="cuda"))  # another shape
    assert len(calls) == graphs.WARM_UP + 3


@cuda
def test_a_sequence_of_tensors_is_captured_too():
    graph = graphs.StepGraph(lambda batch: (batch[0] * batch[1]).sum())
    for k in range(8):
        x, y = torch.full((3,), float(k), device="cuda"), torch.ones(3, device="cuda")
        assert graph([x, y]).item() == 3 * k


def test_the_first_replay_waits_for_what_torch_does_when_it_captures(monkeypatch):
    """Torch sets the place of the noise on the stream that captures, and again before a replay."""
    happened = []

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            happened.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self):
            happened.append("replay")

    @contextlib.contextmanager
    def capture(graph, stream, **_):
        happened.append(f"capture on {stream.name}")
        yield

    usual = Stream("usual")
    for name, stand_in in {"Stream": Stream, "CUDAGraph": Graph, "graph": capture}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: usual)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    graph = graphs.StepGraph(lambda x: x + 1)
    for _ in range(graphs.WARM_UP):
        graph(torch.zeros(2))
    happened.clear()
    graph(torch.zeros(2))
    graph(torch.zeros(2))
    assert happened == ["capture on side", "usual waits for side", "replay", "replay"]


@cuda
def test_noise_goes_on_after_a_capture_on_a_busy_stream(monkeypatch):
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(graph, *args, **options):
        torch.cuda._sleep(200_000_000)  # on the stream that captures
        begin(graph, *args, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    graph = graphs.StepGraph(lambda x: x + torch.rand_like(x))
    x = torch.zeros(1000, device="cuda")
    torch.manual_seed(0)
    found = [graph(x).clone() for _ in range(graphs.WARM_UP + 3)]
    torch.cuda.current_stream().synchronize()
    assert graph._stream.query()  # nothing of the capture is left behind the replays
    torch.manual_seed(0)
    for each in found:
        assert torch.equal(each, torch.rand_like(x))


@cuda
def test_garbage_does_not_spoil_a_capture():
    x = torch.ones(3, device="cuda")

    def captured():
        graph = graphs.StepGraph(lambda batch: [batch * k for k in range(50)][-1])
        for _ in range(graphs.WARM_UP):
            graph(x)
        return graph

    old, new = captured(), captured()
    old(x)
    old.itself = old  # only the collector can free it
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        del old
        assert new(x).tolist() == [49.0] * 3
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()


def test_a_backlog_waits_for_the_oldest(monkeypatch):
    class Event:
        waited: list = []

        def __init__(self, blocking):
            assert blocking, "the host is to sleep"

        def record(self):
            pass

        def synchronize(self):
            self.waited.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    backlog = graphs.Backlog(2)
    for number in range(4):
        backlog.add()
        assert len(Event.waited) == max(0, number - 1)


# -- numbers and optimizers of captured steps ------------------------------------------------------


def test_a_device_scalar_changes_in_place_and_is_no_part_of_a_checkpoint():
    model = nn.Module()
    model.number = graphs.DeviceScalar(1.0)
    place = model.number().data_ptr()
    model.number.set(0.25)
    assert model.number().item() == float(model.number) == 0.25
    assert model.number().data_ptr() == place and not model.state_dict()
    assert model.double().number().dtype == torch.float64, "it moves with its module"


def test_an_optimizer_gets_the_options_that_its_kind_knows():
    assert graphs.capturable_options(torch.optim.Adam) == {"capturable": True, "fused": True}
    assert graphs.capturable_options(torch.optim.SGD) == {"fused": True}
    assert graphs.capturable_options(torch.optim.LBFGS) == {}


def test_a_learning_rate_changes_in_place_where_steps_are_captured():
    group, device = {"lr": 0.1}, torch.device("cpu")
    graphs.set_learning_rate(group, 0.2, None)
    assert group == {"lr": 0.2}
    graphs.set_learning_rate(group, 0.3, device)
    place = group["lr"]
    graphs.set_learning_rate(group, 0.4, device)
    assert group["lr"] is place and place.item() == pytest.approx(0.4)
    graphs.set_learning_rate(group, 0.5, None)
    assert group == {"lr": 0.5}


def test_the_first_reason_not_to_capture_is_told():
    why, cuda_device = graphs.why_not_captured, torch.device("cuda")
    assert why(False, cuda_device, {}) == "capture is False"
    assert why(True, torch.device("cpu"), {"a": True}) == "the device is not a CUDA device"
    assert why(None, cuda_device, {"a": False, "b": True, "c": True}) == "b"
    assert why(None, cuda_device, {"a": False}) is None


def test_batches_of_another_dtype_are_not_alike():
    one = [torch.zeros(2, 3), torch.zeros(2)]
    assert graphs.same_shapes(one, [torch.ones(2, 3), torch.ones(2)])
    assert not graphs.same_shapes(one, [torch.ones(2, 3), torch.ones(3)])
    assert not graphs.same_shapes(one, [torch.ones(2, 3), torch.ones(2, dtype=torch.int64)])
    assert not graphs.same_shapes(one, None) and not graphs.same_shapes(one, one[:1])
