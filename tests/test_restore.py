"""Published tables follow from their published runs, and a sweep goes on from them."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from experiments import plan, restore, runs, stages, tables
from experiments.train_interface import ROOT

RESULTS = ROOT / "results"
PUBLISHED = [name for name in plan.names() if (RESULTS / f"{name}_runs.csv").is_file()]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_table_follows_from_its_published_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = restore.published_scale(name, RESULTS)
    words = [name, "--scale", scale, "--runs", str(tmp_path)]
    assert restore.main(words) == 0, capsys.readouterr().err
    assert tables.main([*words, "--out", str(tmp_path)]) == 0
    made, published = (read(folder / f"{name}.csv") for folder in (tmp_path, RESULTS))
    assert len(made) == len(published)
    for ours, theirs in zip(made, published, strict=True):
        assert ours.keys() == theirs.keys()
        for column, value in theirs.items():
            assert same(column, ours, theirs), (column, ours[column], value, theirs)


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def same(column: str, ours: dict[str, str], theirs: dict[str, str]) -> bool:
    """The same text, or numbers that agree as well as those of runs with six digits can."""
    if ours[column] == theirs[column]:
        return True
    one, other = float(ours[column]), float(theirs[column])
    if column in ("p_value", "p_holm"):
        return math.isclose(one, other, rel_tol=0.05, abs_tol=1e-6)
    assert column in ("mean", "std", "difference")
    return abs(one - other) <= 1e-5 * abs(float(theirs["mean"]))


PLAN = """
title: Mine
model: vae
options: {max_steps: 10}
grid: {head: [softmax, natural]}
search: {option: learning_rate, coarse: [0.1, 1], factors: [0.5, 1, 2], metric: val/loss,
         better: lower, seed: 0}
names: {learning_rate: lr}
seeds: [1, 2]
metrics: {test/nll: {label: NLL, better: lower}}
"""


def published(folder: Path, lines: list[str], kind: str = "runs") -> None:
    header = "head,lr,seed,status,val/loss,test/nll"
    (folder / f"mine_{kind}.csv").write_text("\n".join([header, *lines]) + "\n")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(PLAN)
    published(
        tmp_path,
        [
            "softmax,0.1,0,finished,5,",
            "softmax,1,0,finished,4,",
            "softmax,0.5,0,failed,,",
            "softmax,2,0,finished,3,",
            "natural,0.1,0,finished,5,",
        ],
        "search",
    )
    published(tmp_path, ["softmax,2,1,finished,3.5,80.25", "softmax,2,2,missing,,"])
    return path


def test_a_sweep_goes_on_from_published_runs(mine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    words = [str(mine), "--scale", "full", "--runs", str(folder), "--source", str(tmp_path)]
    assert restore.main(words) == 0
    experiment = plan.load(str(mine), "full", folder)
    softmax, natural = experiment.cells()
    found = {run.seed: run for run in stages.final(experiment, softmax)}
    assert runs.metrics(found[1]) == {"val/loss": 3.5, "test/nll": 80.25}
    assert not runs.done(found[2])
    assert stages.selected(experiment, softmax) == [{"learning_rate": 2.0}]
    (failed,) = (run for run in stages.searching(experiment, softmax) if runs.failure(run))
    assert failed.settings == {"learning_rate": 0.5}
    stage = stages.present(experiment, natural)
    assert stage is not None and [run.settings for run in stage.pending] == [{"learning_rate": 1}]


def test_a_run_that_is_there_stays(mine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    experiment = plan.load(str(mine), "full", folder)
    first = stages.coarse(experiment, experiment.cells()[0])[0]
    runs.write_json(first.home / "version_3" / "metrics.json", {"val/loss": 7.0})
    restore.restore(experiment, tmp_path)
    assert runs.metrics(first) == {"val/loss": 7.0}


def test_lines_of_no_run_are_counted(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(tmp_path, ["softmax,3,1,finished,3.5,80.25"])
    words = [str(mine), "--scale", "full", "--runs", str(tmp_path / "r"), "--source", str(tmp_path)]
    assert restore.main(words) == 1
    assert "1 more in the published table, which the plan does not have" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["vae_adma"], "there is no experiment 'vae_adma'"),
        (["vae_adam", "--source", "nowhere"], "there is no table nowhere/vae_adam.md that says"),
        (
            ["vae_adam", "--scale", "smoke", "--source", "nowhere"],
            "no vae_adam_runs.csv in nowhere",
        ),
    ],
)
def test_bad_input_gets_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        restore.main([*words, "--runs", str(tmp_path)])
    assert error.value.code == 2
    text = capsys.readouterr().err
    assert line in text and text.count("\n") == 1
