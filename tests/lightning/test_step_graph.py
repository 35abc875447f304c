"""CUDA graphs of any step, and the numbers and optimizers that a captured step reads."""

import contextlib
import gc

import torch
from cases_replay import cuda
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import nn

from catnat import cuda_graph as graphs


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
    for other in (x[:4], x.double()):  # another shape or dtype
        with contextlib.suppress(RuntimeError, TypeError):
            graph(other)
    assert len(calls) == graphs.WARM_UP + 4


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
    outputs = [graph(x).clone() for _ in range(graphs.WARM_UP + 3)]
    torch.cuda.current_stream().synchronize()
    assert graph._stream.query()  # nothing of the capture is left behind the replays
    torch.manual_seed(0)
    for output in outputs:
        assert torch.equal(output, torch.rand_like(x))


@cuda
def test_a_replay_writes_to_no_memory_that_lightning_has_freed():
    weight = torch.randn(8192, 64, device="cuda")
    graph = graphs.StepGraph(lambda x: x @ weight)
    x = torch.randn(64, 8192, device="cuda")
    for _ in range(graphs.WARM_UP + 1):
        graph(x)
    CUDAAccelerator().teardown()  # as at the end of an evaluation
    others = [torch.zeros(2**20, device="cuda") for _ in range(64)]
    # Sums of 8192 products, about 90 in size, may be added up in another order.
    torch.testing.assert_close(graph(x), x @ weight, rtol=1e-4, atol=1e-2)
    assert not any(bool(other.any()) for other in others)


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


# -- numbers and optimizers of captured steps ------------------------------------------------------


def test_a_device_scalar_changes_in_place_and_is_no_part_of_a_checkpoint():
    model = nn.Module()
    model.number = graphs.DeviceScalar(1.0)
    place = model.number().data_ptr()
    model.number.set(0.25)
    assert model.number().item() == float(model.number) == 0.25
    assert model.number().data_ptr() == place and not model.state_dict()
    assert model.double().number().dtype == torch.float64, "it moves with its module"
