"""A thread writes checkpoints while training goes on, and nothing of what they promise changes."""

import pickle
import threading

import pytest
import torch

from catnat.callbacks import checkpoints
from catnat.callbacks.checkpoints import AtomicCheckpointIO
from catnat.training.lightning import default_interval


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that writes nothing before the event is set."""
    event, write = threading.Event(), checkpoints.write_whole

    def wait_and_write(path, content):
        assert event.wait(600)
        write(path, content)

    monkeypatch.setattr(checkpoints, "write_whole", wait_and_write)
    return event


def test_training_goes_on_while_a_checkpoint_is_written(slow_disk, tmp_path):
    writer, path, weight = AtomicCheckpointIO(), tmp_path / "a" / "last.ckpt", torch.zeros(3)
    writer.save_checkpoint({"weight": weight}, path)
    weight += 1  # the next step
    assert not path.exists()
    slow_disk.set()
    assert writer.load_checkpoint(path)["weight"].tolist() == [0, 0, 0]  # waits for the disk
    writer.teardown()


def test_two_checkpoints_arrive_in_order(slow_disk, tmp_path):
    writer, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    slow_disk.set()
    for step in range(5):
        writer.save_checkpoint({"step": step}, path)
    writer.teardown()
    assert writer.load_checkpoint(path)["step"] == 4


def test_an_error_of_the_disk_is_raised_once_and_the_file_before_is_whole(tmp_path, monkeypatch):
    writer, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    writer.save_checkpoint({"step": 1}, path)
    writer.finish()

    def full(path, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_whole", full)
        writer.save_checkpoint({"step": 2}, path)
        with pytest.raises(OSError, match="No space left"):
            writer.finish()
    assert writer.load_checkpoint(path)["step"] == 1
    writer.teardown()


def test_a_checkpoint_that_is_removed_does_not_come_back(slow_disk, tmp_path):
    writer, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    writer.save_checkpoint({"step": 1}, path)
    slow_disk.set()
    writer.remove_checkpoint(path)
    writer.teardown()
    assert not path.exists()


def test_it_can_be_sent_to_another_process():
    pickle.loads(pickle.dumps(AtomicCheckpointIO())).teardown()


def test_a_long_run_is_validated_and_saved_thirty_times():
    steps = (-1, 10, 30_000, 60_000, 195_000)
    assert [default_interval(n) for n in steps] == [500, 500, 1_000, 2_000, 6_500]
