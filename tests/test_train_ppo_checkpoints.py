"""Checkpoints of train.py --model ppo: what they hold, resumption, faults."""
# ruff: noqa: F811 - a fixture is an argument

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from cases import slow
from cases_fresh import Fresh, one_server
from cases_ppo import (
    FOLDER,
    QUICK,
    _workspace,  # noqa: F401 - a fixture
    clock,  # noqa: F401 - a fixture
    last,
    run,
    same,
    same_run,
)
from cases_sweep import wait_for
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

import train
from catnat.callbacks.run_sb3 import RunSB3
from catnat.sb3 import HeadPPO
from catnat.training import rl

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def interrupted(monkeypatch):
    """Sends SIGTERM to the first run at its hundredth step, in the second of four rollouts."""
    sent = []

    def step(self):
        if self.model.num_timesteps == 100 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return True

    monkeypatch.setattr(RunSB3, "_on_step", step)


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(clock, capfd, interrupted):
    before = signal.getsignal(signal.SIGTERM)
    assert run(*clock) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.startswith("stopped by SIGTERM after step 128; go on with: python train.py ")
    assert last()["global_step"] == 128
    again = line.split("python train.py ")[1].split()
    seeds = sys.modules["clock_env"].Clock.seeds
    assert seeds[:4] == [0, 1, 2, 3]
    seeds.clear()
    assert train.main(again) == 0
    assert seeds[:4] == [128, 129, 130, 131]  # no game twice, where seeds matter
    assert run(*clock, "--default_root_dir=whole") == 0
    assert not Path("runs/ppo/natural/version_1").exists()
    assert same_run(last(), last("whole/ppo/natural/version_0"))
    assert last()["best"] == last("whole/ppo/natural/version_0")["best"]


def test_more_steps_can_be_added(capfd):
    assert run(*QUICK) == 0
    assert run(*QUICK, "--total_steps=192", "--ckpt_path=last") == 0
    state = last()
    assert (state["global_step"], state["updates"]) == (192, 3)
    capfd.readouterr()
    assert run(*QUICK, "--ckpt_path=last") == 0  # nothing is left to do but to play
    assert same(last()["state_dict"], state["state_dict"])


STARTED = ["--learning_rate=0.002", "--gamma=0.9", "--seed=4", "--head_options.amplitude=5"]


@pytest.mark.parametrize("where", [slow("last"), slow("run"), "elsewhere"])
def test_a_run_goes_on_with_what_it_was_started_with(where, capfd):
    assert run(*QUICK, *STARTED) == 0
    path = FOLDER / "checkpoints/last.ckpt"
    Path("copy.ckpt").write_bytes(path.read_bytes())
    before = yaml.safe_load((FOLDER / "config.yaml").read_text())
    path = {"last": "last", "run": path, "elsewhere": "copy.ckpt"}[where]
    wrong = {
        "--learning_rate=0.1": "has learning_rate 0.002, the command line 0.1",
        "--gamma=0.5": "has gamma 0.9, the command line 0.5",
        "--num_envs=8": "has num_envs 4, the command line 8",
        "--update_epochs=3": "has update_epochs 1, the command line 3",
        "--head_options.amplitude=4": "has head_options {'amplitude': 5",
        "--env=Acrobot-v1": "has env CartPole-v1, the command line Acrobot-v1",
    }
    if where != "elsewhere":  # not in the checkpoint
        wrong["--seed=1"] = "has seed 4, the command line 1"
    capfd.readouterr()
    for option, words in wrong.items():
        argv = ["--model=ppo", f"--ckpt_path={path}", "--total_steps=192", option]
        assert train.main(argv) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert words in line
    assert yaml.safe_load((FOLDER / "config.yaml").read_text()) == before, "nothing was written"
    more = ["--total_steps=192", "--gamma=0.9", "--eval_games=2", "--gif=false"]
    assert train.main(["--model=ppo", f"--ckpt_path={path}", *more]) == 0
    folder = FOLDER.with_name("version_1") if where == "elsewhere" else FOLDER
    after = yaml.safe_load((folder / "config.yaml").read_text())
    assert after["model"] == before["model"] and after["data"] == before["data"]
    assert last(folder)["global_step"] == after["trainer"]["total_steps"] == 192


