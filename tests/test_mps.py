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


def test_each_device_has_a_server_whose_first_device_it_is(control):
    with mps.environments(["2", "3"], shared=True) as found:
        pipes = {device: each["CUDA_MPS_PIPE_DIRECTORY"] for device, each in found.items()}
        assert all(os.path.isdir(each) for each in pipes.values())
        assert [each["CUDA_VISIBLE_DEVICES"] for each in found.values()] == ["0", "0"]
        assert control.read_text() == f"-d {pipes['2']} 2\n-d {pipes['3']} 3\n"
    ended = f"quit -t 10 {pipes['3']} 3\nquit -t 10 {pipes['2']} 2\n"
    assert control.read_text().endswith(ended)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not any(map(os.path.exists, pipes.values()))


def test_a_server_of_all_devices_leaves_their_numbers_alone(control):
    with mps.server() as environment:
        assert "CUDA_VISIBLE_DEVICES" not in environment
        assert control.read_text() == f"-d {environment['CUDA_MPS_PIPE_DIRECTORY']}\n"


def test_a_server_that_runs_already_is_left_alone(control, monkeypatch):
    plain = {"0": {"CUDA_VISIBLE_DEVICES": "0"}}
    (control.parent / "nvidia-mps").mkdir()
    (control.parent / "nvidia-mps" / "control").touch()
    with mps.environments(["0"], shared=True) as found:
        assert found == plain
    monkeypatch.setattr(mps, "_USUAL_PIPES", control.parent / "none")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with mps.environments(["0"], shared=True) as found:
        assert found == plain
    assert not control.exists()


def test_without_a_server_runs_take_turns(control, monkeypatch):
    plain = {"0": {"CUDA_VISIBLE_DEVICES": "0"}}
    (control.parent / mps.CONTROL).write_text("#!/bin/sh\nexit 1\n")
    with mps.environments(["0"], shared=True) as found:
        assert found == plain
    (control.parent / mps.CONTROL).unlink()
    monkeypatch.setenv("PATH", str(control.parent))
    with mps.environments(["0"], shared=True) as found:
        assert found == plain


def test_runs_that_do_not_share_need_no_server(control):
    with mps.environments(["0", "1"], shared=False) as found:
        assert found == {each: {"CUDA_VISIBLE_DEVICES": each} for each in ("0", "1")}
    assert not control.exists()
