"""Event files that are written by the block, against those that TensorBoard writes itself."""

import math
import threading

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from catnat.callbacks.dashboard import RunWriter, write_scalars
from catnat.callbacks.event_file import EventFile, scalar_events
from catnat.callbacks.tags import explanation

STEPS = [0, 1, 127, 128, 16_383, 16_384, 2**31, 2**40]
TAGS = ["fim/saturated", "fim/head/condition_number", "ä/" + 200 * "long"]
VALUES = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, -1.5, math.inf, math.nan, 0.1])[:, None] * (
    torch.tensor([1.0, -1.0, 0.5])
)


def read(folder):
    """Steps and values of every tag, as text: NaN is not equal to itself."""
    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, repr(e.value)) for e in events.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_encoded_events_are_those_of_protocol_buffers(dtype):
    encoded = scalar_events(TAGS, STEPS, VALUES.to(dtype))
    for step, row, each in zip(STEPS, VALUES.tolist(), encoded, strict=True):
        event = Event.FromString(each)
        assert event.wall_time > 1e9
        pairs = zip(TAGS, row, strict=True)
        summary = Summary(value=[Summary.Value(tag=t, simple_value=v) for t, v in pairs])
        want = Event(wall_time=event.wall_time, step=step, summary=summary)
        assert str(event) == str(want)
        assert step == 0 or each == want.SerializeToString()


@pytest.mark.parametrize("kind", [RunWriter, SummaryWriter])
def test_a_block_reads_like_values_that_were_written_one_by_one(kind, tmp_path):
    block, slow = kind(str(tmp_path / "block")), SummaryWriter(str(tmp_path / "slow"))
    for rows in (slice(0, 5), slice(5, 8)):
        write_scalars(block._get_file_writer(), TAGS, STEPS[rows], VALUES[rows])
    for step, row in zip(STEPS, VALUES.tolist(), strict=True):
        for tag, value in zip(TAGS, row, strict=True):
            slow.add_scalar(tag, value, step)
    for writer in (block, slow):
        writer.close()
    assert read(tmp_path / "block") == read(tmp_path / "slow")
    assert set(read(tmp_path / "block")) == set(TAGS)


def test_the_first_value_of_a_tag_is_explained_and_a_block_is_one_write(tmp_path, monkeypatch):
    written = []
    add = EventFile.add_encoded

    def noted(self, events):
        written.append(list(events))
        add(self, written[-1])

    threads = threading.active_count()
    writer = RunWriter(str(tmp_path))
    monkeypatch.setattr(EventFile, "add_encoded", noted)
    for _ in range(2):
        write_scalars(writer._get_file_writer(), TAGS, STEPS, VALUES)
    assert [len(events) for events in written] == [1, 7, 8]
    assert threading.active_count() == threads
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.SummaryMetadata(TAGS[0]).summary_description == explanation(TAGS[0]) != ""


def test_every_event_is_in_the_file_at_once(tmp_path):
    writer = RunWriter(str(tmp_path))
    writer.add_scalar("mine", 1.0, 3)
    assert read(tmp_path) == {"mine": [(3, "1.0")]}
    RunWriter(str(tmp_path)).add_scalar("mine", 2.0, 4)
    assert len(list(tmp_path.iterdir())) == 2, "a file for each writer"