def test_a_game_may_be_spelt_in_another_way_when_a_run_goes_on(monkeypatch):
    from catnat.training.names import Names

    program = rl.RLProgram(Names(model="ppo", head="natural"))
    names = ("Breakout", "BreakoutNoFrameskip-v4", "ALE/Breakout-v5", "breakout")
    assert len({program.canonical("data.env", name) for name in names}) == 1
    assert program.canonical("data.env", "CartPole-v1") == "CartPole-v1"


def test_a_checkpoint_of_an_earlier_version_is_continued(trained):
    """It knew fewer of its options."""
    state = torch.load(trained, weights_only=True)
    few = ("env", "num_actions", "normalize", "head", "head_options")
    state["hyper_parameters"] = {name: state["hyper_parameters"][name] for name in few}
    torch.save(state, "old.ckpt")
    assert run("--ckpt_path=old.ckpt", "--total_steps=192", "--num_envs=4", *QUICK[2:4]) == 0
    config = yaml.safe_load((FOLDER / "config.yaml").read_text())
    assert config["data"]["env"] == "CartPole-v1"
    assert config["model"]["learning_rate"] == 1e-3, "the default for CartPole, not for Atari"


@pytest.mark.parametrize("algorithm", [PPO, HeadPPO])
@pytest.mark.parametrize("name", ["best", "last"])
def test_stable_baselines_loads_the_zip_beside_a_checkpoint(name, algorithm, trained):
    model = algorithm.load(trained.with_name(f"{name}.zip"), device="cpu")
    state = torch.load(trained.with_name(f"{name}.ckpt"), weights_only=True)
    assert same(model.policy.state_dict(), state["state_dict"])
    assert same(model.get_parameters()["policy.optimizer"], state["optimizer"])
    assert model.num_timesteps == state["global_step"] and model.policy.heads[0].name == "natural"
    env = make_vec_env("CartPole-v1", 4, seed=0)
    assert evaluate_policy(model, env, 4)[0] > 5
    model.set_env(env)
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps == state["global_step"] + 64


def test_resuming_and_testing_read_no_pickled_code(trained, monkeypatch):
    """A checkpoint is enough; the zip beside it is not looked at."""
    copy = Path("elsewhere/checkpoints/last.ckpt")
    copy.parent.mkdir(parents=True)
    copy.write_bytes(trained.read_bytes())
    copy.with_suffix(".zip").write_bytes(b"no zip")
    assert train.main(["test", "--model=ppo", "--head=natural", *QUICK, f"--ckpt_path={copy}"]) == 0
    assert copy.with_suffix(".zip").read_bytes() == b"no zip"
    assert run(*QUICK, "--total_steps=192", f"--ckpt_path={copy}") == 0


def test_a_normalizer_is_saved_for_stable_baselines():
    assert run(*QUICK, "--normalize=true", "--eval_every=0") == 0
    path = FOLDER / "checkpoints/last_vecnormalize.pkl"
    env = VecNormalize.load(str(path), make_vec_env("CartPole-v1", 2))
    assert torch.equal(torch.as_tensor(env.obs_rms.mean), last()["normalizer"]["obs."]["mean"])


def test_the_last_evaluation_can_be_the_best(monkeypatch):
    returns = iter([3.0, 1.0, 7.0])  # at steps 64 and 128, and at the end

    def evaluate(self, stop_if_asked):
        return {"return": next(returns), "return_std": 0.0, "length": 1.0}

    monkeypatch.setattr(rl.RLRun, "evaluate", evaluate)
    assert run(*QUICK, "--total_steps=192") == 0
    assert last(name="best")["global_step"] == 192
    assert last()["best"] == last(name="best")["best"] == 7.0
    assert list(returns) == []


def test_a_worse_last_evaluation_leaves_the_best(monkeypatch):
    returns = iter([3.0, 1.0, 2.0])

    def evaluate(self, stop_if_asked):
        return {"return": next(returns), "return_std": 0.0, "length": 1.0}

    monkeypatch.setattr(rl.RLRun, "evaluate", evaluate)
    assert run(*QUICK, "--total_steps=192") == 0
    assert (last(name="best")["global_step"], last()["best"]) == (64, 3.0)


