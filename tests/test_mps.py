"""Starting NVIDIA's MPS for a sweep, with a program that stands in for its control."""

import os

import pytest

from experiments.engines import mps


@pytest.fixture
def control(tmp_path, monkeypatch):
    """The stand-in writes what it is told into the file that this returns."""
    log = tmp_path / "log"
    program = tmp_path / mps.CONTROL
    told = '"$@" $(cat) $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES'
    program.write_text(f"#!/bin/sh\necho {told} >> {log}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # not for the server
    monkeypatch.setattr(mps, "_USUAL_PIPES", tmp_path / "nvidia-mps")
    return log


def test_a_server_is_started_and_ended(control):
    with mps.shared_gpu():
        pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(pipes) and control.read_text() == f"-d {pipes}\n"
    assert control.read_text() == f"-d {pipes}\nquit -t 10 {pipes}\n"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and not os.path.exists(pipes)


def test_a_server_that_runs_already_is_left_alone(control, monkeypatch):
    (control.parent / "nvidia-mps").mkdir()
    (control.parent / "nvidia-mps" / "control").touch()
    with mps.shared_gpu():
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    monkeypatch.setattr(mps, "_USUAL_PIPES", control.parent / "none")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with mps.shared_gpu():
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/somewhere"
    assert not control.exists()


def test_without_a_server_runs_take_turns(control, monkeypatch):
    (control.parent / mps.CONTROL).write_text("#!/bin/sh\nexit 1\n")
    with mps.shared_gpu():
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    (control.parent / mps.CONTROL).unlink()
    monkeypatch.setenv("PATH", str(control.parent))
    with mps.shared_gpu():
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
