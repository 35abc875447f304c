"""train.py --model ppo as a user meets it: command lines, runs, resumption, faults."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cases_fresh import Fresh, one_server
from cases_sweep import wait_for
from PIL import Image
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

import train
from catnat.callbacks.run_sb3 import RunSB3
from catnat.sb3 import HeadPPO
from catnat.training import rl

HEADS = ("softmax", "sparsemax", "sigmoid", "natural")
ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("runs/ppo/natural/version_0")
QUICK = ["--env=CartPole-v1", "--num_envs=4", "--num_steps=16", "--update_epochs=1",
         "--total_steps=128", "--eval_games=1", "--eval_every=64", "--gif=false"]  # fmt: skip
# Its episodes last as long as a rollout and always begin alike: so nothing of them is lost when a
# run stops between two rollouts, and what follows must be the same to the last bit.
CLOCK = """
import gymnasium, numpy as np

class Clock(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (16,))
    action_space = gymnasium.spaces.Discrete(3)
    seeds = []
    def _show(self):
        return np.eye(16, dtype=np.float32)[self.t % 16]
    def reset(self, *, seed=None, options=None):
        self.t = 0
        self.seeds += [] if seed is None else [seed]
        return self._show(), {}
    def step(self, action):
        self.t += 1
        return self._show(), float(action == self.t % 3), self.t == 16, False, {}

gymnasium.register("Clock-v0", Clock)
"""


@pytest.fixture(autouse=True)
def _workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """Options of a run in an environment of the user's own."""
    Path("clock_env.py").write_text(CLOCK)
    monkeypatch.syspath_prepend(os.getcwd())
    sys.modules.pop("clock_env", None)
    return [*QUICK, "--import=clock_env", "--env=Clock-v0", "--total_steps=256"]


def run(*argv, head="natural"):
    return train.main(["--model=ppo", f"--head={head}", *map(str, argv)])


def last(folder=FOLDER, name="last"):
    return torch.load(f"{folder}/checkpoints/{name}.ckpt", weights_only=True)


def same(one, other):
    """Whether two checkpoints have the same weights, moments and random states."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def same_run(one, other):
    keys = ("state_dict", "optimizer", "random", "global_step", "updates")
    return all(same(one[key], other[key]) for key in keys)


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
    assert pole["trainer"]["total_steps"] == 50_000
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


# -- checkpoints ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("where", ["last", "run", "elsewhere"])
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