def test_normalizers_are_kept():
    argv = [*QUICK, "--normalize=true"]
    assert run(*argv) == 0
    first = last()["normalizer"]
    assert first["obs."]["mean"].shape == (4,)
    assert first["obs."]["count"] == pytest.approx(132, abs=1)  # a reset and 32 steps of 4
    assert run(*argv, "--total_steps=192", "--ckpt_path=last") == 0
    assert last()["normalizer"]["obs."]["count"] == pytest.approx(200, abs=1)
    assert train.main(["test", "--model=ppo", "--head=natural", *argv, "--ckpt_path=last"]) == 0


def test_a_checkpoint_can_be_played_alone(capfd):
    assert run(*QUICK, "--total_steps=64") == 0
    trained = re.search(r"test/return +│ (\S+)", capfd.readouterr().out)[1]
    assert train.main(["test", "--model=ppo", "--head=natural", *QUICK, "--ckpt_path=last"]) == 0
    assert re.search(r"test/return +│ (\S+)", capfd.readouterr().out)[1] == trained
    assert len(list(Path("runs/ppo/natural").iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--head=sigmoid", "has head natural, the command line sigmoid"),
        ("--head_options.amplitude=3", "has head_options None"),
        ("--env=Acrobot-v1", "has env CartPole-v1, the command line Acrobot-v1"),
        ("--num_actions=18", "has num_actions None, the command line 18"),
        ("--normalize=true", "has normalize False, the command line True"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(change, words, trained, capfd):
    assert run(*QUICK, f"--ckpt_path={trained}", change) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a short run."""
    root = tmp_path_factory.mktemp("trained")
    assert run(*QUICK, f"--default_root_dir={root}", "--eval_every=0") == 0
    return root / "ppo/natural/version_0/checkpoints/last.ckpt"


def test_damaged_checkpoints_are_refused(trained, capfd):
    content = trained.read_bytes()
    for bad in (content[:-1], content[: len(content) // 2], b"", b"junk" * 100):
        Path("bad.ckpt").write_bytes(bad)
        assert run(*QUICK, "--ckpt_path=bad.ckpt") == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert "damaged" in line


def test_a_checkpoint_of_a_vae_is_refused(capfd):
    torch.save({"state_dict": {}, "hyper_parameters": {"head": "natural"}}, "vae.ckpt")
    assert run(*QUICK, "--ckpt_path=vae.ckpt") == 2
    assert "has env None" in capfd.readouterr().err


def test_a_checkpoint_is_on_the_disk_when_save_returns(monkeypatch):
    """A slow disk must not let two checkpoints of one name overtake each other."""
    save, rename, seen = RunSB3.save, os.replace, []

    def slow_rename(source, target):
        time.sleep(0.1 if str(target).endswith(".ckpt") else 0.0)
        rename(source, target)

    def save_and_look(self, name="last"):
        save(self, name)
        found = sorted(path.name for path in self.folder.iterdir())
        checkpoint = last(name=name)
        assert checkpoint["global_step"] == self.model.num_timesteps
        assert checkpoint["best"] == self.best
        seen.append((name, found))

    monkeypatch.setattr(os, "replace", slow_rename)
    monkeypatch.setattr(RunSB3, "save", save_and_look)
    assert run(*QUICK, "--eval_every=64") == 0
    assert {name for name, _ in seen} == {"last", "best"}
    assert not [name for _, found in seen for name in found if name.startswith(".")]


def test_a_full_disk_leaves_the_checkpoint_before(capfd, monkeypatch):
    assert run(*QUICK) == 0
    before = last()
    capfd.readouterr()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run(*QUICK, "--total_steps=192", "--ckpt_path=last") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "No space left on device" in line
    assert same_run(last(), before)


def test_numbers_that_are_not_finite_end_the_run_in_one_line(capfd):
    assert run(*QUICK, "--learning_rate=1e30", "--total_steps=512", head="softmax") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(r"(nan|inf) in the update after \d+ steps", line)
    state = last("runs/ppo/softmax/version_0")
    assert all(value.isfinite().all() for value in state["state_dict"].values())


@one_server
def test_a_signal_stops_a_process():
    argv = [ROOT / "train.py", "--model=ppo", "--head=natural", *QUICK]
    process = Fresh(*argv, "--total_steps=10000000", "--save_every=64")
    wait_for((FOLDER / "checkpoints/last.ckpt").exists, process)
    process.send_signal(signal.SIGINT)
    done = process.wait()
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == ""
    step = last()["global_step"]
    assert f"stopped by SIGINT after step {step}; go on with:" in done.stdout.splitlines()[-1]
