"""train.py interrupted, resumed and disturbed: what was saved stays, and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cases_cli import ROOT, last, run, same_weights

import train


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(workspace):
    assert run(*workspace, "--max_steps=11", "--default_root_dir=whole") == 0
    assert run(*workspace, "--max_steps=4") == 0
    assert run(*workspace, "--max_steps=11", "--ckpt_path=last") == 0
    assert not Path("runs/vae/natural/version_1").exists()
    whole, resumed = last("whole/vae/natural/version_0"), last()
    assert (whole["global_step"], whole["epoch"]) == (resumed["global_step"], resumed["epoch"])
    assert same_weights(whole, resumed)


def test_a_checkpoint_can_be_tested_alone(workspace, capfd):
    assert run(*workspace) == 0
    trained = capfd.readouterr().out.split("test/nll")[1].split()[1]
    assert train.main(["test", "--head=natural", *workspace, "--ckpt_path=last"]) == 0
    assert capfd.readouterr().out.split("test/nll")[1].split()[1] == trained
    assert len(list(Path("runs/vae/natural").iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--head=sigmoid", "has head natural, the command line sigmoid"),
        ("--num_latents=5", "has num_latents 10, the command line 5"),
        ("--num_categories=5", "has num_categories 8, the command line 5"),
        ("--head_options.amplitude=3", "has head_options None"),
        ("--model=mlp-vae", "another model"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(change, words, workspace, capfd):
    assert run(*workspace) == 0
    path = "runs/vae/natural/version_0/checkpoints/last.ckpt"
    capfd.readouterr()
    assert run(*workspace, f"--ckpt_path={path}", change) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line


def test_metrics_are_those_of_the_finished_run(workspace):
    """Validated at the very end, whatever the interval; and testing does not change them."""
    assert run(*workspace, "--max_steps=5", "--val_check_interval=4") == 0
    path = Path("runs/vae/natural/version_0/metrics.json")
    metrics = json.loads(path.read_text())
    assert {"val/loss", "val/elbo", "test/nll"} <= metrics.keys()
    again = ["test", "--model=vae", *map(str, workspace), "--ckpt_path=best", "--nll_samples=3"]
    assert train.main(again) == 0
    assert json.loads(path.read_text()) == metrics


def test_going_on_from_the_best_checkpoint_is_a_new_run(workspace, capfd):
    assert run(*workspace) == 0
    before = last()
    assert run(*workspace, "--max_steps=6", "--ckpt_path=best") == 0
    assert same_weights(last(), before)
    assert last("runs/vae/natural/version_1")["global_step"] == 6


class Evil:
    def __reduce__(self):
        return os.system, ("touch owned",)


def test_damaged_and_malicious_checkpoints_are_refused(workspace, capfd):
    assert run(*workspace) == 0
    path = Path("runs/vae/natural/version_0/checkpoints/last.ckpt")
    content = path.read_bytes()
    torch.save({"state_dict": {}, "evil": Evil()}, "evil.ckpt")
    evil = Path("evil.ckpt").read_bytes()
    capfd.readouterr()
    for bad in (content[:-1], content[: len(content) // 2], b"", b"junk" * 100, evil):
        path.write_bytes(bad)
        assert run(*workspace, "--ckpt_path=last") == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert "damaged" in line or "refused" in line
    assert not Path("owned").exists()


def test_a_full_disk_leaves_the_checkpoint_before(workspace, capfd, monkeypatch):
    assert run(*workspace) == 0
    before = last()
    capfd.readouterr()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run(*workspace, "--max_steps=6", "--ckpt_path=last") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "No space left on device" in line
    assert same_weights(last(), before)
    assert [p.name for p in Path("runs/vae/natural/version_0/checkpoints").glob(".*")] == []


def test_a_folder_that_cannot_be_written(workspace, capfd):
    Path("runs").write_text("in the way")
    assert run(*workspace) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "runs" in line


@pytest.mark.parametrize(
    ("signum", "devices"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGINT, ()),
        (signal.SIGTERM, ("--devices=2", "--strategy=ddp", "--accelerator=cpu")),
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(signum, devices, workspace):
    argv = [sys.executable, str(ROOT / "train.py"), "--head=natural", *workspace, *devices]
    argv += ["--max_steps=100000", "--save_every=5", "--val_check_interval=100"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        path = Path("runs/vae/natural/version_0/checkpoints/last.ckpt")
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signum)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signum
    assert err == ""
    line = out.splitlines()[-1]
    step = last()["global_step"]
    assert f"stopped by {signum.name} after step {step}; go on with: python train.py" in line
    again = line.split("python train.py ")[1].split()
    alone = ["--devices=1", "--strategy=auto", "--limit_test_batches=1"]
    assert train.main([*again, f"--max_steps={step + 2}", *alone]) == 0
    assert last()["global_step"] == step + 2


def test_a_killed_run_resumes_to_the_same_weights(workspace):
    """kill -9 wherever it happens to be; the rest of the run must not know."""
    options = [*workspace, "--max_steps=60", "--save_every=3", "--limit_test_batches=1"]
    argv = [sys.executable, str(ROOT / "train.py"), "--model=vae", "--head=natural", *options]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as in this process: sums depend on it
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=one_thread
    )
    path = Path("runs/vae/natural/version_0/checkpoints/last.ckpt")
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert 0 < last()["global_step"] < 60
    assert run(*options, "--ckpt_path=last") == 0
    resumed = last()
    assert resumed["global_step"] == 60
    assert run(*options, "--default_root_dir=whole") == 0
    assert same_weights(resumed, last("whole/vae/natural/version_0"))
