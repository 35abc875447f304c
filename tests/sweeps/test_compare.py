"""catnat compare: runs and rows side by side."""

import json
from pathlib import Path

import pytest
import yaml
from cases_sweep import run_command
from torch.utils.tensorboard import SummaryWriter

from catnat.sweeps import runs, significance

NLL = {"softmax": [104.0, 105.0, 104.5], "sigmoid": [100.0, 100.4, 100.2]}


@pytest.fixture
def folders(tmp_path):
    """Three runs of each head, which also differ in what does not matter."""
    for head, values in NLL.items():
        for seed, value in enumerate(values):
            folder = tmp_path / head / f"version_{seed}"
            with SummaryWriter(str(folder)) as writer:
                writer.add_scalar("val/loss", value, 5)
            model = {"class_path": "a.VAE", "init_args": {"head": head, "head_options": {"mix": 0}}}
            data = {"init_args": {"seed": 0, "root": f"data_{seed}"}}
            config = {"seed_everything": seed, "model": model, "data": data, "save_every": seed}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            (folder / "metrics.json").write_text(json.dumps({"test/nll": value, "test/kl": 1}))
    return [str(path) for path in tmp_path.glob("*/version_*")]


def test_runs_are_grouped_by_options_that_differ_and_the_best_is_marked(folders, tmp_path, capsys):
    picture = tmp_path / "curves.png"
    assert run_command("compare", [*folders, "--plot", str(picture)]) == 0
    header, best, other, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["head", "n", "test/nll"]
    assert best.split() == ["sigmoid", "3", "100.2", "±", "0.2", "*", "best"]
    assert other.split()[:6] == ["softmax", "3", "104.5", "±", "0.5", "+4.3"]
    low, high = significance.interval(NLL["softmax"], NLL["sigmoid"])
    assert f"({low:+.3g} to {high:+.3g})" in other
    assert picture.stat().st_size > 0


def test_runs_of_any_kind_are_compared(folders, tmp_path, capsys):
    begins, *others = map(Path, folders)
    (begins / "config.yaml").rename(begins / ".lock")
    (others[0] / "metrics.json").write_text(json.dumps({"test_loss": float("nan")}))
    (others[1] / "metrics.json").write_text(json.dumps({"test_loss": True}))
    others[1].joinpath("config.yaml").write_bytes(others[0].joinpath("config.yaml").read_bytes())
    assert run_command("compare", folders[:3]) == 0
    assert f"{begins} has not finished" in capsys.readouterr().out
    (others[1] / "metrics.json").write_text("[1]")
    assert run_command("compare", folders) == 2
    assert "metrics.json has no metrics by name" in capsys.readouterr().err


def test_the_star_is_the_bold_of_tables(tmp_path, capsys):
    values = {"a": [1.0, 1.1, 0.9], "b": [1.05, 1.15, 0.95], "c": [5.0, 5.1, 4.9]}
    path = tmp_path / "runs.csv"
    for head, losses in values.items():
        for seed, loss in enumerate(losses):
            run = runs.Run({"head": head, "seed": seed}, "plan", "final")
            runs.add(path, run.row({"test/nll": loss}))
    assert run_command("compare", [str(path)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()[:4]
    is_bold = significance.bold(significance.against_best(list(values.values()), "lower"))
    assert ["*" in line for line in lines] == is_bold == [True, True, False]


def test_folders_of_a_sweep_s_runs_are_runs(folders, tmp_path, capsys):
    for path in map(Path, folders):
        target = tmp_path / "mine" / f"plan-final-{path.parent.name}-{path.name}"
        target.mkdir(parents=True)
        (target / "log.txt").touch()
        path.rename(target / "version_1")
    unfinished = tmp_path / "mine" / "plan-final-softmax-9"
    unfinished.mkdir()
    (unfinished / "log.txt").touch()
    assert run_command("compare", [str(path) for path in (tmp_path / "mine").iterdir()]) == 0
    text = capsys.readouterr().out
    assert f"{unfinished} has not finished" in text
    assert ["sigmoid", "3", "100.2"] in [line.split()[:3] for line in text.splitlines()]


def test_rows_are_compared_like_runs_but_have_no_curves(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    for head, values in NLL.items():
        for seed, value in enumerate(values):
            run = runs.Run({"head": head, "size": 8, "seed": seed}, "plan", "final")
            runs.add(path, run.row({"test/nll": value}))
    assert run_command("compare", [str(path)]) == 0
    assert "* best" in capsys.readouterr().out.splitlines()[1]
    assert run_command("compare", [str(path), "--only", "head=softmax"]) == 0
    assert "best" not in capsys.readouterr().out.splitlines()[1]
    assert run_command("compare", [str(path), "--plot", "x.png"]) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere"],
        ["--metric=test/nl"],
        ["--only", "head=other"],
        ["--plot=x.png", "--tag=a"],
        ["--tag=a"],
    ],
)
def test_mistakes_are_one_line(words, folders, capsys):
    assert run_command("compare", [*folders, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("catnat: ") and error.count("\n") == 1


def test_runs_of_different_environments_are_not_compared(tmp_path, capsys):
    returns = {("CartPole-v1", "softmax"): 500.0, ("CartPole-v1", "natural"): 400.0}
    returns |= {("Breakout", "softmax"): 20.0, ("Breakout", "natural"): 30.0}
    for (env, head), value in returns.items():
        folder = tmp_path / env / head
        folder.mkdir(parents=True)
        model = {"class_path": "a.PPO", "init_args": {"head": head}}
        config = {"seed_everything": 0, "model": model, "data": {"env": env}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "metrics.json").write_text(json.dumps({"test/return": value}))
    folders = [str(path) for path in sorted(tmp_path.glob("*/*"))]
    assert run_command("compare", [*folders, folders[0]]) == 0
    out = capsys.readouterr().out
    best = [line.split()[:3] for line in out.splitlines() if "* best" in line]
    assert sorted(best) == [["Breakout", "natural", "1"], ["CartPole-v1", "softmax", "1"]]
    assert "The runs differ in env" in out
