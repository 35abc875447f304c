"""Checkpoints are written whole and can be read back, and a signal stops one run."""

import enum
import os
import pickle
import signal
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from cases_callbacks import Small, fit, loader

from catnat.callbacks import LastCheckpoint
from catnat.callbacks.files import AtomicCheckpointIO, load_checkpoint
from catnat.callbacks.signals import Stopped


class Color(enum.Enum):
    RED = 1


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    writer, path = AtomicCheckpointIO(), tmp_path / "a" / "last.ckpt"
    writer.save_checkpoint({"step": 1, "weight": torch.ones(3)}, path)
    assert writer.load_checkpoint(path)["step"] == 1

    def full(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left.*last.ckpt"):
            writer.save_checkpoint({"step": 2}, path)
    assert writer.load_checkpoint(path)["step"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]
    pickle.loads(pickle.dumps(writer))  # it can be sent to another process


def test_a_flipped_bit_is_found_before_it_becomes_a_weight(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weight": torch.full((1000,), 1.5)}, path)
    content = path.read_bytes()
    place = content.index(np.full(4, 1.5, np.float32).tobytes())
    for bit in (0, 6, 31):
        flipped = bytearray(content)
        flipped[place + bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"is damaged, .*: the checksum of .*data/0 is wrong"):
            load_checkpoint(path)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Path("x"), "pathlib.PosixPath"),
        (Color.RED, f"{Color.__module__}.Color"),
        (Color, f"{Color.__module__}.Color"),
        ({"a": [np.int64(3)]}, "numpy"),
    ],
)
def test_what_could_not_be_read_back_is_said_at_the_first_save(value, kind, tmp_path):
    path = tmp_path / "last.ckpt"
    with pytest.raises(ValueError) as error:
        AtomicCheckpointIO().save_checkpoint({"hyper_parameters": {"mine": value}}, path)
    assert f"it holds {kind}" in str(error.value)
    assert "save_hyperparameters(ignore=...)" in str(error.value)
    assert not path.exists()


@pytest.mark.parametrize(
    ("step", "does", "end"),
    [
        ("test_step", None, nullcontext()),
        ("training_step", lambda *_: 1 / 0, pytest.raises(ZeroDivisionError)),
        ("validation_step", lambda *_: signal.raise_signal(15), pytest.raises(Stopped)),
    ],
)
def test_a_run_gives_the_signals_back(step, does, end, tmp_path, monkeypatch):
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = list(map(signal.getsignal, signals))
    monkeypatch.setattr(Small, step, does, raising=False)
    last = LastCheckpoint(tmp_path)
    with end:  # four steps are less than an epoch: only the check before them is a validation
        fit(Small(), last, val=loader(), max_steps=4, enable_checkpointing=True)
    assert list(map(signal.getsignal, signals)) == before
