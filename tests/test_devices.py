"""Runs dealt out to the GPUs of a machine, with an environment that stands in for them."""

import os

import pytest
from cases_sweep import arguments, write_table

from experiments import sweep
from experiments.engines import devices
from experiments.engines.local import Local

EIGHT = [float(x) / 8 for x in range(8)]


@pytest.fixture(params=["program.py", "train.py"])  # as new processes, as forks
def path(tmp_path, request):
    return write_table(tmp_path, request.param, grid={"x": EIGHT})


def used(folder):
    """The device of each run, in the order of the grid."""
    found = [folder / f"runs/tiny/smoke/x{x:.6g}-seed1/gpu.txt" for x in EIGHT]
    return [each.read_text() for each in found]


def test_runs_alternate_between_two_gpus(path, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert sweep.main(arguments(path, "--jobs", "2", "--no_mps")) == 0
    assert used(tmp_path)[:2] == ["4", "6"]
    assert set(used(tmp_path)) == {"4", "6"}  # whichever is free first gets the next run


def test_jobs_per_gpu_counts_for_each(path, tmp_path, monkeypatch, capsys):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.visible() == ["0", "1"]
    assert sweep.main(arguments(path, "--jobs_per_gpu", "2", "--no_mps")) == 0
    assert used(tmp_path)[:4] == ["0", "1", "0", "1"]
    assert set(used(tmp_path)) == {"0", "1"}


def test_a_run_may_take_several_gpus_or_a_share_of_one(path, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert sweep.main(arguments(path, "--gpus_per_run", "2", "--jobs", "2", "--no_mps")) == 0
    assert used(tmp_path)[:2] == ["0,1", "2,3"]
    assert set(used(tmp_path)) == {"0,1", "2,3"}
    assert Local(gpus_per_run=0.25, share=False).jobs_here(["0", "1"]) == (["0", "1"], 8)
    with pytest.raises(ValueError, match="--gpus_per_run 6: this machine has 5"):
        devices.grouped(devices.visible(), 6)


def test_without_gpus_runs_have_none(path, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.visible() == []
    assert sweep.main(arguments(path)) == 0
    assert set(used(tmp_path)) == {""}


def test_a_machine_without_nvidia_s_driver_has_no_gpus(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.visible() == []
    assert devices.dealt([], 2) == [None, None]
