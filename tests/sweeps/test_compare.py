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


def test_rows_are_compared_like_runs_but_have_no_curves(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    for head, values in NLL.items():
        for seed, value in enumerate(values):
            run = runs.Run({"head": head, "size": 8, "seed": seed}, "plan", "final")
            runs.add(path, runs.make_row(run, {"test/nll": value}))
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
