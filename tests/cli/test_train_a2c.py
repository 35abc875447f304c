"""train.py --model a2c: what differs from PPO, which has the same command line."""

import re
from functools import partial
from pathlib import Path

import cases_ppo
import pytest
from cases_cli import assert_refused, one_line
from cases_ppo import (
    QUICK,
    _workspace,  # noqa: F401 - a fixture
    last,
    same,
)
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from catnat.sb3 import HeadA2C

FOLDER = Path("runs/a2c/natural/version_0")
run = partial(cases_ppo.run, model="a2c")


def test_it_takes_the_steps_of_stable_baselines_which_loads_its_zip(capfd):
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
    assert same(ours.policy.state_dict(), last(FOLDER)["state_dict"])
    for algorithm in (A2C, HeadA2C):
        model = algorithm.load(FOLDER / "checkpoints/last.zip", device="cpu")
        assert same(model.policy.state_dict(), last(FOLDER)["state_dict"])
        assert evaluate_policy(model, make_vec_env("CartPole-v1", 2, seed=0), 2)[0] > 5
    capfd.readouterr()
    assert train.main(["--model=ppo", f"--ckpt_path={FOLDER}/checkpoints/last.ckpt"]) == 2
    assert "is of class_path catnat.sb3.recipes.A2C, not catnat.sb3.recipes.PPO" in one_line(capfd)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--clip_range 0.1", "unknown option --clip_range"),
        ("--rms_prop_eps 0", "rms_prop_eps must be positive, got 0"),
        (
            '--policy_kwargs.optimizer_kwargs {"eps":0.1}',
            "optimizer_kwargs need an optimizer_class",
        ),
        ("--policy_kwargs.mask_mode prune", "mask_mode has no effect"),
    ],
)
def test_a_wrong_command_line_gets_one_line(line, reason, capfd):
    assert_refused(run(*QUICK, *line.split()), reason, capfd)


def test_the_end_of_a_short_run_reports_its_last_tenth(capfd):
    """And not the first of many short rollouts, where the entropy is that of no learning."""
    argv = [
        "--env=CartPole-v1",
        "--num_envs=2",
        "--total_steps=400",
        "--eval_games=1",
        "--eval_every=0",
        "--learning_rate=0.01",
    ]
    assert run(*argv) == 0
    seen = EventAccumulator(str(FOLDER)).Reload().Scalars("train/entropy")
    assert seen[-1].step > 0.85 * 400
    shown = re.search(r"train/entropy +│ (\S+)", capfd.readouterr().out)[1]
    assert float(shown) == pytest.approx(seen[-1].value, rel=1e-3)
