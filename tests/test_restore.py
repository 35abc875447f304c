"""Published tables follow from their published runs, and a sweep goes on from them."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest
from cases import slow

from experiments import plan, restore, runs, stages, tables
from experiments.train_interface import ROOT

RESULTS = ROOT / "results"
PUBLISHED = [name for name in plan.names() if (RESULTS / f"{name}_runs.csv").is_file()]
LARGE = ("gsl", "vae_adam", "vae_sgd")  # hundreds of runs each
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.parametrize("name", [slow(name) if name in LARGE else name for name in PUBLISHED])
def test_a_published_table_follows_from_its_published_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, "--runs", str(tmp_path)]
    assert restore.main(words) == 0, capsys.readouterr().err
    scale = restore.published_scale(name, RESULTS)
    assert tables.main([*words, "--scale", scale, "--out", str(tmp_path)]) == 0
    made, published = (read(folder / f"{name}.csv") for folder in (tmp_path, RESULTS))
    for ours, theirs in zip(made, published, strict=True):
        assert ours.keys() == theirs.keys()
        for column, value in theirs.items():
            assert same(column, ours, theirs), (column, ours[column], value, theirs)
    for suffix, sign in ((".md", "|"), (".tex", "&")):
        made_lines, published_lines = (
            [line for line in (folder / f"{name}{suffix}").read_text().splitlines() if sign in line]
            for folder in (tmp_path, RESULTS)
        )
        for one, other in zip(made_lines, published_lines, strict=True):
            assert reads_the_same(one, other), (one, other)


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


def reads_the_same(one: str, other: str) -> bool:
    """The same line, but for one unit in the last digit of a number."""
    if NUMBER.sub("", one) != NUMBER.sub("", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(
        abs(float(a) - float(b)) < 1.01 * 10.0 ** -len(a.partition(".")[2]) for a, b in pairs
    )


def test_a_changed_number_is_noticed() -> None:
    assert reads_the_same("| 0.25 | 11.006 ± 0.558 |", "| 0.25 | 11.007 ± 0.558 |")
    for other in (
        "| 0.25 | 11.008 ± 0.558 |",
        "| 0.27 | 11.006 ± 0.558 |",
        "| 0.25 | **11.006** |",
    ):
        assert not reads_the_same("| 0.25 | 11.006 ± 0.558 |", other)


PLAN = """
title: Mine
model: vae
options: {max_steps: 10}
grid: {head: [softmax, natural]}
search: {option: learning_rate, coarse: [0.1, 1], factors: [0.5, 1, 2], metric: val/loss,
         better: lower, seed: 0, confirm: true}
names: {learning_rate: lr}
seeds: [1, 2]
metrics: {test/nll: {label: NLL, better: lower}}
"""
HEADER = "head,lr,seed,status,val/loss,test/nll"
SEARCH = """softmax,0.1,0,finished,5,9
softmax,1,0,finished,4,9
softmax,0.5,0,failed,,
softmax,2,0,finished,3,9
natural,0.1,0,finished,5,9
"""


class Mine:
    """A plan and its published table."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plan, self.runs = folder, folder / "mine.yaml", folder / "runs"
        self.plan.write_text(PLAN)
        (folder / "mine.md").write_text("- Scale: `full` of `mine.yaml`\n- Made by: `a b`; `c`\n")
        self.publish("search", SEARCH)
        self.publish("runs", "softmax,2,1,finished,2.5,80.25\nsoftmax,2,2,missing,,\n")

    def publish(self, kind: str, lines: str, header: str = HEADER) -> None:
        (self.folder / f"mine_{kind}.csv").write_text(f"{header}\n{lines}")

    def restore(self) -> int:
        where = ["--runs", str(self.runs), "--source", str(self.folder)]
        return restore.main([str(self.plan), *where])

    def experiment(self) -> plan.Experiment:
        return plan.load(str(self.plan), "full", self.runs)


@pytest.fixture
def mine(tmp_path: Path) -> Mine:
    return Mine(tmp_path)


def test_a_sweep_goes_on_from_published_runs(mine: Mine) -> None:
    assert mine.restore() == 0
    experiment = mine.experiment()
    softmax, natural = experiment.cells()
    found = {run.seed: run for run in stages.final(experiment, softmax)}
    assert runs.metrics(found[1]) == {"val/loss": 2.5, "test/nll": 80.25}
    assert not runs.done(found[2])
    assert stages.selected(experiment, softmax) == [{"learning_rate": 2.0}]
    (failed,) = (run for run in stages.searching(experiment, softmax) if runs.failure(run))
    assert failed.settings == {"learning_rate": 0.5}
    stage = stages.present(experiment, natural)
    assert stage is not None and [run.settings for run in stage.pending] == [{"learning_rate": 1}]
    assert (experiment.folder / "commands.txt").read_text() == "a b\nc\n"


