"""train.py --model a2c: the stack of PPO with another algorithm."""
# ruff: noqa: F811 - a fixture is an argument

import re
import signal
from pathlib import Path

import pytest
import torch
import yaml
from cases_cli import one_line
from cases_ppo import QUICK as PPO_QUICK
from cases_ppo import (
    _workspace,  # noqa: F401 - a fixture
    clock,  # noqa: F401 - a fixture
    interrupted,  # noqa: F401 - a fixture
    same,
    same_run,
)
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

import train
from catnat.sb3 import HeadA2C

FOLDER = Path("runs/a2c/natural/version_0")
QUICK = [option for option in PPO_QUICK if "epochs" not in option]


def run(*argv, head="natural"):
    return train.main(["--model=a2c", f"--head={head}", *map(str, argv)])


def last(folder=FOLDER, name="last"):
    return torch.load(f"{folder}/checkpoints/{name}.ckpt", weights_only=True)


def test_the_defaults_are_those_of_stable_baselines(capsys):
    assert run("--env=CartPole-v1", "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
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
    ours = HeadA2C(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 4, seed=0),
        n_steps=16,
        seed=0,
        device="cpu",
        policy_kwargs={"head": "natural", "head_options": None},
    )
    ours.learn(192)
    assert same(ours.policy.state_dict(), last()["state_dict"])


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(clock, interrupted, capfd):
    clock = [option for option in clock if "epochs" not in option]
    assert run(*clock) == 128 + signal.SIGTERM
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.startswith("stopped by SIGTERM after step 128; resume with: python train.py ")
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
    path = FOLDER / "checkpoints/last.ckpt"
    assert train.main(["--model=ppo", f"--ckpt_path={path}"]) == 2
    assert "has class_path catnat.cli.rl_options.A2C" in one_line(capfd)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--clip_coef 0.1", "unrecognized arguments: --clip_coef"),
        ("--rms_prop_eps 0", "rms_prop_eps must be positive, got 0"),
        ("--num_steps 0", "num_steps must be at least 1"),
        ("--use_rms_prop maybe", "Expected a bool"),
    ],
)
def test_a_wrong_command_line_gets_one_line(line, reason, capfd):
    assert run(*QUICK, *line.split()) == 2
    assert reason in one_line(capfd)
    assert not Path("runs").exists()


def test_the_end_of_a_short_run_reports_its_last_tenth(capfd):
    """And not the first of many short rollouts, where the entropy is that of no learning."""
    argv = ["--env=CartPole-v1", "--num_envs=2", "--total_steps=400", "--eval_games=1",
            "--eval_every=0", "--gif=false", "--learning_rate=0.01"]  # fmt: skip
    assert run(*argv) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(FOLDER)).Reload().Scalars("train/entropy")
    assert seen[-1].step > 0.85 * 400
    shown = re.search(r"train/entropy +│ (\S+)", capfd.readouterr().out)[1]
    assert float(shown) == pytest.approx(seen[-1].value, rel=1e-3)
