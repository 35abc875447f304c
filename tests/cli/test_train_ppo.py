"""train.py --model ppo as a user meets it: command lines and runs."""
# ruff: noqa: F811 - a fixture is an argument

import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from cases_cli import assert_refused, one_line, printed
from cases_ppo import (
    CLOCK,
    FOLDER,
    QUICK,
    _workspace,  # noqa: F401 - a fixture
    clock,  # noqa: F401 - a fixture
    last,
    run,
    same_run,
)
from gymnasium.envs.classic_control import CartPoleEnv

from catnat.callbacks import sb3_run
from catnat.cli.main import build
from catnat.sb3 import HeadPPO

HEADS = ("softmax", "sparsemax", "sigmoid", "natural")


# -- command lines --------------------------------------------------------------------------------

WRONG = {
    "--backend sb3": "backend sb3 is for Atari games",
    "--env_kwargs.render_mode xx": "no render_mode 'xx'; choose from ['human', 'rgb_array']",
    "--seed false": "Expected a <class 'int'>. Got value: False",
    "--ent_coef .inf": "ent_coef must lie in",
    "--env Brekout": "did you mean Breakout?",
    "--env CartPole-v9": "did you mean CartPole-v1?",
    "--env LunarLander-v3": "Box2D",
    "--env Pendulum-v1": "Discrete",
    "--env Blackjack-v1": "observation space is not supported",
    "--backend envpool": "['native', 'sb3']",
    "--num_envs 0": "num_envs must be at least 1",
    "--num_env 4": "did you mean --num_envs?",
    "--env Breakout --normalize true": "other than Atari",
    "--learning_rate 0": "learning_rate must be positive, got 0",
    "--vf_coef .nan": "vf_coef must lie in [0, inf), got nan",
    "--n_steps 0": "n_steps must be at least 1",
    "--policy_kwargs.net_arch foo": "Expected a <class 'list'>",
    "--env_kwargs.foo 3": "unexpected keyword argument 'foo'",
    "--batch_size 1": "batch_size",
    "--clip_range -1": "clip_range must be positive, got -1",
    "--gamma 1.1": "gamma must lie in 0..1",
    "--value_loss cleanr": "['sb3', 'cleanrl']",
    "--total_steps 0": 'trainer.total_steps": - Not of type PositiveInt',
    "--total_steps 1.5": 'trainer.total_steps": - Not of type PositiveInt',
    "--eval_every -1": 'trainer.eval_every": - Not of type NonNegativeInt',
    "--devices 2": "did you mean --device?",
    "--device abacus": "abacus",
    "--device cuda:99": "no device 'cuda:99'",
    "--policy_kwargs {head:\u00a0softmax}": "Unexpected keys: {'head'}",
    "--policy_kwargs.head_options {}": "Unexpected keys: {'head_options'}",
    "--env Breakout --seed 1147483647": "seed must lie in",
    "--policy_kwargs.net_arch [0]": "PositiveInt",
    "--policy_kwargs.net_arch {pi:\u00a0[8],qf:\u00a0[8]}": "Unexpected keys: {'qf'}",
    "--policy_kwargs.net_arch {vf:\u00a0abc}": '"policy_kwargs": - ',
    "--policy_kwargs.activation_fn torch.nn.ReLo": "'torch.nn' has no attribute 'ReLo'",
    "--target_kl -1": "target_kl must be positive, got -1",
    "--tensorboard_log x": "unknown option --tensorboard_log",
    "--eval_games 0": 'trainer.eval_games": Not of type PositiveInt',
    "--fisher.every_n_rollouts 0": "every_n_rollouts",
    "--trainer.total_step 3": "did you mean --trainer.total_steps?",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gets_one_line(line, capfd):
    words = [word.replace("\u00a0", " ") for word in line.split(" ")]
    assert_refused(run(*QUICK, *words), WRONG[line], capfd)


def test_defaults_depend_on_the_environment(capsys):
    atari = printed(capsys, "--model=ppo", "--device=cpu")
    paper = {
        "learning_rate": 2.5e-4,
        "n_steps": 128,
        "batch_size": 256,
        "n_epochs": 4,
        "clip_range": 0.1,
        "ent_coef": 0.01,
        "vf_coef": 0.25,
        "max_grad_norm": 0.5,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "value_loss": "cleanrl",
    }
    assert atari["model"]["init_args"] | paper == atari["model"]["init_args"]
    assert (atari["data"]["env"], atari["data"]["num_envs"]) == ("Breakout", 8)
    pole = printed(capsys, "--model=ppo", "--env=CartPole-v1", "--gamma=0.9")
    options = pole["model"]["init_args"]
    assert (options["learning_rate"], options["gamma"]) == (1e-3, 0.9)
    Path("c.yaml").write_text(yaml.safe_dump(pole))
    assert printed(capsys, "--config=c.yaml", "--seed=3") == pole | {"seed_everything": 3}


@pytest.mark.parametrize(
    "option",
    ["--total_steps=1000", "--max_steps=1000", "--max-steps=1000", "--trainer.total_steps 1000"],
)
def test_steps_go_by_two_names(option, capsys):
    options = printed(capsys, "--model=ppo", *option.split(), "--env=CartPole-v1")
    assert options["trainer"]["total_steps"] == 1000


# -- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["ppo", "a2c"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_trains(head, model, capfd):
    assert run(*QUICK, head=head, model=model) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert re.search(r"^step 64 .* eval/mean_reward ", out, re.MULTILINE)
    assert "test/return" in out and "fim/off_diagonal_mass" in out
    assert out.splitlines()[-1] == f"tensorboard --logdir runs/{model}"
    folder = Path("runs", model, head, "version_0")
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "metrics.json", "checkpoints"} <= names
    saved = {path.name for path in (folder / "checkpoints").iterdir()}
    assert saved == {"best.ckpt", "last.ckpt", "best.zip", "last.zip"}
    state = last(folder)
    assert (state["global_step"], state["hyper_parameters"]["head"]) == (128, head)