def test_settings_that_gave_way_are_made_again_every_time(mine: Mine) -> None:
    mine.publish("runs", "softmax,1,1,finished,1,8\nsoftmax,1,2,finished,1,8\n")
    worse = "softmax,2,1,finished,9,8\nsoftmax,2,2,finished,9,8\n"
    mine.publish("all_rates", worse.replace(",finished", ""), HEADER.replace(",status", ""))
    assert mine.restore() == 0 and mine.restore() == 0
    experiment = mine.experiment()
    assert stages.selected(experiment, experiment.cells()[0]) == [{"learning_rate": 1}]


def test_not_a_number_stays_that(mine: Mine) -> None:
    mine.publish(
        "search", SEARCH.replace("softmax,0.1,0,finished,5,9", "softmax,0.1,0,finished,nan,9")
    )
    mine.publish("runs", "softmax,2,1,finished,nan,nan\n")
    assert mine.restore() == 0
    experiment = mine.experiment()
    final = stages.final(experiment, experiment.cells()[0])[0]
    numbers = runs.metrics(final)
    assert numbers is not None and all(map(math.isnan, numbers.values())) and len(numbers) == 2
    (line,) = tables._runs(experiment, [final])
    assert (line["status"], line["test/nll"]) == ("finished", "nan")


def test_runs_that_have_begun_stay(mine: Mine, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = mine.experiment()
    first, second = stages.coarse(experiment, experiment.cells()[0])
    runs.write_json(first.home / "version_3" / "metrics.json", {"val/loss": 7.0})
    half = second.home / "version_0" / "metrics.json"
    half.parent.mkdir(parents=True)
    half.write_text('{"val/loss": 1')
    mine.restore()
    assert runs.metrics(first) == {"val/loss": 7.0}
    assert half.read_text() == '{"val/loss": 1'
    assert "1 run that had begun here left alone" in capsys.readouterr().out


def test_lines_of_no_run_are_named(mine: Mine, capsys: pytest.CaptureFixture[str]) -> None:
    mine.publish("runs", "softmax,3,1,finished,3.5,80.25\n")
    assert mine.restore() == 1
    text = capsys.readouterr().err
    assert "1 of its lines belong to no run of the plan" in text and "_runs.csv, line 2" in text


@pytest.mark.parametrize(
    ("kind", "lines", "header", "message"),
    [
        ("runs", "", "", "mine_runs.csv: no column seed; it has none"),
        ("runs", "softmax,2,1,finished,3", HEADER, "line 2: 6 values expected, got 5"),
        ("runs", "softmax,2,1,done,3,4", HEADER, "unknown status 'done'; choices: finished,"),
        ("runs", "softmax,2,1,finished,3,x", HEADER, "line 2: expected a number, got 'x'"),
        ("runs", "softmax,2,1,finished,,", HEADER, "line 2: finished, but without any number"),
        ("runs", "", HEADER.replace("head", "heads"), "mine_runs.csv: no column head"),
        ("runs", "", HEADER.replace("test/nll", "nll"), "mine_runs.csv: no column test/nll"),
        ("search", "", HEADER.replace("val/loss", "loss"), "_search.csv: no column val/loss"),
        ("runs", "", HEADER.replace(",", ";"), "mine_runs.csv: no column seed"),
    ],
)
def test_a_damaged_file_gets_one_line(
    mine: Mine,
    kind: str,
    lines: str,
    header: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine.publish(kind, lines, header)
    with pytest.raises(SystemExit) as error:
        mine.restore()
    assert error.value.code == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1
    assert not mine.runs.exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["vae_adma"], "there is no experiment 'vae_adma'"),
        (["vae_adam", "--source", "nowhere"], "vae_adam has no published runs: there is no "),
        (["all", "--source", "nowhere"], "--source nowhere: there is no published table"),
        (["ppo_tail", "--runs", "/dev/null/x"], "/dev/null/x/ppo_tail/small"),
    ],
)
def test_bad_input_gets_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        restore.main(["--runs", str(tmp_path), *words])
    assert error.value.code == 2
    text = capsys.readouterr().err
    assert line in text and text.count("\n") == 1


def test_a_search_that_was_not_published_is_missed(
    mine: Mine, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine.folder / "mine_search.csv").unlink()
    with pytest.raises(SystemExit):
        mine.restore()
    assert "mine_search.csv" in capsys.readouterr().err
