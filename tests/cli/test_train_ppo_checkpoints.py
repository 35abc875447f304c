"""Checkpoints of train.py --model ppo: what they hold, resumption, faults."""
# ruff: noqa: F811 - a fixture is an argument

import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from cases_callbacks import TAGS
from cases_cli import ROOT, config, one_line
from cases_fresh import Fresh, one_server
from cases_ppo import (
    FOLDER,
    QUICK,
    _workspace,  # noqa: F401 - a fixture
    clock,  # noqa: F401 - a fixture
    interrupted,  # noqa: F401 - a fixture
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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from catnat.callbacks.sb3_run import RunSB3
from catnat.sb3 import HeadPPO


@pytest.mark.parametrize("model", ["ppo", "a2c"])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(model, clock, capfd, interrupted):
    folder, before = f"{model}/natural/version_0", signal.getsignal(signal.SIGTERM)
    clock += ["--fisher.max_states=20"]
    assert run(*clock, model=model) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.startswith("stopped by SIGTERM after step 128; resume with: python train.py ")
    assert last(f"runs/{folder}")["global_step"] == 128
    again = line.split("python train.py ")[1].split()
    seeds = sys.modules["clock_env"].Clock.seeds
    assert seeds[:4] == [0, 1, 2, 3]
    seeds.clear()
    assert train.main(again) == 0
    assert seeds[:4] == [128, 129, 130, 131]  # no game twice, where seeds matter
    assert run(*clock, "--default_root_dir=whole", model=model) == 0
    assert not Path(f"runs/{model}/natural/version_1").exists()
    assert same_run(last(f"runs/{folder}"), last(f"whole/{folder}"))
    assert last(f"runs/{folder}")["best"] == last(f"whole/{folder}")["best"]
    events = [EventAccumulator(f"{root}/{folder}").Reload() for root in ("runs", "whole")]
    tags = set(events[1].Tags()["scalars"]) - {"time/fps"}
    assert tags > {*TAGS[:3], "train/value_loss"} or model == "a2c"
    for tag in tags:
        one, other = ([(e.step, e.value) for e in run.Scalars(tag)] for run in events)
        assert one == other, tag
    assert [e.step for e in events[0].Scalars(TAGS[0])] == [64, 128, 192, 256]


STARTED = ["--learning_rate=0.002", "--gamma=0.9", "--seed=4", "--head_options.amplitude=5"]


def test_a_run_is_resumed_with_what_it_began_with(capfd, monkeypatch):
    assert run(*QUICK, *STARTED) == 0
    before = config(FOLDER)
    capfd.readouterr()
    more = ["--ckpt_path=last", "--total_steps=192"]
    for option in ("--gamma=0.8", "--seed=5", "--policy_kwargs.optimizer_class=torch.optim.SGD"):
        assert train.main(["--model=ppo", *more, option]) == 2
        assert "cannot change when" in one_line(capfd)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(RunSB3, "_on_step", None)  # the first step fails
        train.main(["--model=ppo", *more])
    assert config(FOLDER) == before and (FOLDER / "metrics.json").is_file()
    assert train.main(["--model=ppo", *more]) == 0
    after = config(FOLDER)
    assert after["model"] == before["model"]
    assert last()["global_step"] == after["trainer"]["total_steps"] == 192


def test_a_run_has_every_value_once_and_can_be_ended_again():
    def steps():
        events = EventAccumulator(str(FOLDER), {"scalars": 0}).Reload()
        return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    assert run(*QUICK, "--total_steps=256") == 0
    rows = steps()
    metrics = (FOLDER / "metrics.json").read_text()
    assert all(len(set(x)) == len(x) for x in rows.values()), rows
    assert rows["train/value_loss"] == [128, 192, 256] and rows["eval/mean_reward"] == [
        64,
        128,
        192,
    ]
    assert train.main(["--model=ppo", "--ckpt_path=last"]) == 0
    again = steps()
    assert again.keys() == rows.keys(), "the test alone is done again"
    for tag, steps_of_tag in again.items():
        assert steps_of_tag == (rows[tag] * 2 if tag.startswith("test/") else rows[tag]), tag
    assert (FOLDER / "metrics.json").read_text().split("fim")[1:] == metrics.split("fim")[1:]


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


@pytest.mark.parametrize(("at_the_end", "best"), [(7.0, (192, 7.0)), (2.0, (64, 3.0))])
def test_the_last_evaluation_can_be_the_best(at_the_end, best, monkeypatch):
    returns = iter([3.0, 1.0, at_the_end])  # at steps 64 and 128, and at the end

    def play(self):
        return [next(returns)], [1]

    monkeypatch.setattr(RunSB3, "_play", play)
    assert run(*QUICK, "--total_steps=192") == 0
    assert (last(name="best")["global_step"], last()["best"]) == best


def test_normalizers_are_kept_also_for_stable_baselines():
    argv = [*QUICK, "--normalize=true"]
    assert run(*argv) == 0
    moments = last()["normalizer"][0]
    assert moments["mean"].shape == (4,)
    assert moments["count"] == pytest.approx(132, abs=1)  # a reset and 32 steps of 4
    path = FOLDER / "checkpoints/last_vecnormalize.pkl"
    theirs = VecNormalize.load(str(path), make_vec_env("CartPole-v1", 2))
    assert torch.equal(torch.as_tensor(theirs.obs_rms.mean), moments["mean"])
    state = last()
    state["normalizer"] = dict(zip(["obs.", "ret"], state["normalizer"].values(), strict=True))
    torch.save(state, FOLDER / "checkpoints/last.ckpt")  # as earlier versions named them
    assert run(*argv, "--total_steps=192", "--ckpt_path=last") == 0
    assert last()["normalizer"][0]["count"] == pytest.approx(200, abs=1)
    assert train.main(["test", "--model=ppo", "--head=natural", *argv, "--ckpt_path=last"]) == 0


@pytest.mark.parametrize(
    "change",
    [
        "--head=sigmoid",
        "--head_options.amplitude=3",
        "--env=Acrobot-v1",
        "--normalize=true",
        "--total_steps=64",
    ],
)
def test_a_checkpoint_of_something_else_is_refused(change, trained, capfd):
    before = (trained.parent.parent / "config.yaml").read_text()
    assert run(*QUICK, f"--ckpt_path={trained}", change) == 2
    assert "checkpoint" in one_line(capfd)
    assert (trained.parent.parent / "config.yaml").read_text() == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a short run."""
    root = tmp_path_factory.mktemp("trained")
    assert run(*QUICK, f"--default_root_dir={root}", "--eval_every=0") == 0
    return root / "ppo/natural/version_0/checkpoints/last.ckpt"


def test_a_checkpoint_of_a_vae_is_refused_and_a_file_of_stable_baselines(trained, capfd):
    torch.save({"state_dict": {}, "hyper_parameters": {"head": "natural"}}, "vae.ckpt")
    assert run(*QUICK, "--ckpt_path=vae.ckpt") == 2
    assert "belongs to another model" in one_line(capfd)
    assert run(*QUICK, f"--ckpt_path={trained.with_suffix('.zip')}") == 2
    assert "take the .ckpt" in one_line(capfd)


def test_numbers_that_are_not_finite_end_the_run_in_one_line(capfd):
    options = ["--learning_rate=1e30", "--total_steps=512", "--save_every=1"]
    assert run(*QUICK, *options, head="softmax") == 1
    pattern = (
        r"(probabilities are NaN|not finite in the update after \d+ steps).* checkpoint is runs"
    )
    assert re.search(pattern, one_line(capfd))
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
    assert f"stopped by SIGINT after step {step}; resume with:" in done.stdout.splitlines()[-1]
