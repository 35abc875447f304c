"""train.py --model a2c: the stack of PPO with another algorithm."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cases_ppo import CLOCK, same, same_run
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

import train
from catnat.callbacks.run_sb3 import RunSB3
from catnat.sb3 import HeadA2C
from catnat.training.algorithms import ALGORITHMS
from catnat.training.names import RL_MODELS

FOLDER = Path("runs/a2c/natural/version_0")
QUICK = ["--env=CartPole-v1", "--num_envs=4", "--num_steps=16", "--total_steps=128",
         "--eval_games=1", "--eval_every=64", "--gif=false"]  # fmt: skip


@pytest.fixture(autouse=True)
def _workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*argv, head="natural"):
    return train.main(["--model=a2c", f"--head={head}", *map(str, argv)])


def last(folder=FOLDER, name="last"):
    return torch.load(f"{folder}/checkpoints/{name}.ckpt", weights_only=True)


def test_every_name_is_an_algorithm():
    assert set(ALGORITHMS) == set(RL_MODELS)


def test_the_defaults_are_those_of_stable_baselines(capsys):
    assert run("--env=CartPole-v1", "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)["model"]
    wanted = {"learning_rate": 7e-4, "num_steps": 5, "gamma": 0.99, "gae_lambda": 1.0,
              "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5, "use_rms_prop": True,
              "rms_prop_eps": 1e-5, "normalize_advantage": False, "anneal_lr": False}  # fmt: skip
    assert config | wanted == config


@pytest.mark.parametrize("head", ["softmax", "sparsemax", "sigmoid", "natural"])
def test_every_head_trains(head, capfd):
    assert run(*QUICK, head=head) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert re.search(r"^step 64 .* eval/return ", out, re.MULTILINE)
    assert "test/return" in out and "fim/off_diagonal_mass" in out
    folder = Path("runs/a2c", head, "version_0")
    saved = {path.name for path in (folder / "checkpoints").iterdir()}
    assert saved == {"best.ckpt", "last.ckpt", "best.zip", "last.zip"}


def test_it_takes_the_steps_of_stable_baselines():
    assert run(*QUICK, "--total_steps=192") == 0
    theirs = A2C(
        "MlpPolicy", make_vec_env("CartPole-v1", 4, seed=0), n_steps=16, seed=0, device="cpu"
    )
    ours = HeadA2C(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 4, seed=0),
        n_steps=16,
        seed=0,
        device="cpu",
        policy_kwargs={"head": "natural", "head_options": None},
    )
    assert type(theirs.policy.optimizer) is type(ours.policy.optimizer) is torch.optim.RMSprop
    ours.learn(192)
    assert same(ours.policy.state_dict(), last()["state_dict"])


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(monkeypatch, capfd):
    Path("clock_env.py").write_text(CLOCK)
    monkeypatch.syspath_prepend(os.getcwd())
    sys.modules.pop("clock_env", None)
    clock = [*QUICK, "--import=clock_env", "--env=Clock-v0", "--total_steps=256"]
    sent = []

    def step(self):
        if self.model.num_timesteps == 100 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return True

    monkeypatch.setattr(RunSB3, "_on_step", step)
    assert run(*clock) == 128 + signal.SIGTERM
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.startswith("stopped by SIGTERM after step 128; go on with: python train.py ")
    assert train.main(line.split("python train.py ")[1].split()) == 0
    assert run(*clock, "--default_root_dir=whole") == 0
    assert same_run(last(), last("whole/a2c/natural/version_0"))


def test_a_checkpoint_is_tested_continued_and_loaded_by_stable_baselines(capfd):
    assert run(*QUICK, "--eval_every=0") == 0
    trained = re.search(r"test/return +│ (\S+)", capfd.readouterr().out)[1]
    assert train.main(["test", "--model=a2c", "--ckpt_path=last"]) == 0
    assert re.search(r"test/return +│ (\S+)", capfd.readouterr().out)[1] == trained
    for algorithm in (A2C, HeadA2C):
        model = algorithm.load(FOLDER / "checkpoints/last.zip", device="cpu")
        assert same(model.policy.state_dict(), last()["state_dict"])
        assert evaluate_policy(model, make_vec_env("CartPole-v1", 2, seed=0), 2)[0] > 5
    assert run("--ckpt_path=last", "--total_steps=192") == 0
    assert last()["global_step"] == 192
    capfd.readouterr()
    assert run("--ckpt_path=last", "--learning_rate=0.1") == 2
    assert "has learning_rate 0.0007, the command line 0.1" in capfd.readouterr().err
    path = FOLDER / "checkpoints/last.ckpt"
    assert train.main(["--model=ppo", f"--ckpt_path={path}"]) == 2
    assert "is one of another model: a2c, not ppo" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--clip_coef 0.1", "unknown option --clip_coef"),
        ("--rms_prop_eps 0", "rms_prop_eps must be positive, got 0"),
        ("--num_steps 0", "num_steps must be at least 1"),
        ("--use_rms_prop maybe", "--model.use_rms_prop 'maybe': expected bool"),
    ],
)
def test_a_wrong_command_line_gets_one_line(line, reason, capfd):
    assert run(*QUICK, *line.split()) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert reason in said
    assert not Path("runs").exists()


def test_weights_that_are_not_finite_end_the_run_in_one_line(capfd):
    assert run(*QUICK, "--learning_rate=1e30", "--total_steps=512") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(r"not finite in the update after \d+ steps", line)
    assert all(value.isfinite().all() for value in last()["state_dict"].values())


def test_help(capsys):
    assert train.main(["--model", "a2c", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and "--model a2c" in lines[0]
    assert train.main(["--model", "a2c", "--help", "model"]) == 0
    assert "--rms_prop_eps" in capsys.readouterr().out