def test_options_that_stable_baselines_has(capfd):
    more = [
        "--env_kwargs.sutton_barto_reward=true",
        "--policy_kwargs.net_arch={pi: [8, 8], vf: [4]}",
        "--target_kl=0.01",
        "--policy_kwargs.ortho_init=false",
        "--policy_kwargs.activation_fn=torch.nn.ReLU",
        "--total_steps=512",
        "--batch_size=63",
        "--callbacks+=stable_baselines3.common.callbacks.StopTrainingOnMaxEpisodes",
        "--callbacks.max_episodes=3",
    ]
    with pytest.warns(UserWarning, match="a truncated mini-batch of size 1"):
        assert run(*QUICK, *more) == 0
    model = HeadPPO.load(FOLDER / "checkpoints/last.zip")
    assert model.policy.activation_fn is torch.nn.ReLU
    state = last()
    assert state["global_step"] < 512, "the callback stopped it"
    assert state["state_dict"]["mlp_extractor.policy_net.0.weight"].shape == (8, 4)
    out = capfd.readouterr().out
    assert re.search(r"test/return +│ -1", out), "the environment's own reward"


@pytest.mark.parametrize(
    ("env", "limits"), [("CliffWalking-v1", (None, 10_000)), ("CartPole-v1", (500, 500))]
)
def test_an_environment_without_a_time_limit_is_evaluated_for_some_steps_only(env, limits):
    cli = build(["--model=ppo", f"--env={env}"])
    specs = [env.get_attr("spec")[0] for env in (cli.run.env, cli.run.eval_env)]
    assert tuple(spec.max_episode_steps for spec in specs) == limits


def test_games_that_are_not_finished_are_reported(capfd, monkeypatch):
    monkeypatch.setattr("catnat.sb3.train._LONGEST_GAME", 50)
    argv = ["--env=CliffWalking-v1", "--eval_games=2", "--eval_every=0", "--total_steps=64"]
    assert run(*QUICK[1:4], *argv) == 0
    assert "test/unfinished" in capfd.readouterr().out


class Faulty(CartPoleEnv):
    """Fails in its fortieth step."""

    calls = 0

    def __init__(self, fault, **kwargs):
        super().__init__(**kwargs)
        self.fault = fault

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        self.calls += 1
        if self.calls == 40 and self.fault == "hangs":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        lost = {self.fault: np.float32("nan")} if self.calls == 40 else {}
        observation = observation * lost.get("observations", 1)
        return observation, lost.get("rewards", reward), self.calls % 16 == 0, False, info


@pytest.fixture
def faulty(monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Faulty-v0", gymnasium.spec("CartPole-v1"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gymnasium.register("Faulty-v0", Faulty)
    return [*QUICK, "--env=Faulty-v0", "--total_steps=512", "--save_every=64"]


@pytest.mark.parametrize("fault", ["rewards", "observations"])
def test_numbers_of_an_environment_that_are_not_finite_are_named(fault, faulty, capfd):
    assert run(*faulty, f"--env_kwargs.fault={fault}", "--eval_every=0") == 1
    line = one_line(capfd)
    assert f"ended after step 160: the environment gave {fault} that are not finite" in line
    assert "the latest checkpoint is" in line
    assert last()["global_step"] == 128


@pytest.mark.parametrize("where", ["rollout", "evaluation"])
def test_a_signal_ends_a_run_whose_environment_hangs(where, faulty, monkeypatch, capfd):
    """The game of an evaluation has 16 steps: the third one hangs. Saving outlasts a look at it."""
    monkeypatch.setattr(sb3_run, "_PATIENCE", 0.001)
    games = ["--eval_every=0"] if where == "rollout" else ["--eval_games=3", "--num_envs=1"]
    began = time.monotonic()
    assert run(*faulty, "--env_kwargs.fault=hangs", *games) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 50, "it does not wait for the environment"
    step = 128 if where == "rollout" else 32
    assert f"stopped by SIGTERM after step {step}; resume with" in capfd.readouterr().out
    assert last()["global_step"] == step


def test_an_environment_of_the_current_folder(monkeypatch):
    Path("my_clock.py").write_text(CLOCK)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != os.getcwd()])
    assert run(*QUICK, "--env=my_clock:Clock-v0", "--total_steps=64", "--eval_every=0") == 0


def test_breakout_with_c_threads():
    argv = [
        "--env=Breakout",
        "--num_envs=2",
        "--n_steps=8",
        "--total_steps=32",
        "--batch_size=8",
        "--n_epochs=1",
        "--eval_games=1",
        "--eval_every=0",
        "--device=cpu",
    ]
    assert run(*argv) == 0
    assert last()["state_dict"]["action_net.weight"].shape == (3, 512)
    assert (FOLDER / "checkpoints/best.ckpt").exists()  # the game at the end is an evaluation, too


def test_looking_on_changes_nothing(clock):
    assert run(*clock) == 0
    assert run(*clock, "--eval_every=0", "--save_every=64", "--fisher.every_n_rollouts=2") == 0
    assert same_run(last(), last("runs/ppo/natural/version_1"))
