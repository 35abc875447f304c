"""train.py --model ppo as a user meets it: command lines and runs."""
# ruff: noqa: F811 - a fixture is an argument

import re
from pathlib import Path

import pytest
import yaml
from cases_ppo import (
    FOLDER,
    QUICK,
    _workspace,  # noqa: F401 - a fixture
    clock,  # noqa: F401 - a fixture
    last,
    run,
    same_run,
)
from PIL import Image

import train

HEADS = ("softmax", "sparsemax", "sigmoid", "natural")


# -- command lines --------------------------------------------------------------------------------

WRONG = {
    "--env Brekout": "did you mean Breakout?",
    "--env CartPole-v7": "did you mean CartPole-v1?",
    "--env LunarLander-v3": "Box2D",
    "--env Pendulum-v1": "Discrete",
    "--env Blackjack-v1": "no policy takes observations of Tuple",
    "--backend envpool": "not one of native, sb3",
    "--num_envs 0": "num_envs must be at least 1",
    "--num_env 4": "did you mean --num_envs?",
    "--num_actions 1": "num_actions must be at least 2",
    "--env Breakout --num_actions 18": "other than Atari",
    "--env Breakout --normalize true": "not for Atari",
    "--learning_rate 0": "learning_rate must be positive, got 0",
    "--learning_rate fast": "expected float",
    "--clip_coef -1": "clip_coef must be positive",
    "--learning_rate .nan": "learning_rate must be positive, got nan",
    "--vf_coef -1": "vf_coef must be >= 0, got -1",
    "--vf_coef .nan": "vf_coef must be >= 0, got nan",
    "--ent_coef -0.1": "ent_coef must be >= 0, got -0.1",
    "--num_steps 0": "num_steps must be at least 1",
    "--num_minibatches 65": "num_minibatches 65 leaves less than two steps to each",
    "--num_minibatches 64": "num_minibatches 64 leaves less than two steps to each",
    "--device meta": "unknown device 'meta'",
    "--gamma 1.1": "gamma must lie in 0..1",
    "--value_loss cleanr": "did you mean cleanrl?",
    "--head_options.amplitde 3": "no option 'amplitde'",
    "--total_steps 0": "total_steps must be at least 1",
    "--total_steps many": "expected int",
    "--total_steps 1.5": "total_steps must be a whole number, got 1.5",
    "--total_steps 1e-3": "total_steps must be a whole number, got 0.001",
    "--total_steps .inf": "total_steps must be a whole number, got inf",
    "--max_steps 0": "total_steps must be at least 1",
    "--eval_games 0": "eval_games must be at least 1",
    "--eval_every -1": "eval_every must be at least 0",
    "--device abacus": "unknown device 'abacus'",
    "--device cuda:99": "no device 'cuda:99'",
    "--save_every 0": "--save_every",
    "--seed -1": "does not lie in 0..",
    "--seed x": "expected int",
    "--fisher.every_n_rollouts 0": "every_n_rollouts",
    "--max_step 3": "unknown option --max_step",
    "--trainer.total_step 3": "did you mean --trainer.total_steps?",
    "--ckpt_path last": "no last.ckpt in any run",
    "--ckpt_path run/last.zip": "run/last.zip is for Stable-Baselines3; give last.ckpt",
    "--ckpt_path no_such.ckpt": "no checkpoint no_such.ckpt",
    "leftover": "leftover",
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gets_one_line(line, capfd):
    assert run(*QUICK, *line.split()) == 2
    out, err = capfd.readouterr()
    assert len(err.splitlines()) == 1, err
    assert WRONG[line] in err
    assert "Traceback" not in out + err
    assert not Path("runs").exists()


def test_a_test_needs_a_checkpoint(capfd):
    assert train.main(["test", "--model=ppo", *QUICK]) == 2
    assert "needs a checkpoint" in capfd.readouterr().err


def test_help(capsys):
    assert train.main(["--model", "ppo", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for group, option in (("model", "clip_coef"), ("data", "env"), ("trainer", "device"),
                          ("fisher", "fisher.seed")):  # fmt: skip
        assert train.main(["--model", "ppo", "--help", group]) == 0
        assert f"  --{option} " in capsys.readouterr().out
    assert train.main(["--model", "ppo", "--help", "modl"]) == 2
    assert "did you mean model?" in capsys.readouterr().err
    assert train.main(["--help"]) == 0
    assert "ppo" in capsys.readouterr().out


def test_defaults_depend_on_the_environment(capsys):
    def config(*argv):
        assert run(*argv, "--print_config") == 0
        return yaml.safe_load(capsys.readouterr().out)

    atari = config("--device=cpu")
    paper = {"learning_rate": 2.5e-4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4,
             "clip_coef": 0.1, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5,
             "gamma": 0.99, "gae_lambda": 0.95, "value_loss": "cleanrl"}  # fmt: skip
    assert atari["model"] | paper == atari["model"]
    assert (atari["data"]["env"], atari["data"]["num_envs"]) == ("Breakout", 8)
    pole = config("--env=CartPole-v1", "--gamma=0.9")
    assert (pole["model"]["learning_rate"], pole["model"]["gamma"]) == (1e-3, 0.9)
    assert (pole["trainer"]["total_steps"], pole["save_every"]) == (50_000, 25_000)
    assert config("--total_steps=8e6", "--save_every=null")["save_every"] == 80_000
    assert config("--total_steps=8e6", "--save_every=25000")["save_every"] == 25_000
    Path("c.yaml").write_text(yaml.safe_dump(pole))
    assert train.main(["--config=c.yaml", "--seed=3", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == pole | {"seed": 3}


@pytest.mark.parametrize("option", ["--total_steps=1e3", "--max_steps=1000", "--max_steps 1e3",
                                    "--max-steps=1000", "--trainer.max_steps 1000"])  # fmt: skip
def test_steps_go_by_two_names_and_may_be_written_with_an_exponent(option, capsys):
    assert run(*option.split(), "--eval_every=1e2", "--env=CartPole-v1", "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert (config["total_steps"], config["eval_every"]) == (1000, 100)
    assert type(config["total_steps"]) is type(config["eval_every"]) is int


# -- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_every_head_trains(head, capfd):
    assert run(*QUICK, head=head) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert re.search(r"^step 64 .* eval/return ", out, re.MULTILINE)
    assert "test/return" in out and "tensorboard --logdir runs" in out
    folder = Path("runs/ppo", head, "version_0")
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "metrics.json", "checkpoints"} <= names
    saved = {path.name for path in (folder / "checkpoints").iterdir()}
    assert saved == {"best.ckpt", "last.ckpt", "best.zip", "last.zip"}
    state = last(folder)
    assert (state["global_step"], state["hyper_parameters"]["head"]) == (128, head)


def test_a_run_says_where_its_seconds_went(clock, capfd):
    assert run(*clock) == 0
    line = capfd.readouterr().out.splitlines()[-1]
    parts = ("imports", "start", "rollouts", "updates", "evaluation", "checkpoints", "test")
    assert re.fullmatch("time: " + ", ".join(rf"{name} \S+ \w+" for name in parts), line), line
    assert train.main(["test", "--model=ppo", *clock, "--ckpt_path=last", "--head=natural"]) == 0
    line = capfd.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"time: imports \S+ \w+, start \S+ \w+, test \S+ \w+", line), line


def test_what_tensorboard_gets():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(*QUICK, "--total_steps=512") == 0
    (file,) = FOLDER.glob("events*")  # TensorBoard follows one at a time
    events = EventAccumulator(str(FOLDER)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/entropy_loss", "rollout/ep_rew_mean", "eval/return"} <= tags
    assert {"test/return", "fim/off_diagonal_mass", "fim/saturated"} <= tags
    assert [event.step for event in events.Scalars("eval/return")] == list(range(64, 512, 64))
    rates = [event.value for event in events.Scalars("train/learning_rate")]
    assert rates == pytest.approx([1e-3 * (8 - k) / 8 for k in range(8)])
    assert b"_hparams_/session_start_info" in file.read_bytes()


def test_eighteen_actions():
    assert run(*QUICK, "--num_actions=18") == 0
    assert last()["state_dict"]["action_net.weight"].shape[0] == 17


def test_breakout_with_c_threads():
    argv = ["--env=Breakout", "--num_envs=2", "--num_steps=8", "--total_steps=32",
            "--num_minibatches=2", "--update_epochs=1", "--eval_games=1", "--eval_every=0",
            "--device=cpu"]  # fmt: skip
    assert run(*argv) == 0
    assert last()["state_dict"]["action_net.weight"].shape == (3, 512)
    assert (FOLDER / "checkpoints/best.ckpt").exists()  # the game at the end is an evaluation, too
    game = Image.open(FOLDER / "game.gif")
    assert game.n_frames > 20
    assert game.size == (160, 210)
    (file,) = FOLDER.glob("events*")
    assert b"GIF89a" in file.read_bytes()


def test_an_environment_that_cannot_be_drawn_has_no_gif(clock, capfd):
    assert run(*clock, "--total_steps=64", "--gif=true") == 0
    assert "no GIF of a game: " in capfd.readouterr().out


def test_looking_on_changes_nothing(clock):
    assert run(*clock) == 0
    assert run(*clock, "--eval_every=0", "--save_every=64", "--fisher.every_n_rollouts=2") == 0
    assert same_run(last(), last("runs/ppo/natural/version_1"))
