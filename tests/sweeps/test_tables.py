"""Tables, tests and figures from rows."""

import math

import pytest
import scipy.stats
from cases_sweep import ROOT, arguments, run_command, write_plan
from torch.utils.tensorboard import SummaryWriter

from catnat.sweeps import figures, plan_file, runs, significance, tables
from catnat.sweeps.defaults import Rows

HEADS = ("softmax", "sigmoid", "natural")
NLL = {
    "softmax": [104.0, 105.0, 104.5],
    "sigmoid": [100.0, 100.4, 100.2],
    "natural": [100.1, 100.5, 100.6],
}


@pytest.fixture
def path(tmp_path):
    """A plan with rows: three heads, two sizes of which one has no rows."""
    keys = {"grid": {"size": [8, 16], "head": list(HEADS)}, "seeds": [1, 2, 3]}
    path = write_plan(tmp_path, **keys, names={"size": "K"}, options={"x": 1})
    loaded = plan_file.load(str(path))
    rows = []
    for head, values in NLL.items():
        for seed, value in enumerate(values, 1):
            run = loaded.run({"size": 8, "head": head}, {}, seed, "final")
            rows.append(run.row({"test/nll": value, "test/collapsed": float(seed == 3)}))
    for row in rows:
        runs.add(tmp_path / "results" / "tiny" / "runs.csv", row)
    return path


def table(path, capsys, *more):
    assert run_command("tables", arguments(path, *more)) == 0
    return capsys.readouterr().out


def test_a_table_has_means_spreads_bold_and_notes(path, capsys):
    text = table(path, capsys)
    assert "| 8 | sigmoid | **100.200 ± 0.200** |" in text
    assert "| 8 | natural | **100.400 ± 0.265** |" in text
    assert "| 16 | natural | — |" in text
    assert "| 8 | softmax | 104.500 ± 0.500 |  | 3 | 1 collapsed |" in text
    assert "0 of 3" in text


def test_published_numbers_come_from_rows(capsys, monkeypatch):
    monkeypatch.chdir(ROOT / "paper")
    assert run_command("tables", ["plans/vae_adam.yaml", "--scale", "all"]) == 0
    text = capsys.readouterr().out
    assert text.count("## ") >= 4  # the scales that have rows
    assert "| 10 | 8 | gray | natural | **99.8 ± 0.4** |" in text
    assert "| 30 | 32 | gray | softmax | 100.4 ± 0.4 | 0.002 | 3 |" in text


def test_values_may_be_lists_null_and_words(tmp_path, capsys):
    path = write_plan(tmp_path, grid={"K": [[1, 2], None]})
    assert "| [1, 2] | — |" in table(path, capsys) and "| None | — |" in table(path, capsys)
    for values in ([[8, 8], [16], [4]], [0.1, None, 0.3], ["b", "c", "d"], [1, 2, 3]):
        path = write_plan(tmp_path, grid={"x": [1]}, search={"grid": {"y": values}}, seeds=[1])
        loaded = plan_file.load(str(path))
        rows = [run.row({"val/loss": 1.0}) for run in loaded.runs(Rows())]
        (cell,) = tables.cells_of(loaded, Rows(rows))
        assert cell.notes == (["y at the edge of the search"] if values == [1, 2, 3] else [])


def test_a_damaged_file_of_rows_is_one_line_with_its_place(path, capsys, tmp_path):
    file = tmp_path / "results" / "tiny" / "runs.csv"
    file.write_text(file.read_text().replace("104.5", "x"))
    assert run_command("tables", arguments(path)) == 2
    assert "runs.csv, line 4" in capsys.readouterr().err


# -- significance ----------------------------------------------------------------------------------


def test_welch_and_its_interval_are_scipy_s():
    a, b = [1.0, 2.0, 4.0], [2.0, 5.0, 9.0, 1.0]
    expected = scipy.stats.ttest_ind(a, b, equal_var=False)
    p_values = significance.against_best([a, b, [5.0]], "lower")
    assert p_values[:2] == [significance.BEST, pytest.approx(expected.pvalue)]
    assert math.isnan(p_values[2])
    low, high = significance.interval(a, b)
    assert low < -23 / 12 < high


def test_holm_multiplies_by_the_number_of_tests_that_are_left():
    assert significance.bold([0.01, math.nan, 0.04, 0.03]) == [False, False, True, True]
    assert significance.bold([0.01, 0.04, 0.02]) == [False, False, False]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([[1.0, 1.1, 0.9], [5.0, 5.1, 4.9], [1.05, 1.15, 0.95]], [True, False, True]),
        ([[1.0, 1.1, 0.9], [1.0, 50.0, 99.0]], [True, True]),
        ([[0.1] * 3, [0.1] * 24, [0.3] * 3], [True, True, False]),  # constants
        ([[1.0, math.nan], [2.0, 2.1]], [False, True]),
        ([[1.0, 2.0], []], [False, False]),  # nothing to compare with
        ([[1.0], [2.0]], [True, False]),
    ],
)
def test_bold_is_the_best_and_what_is_not_significantly_different(samples, expected):
    assert significance.bold(significance.against_best(samples, "lower")) == expected


# -- figures ---------------------------------------------------------------------------------------


def test_curves_come_from_event_files_of_runs(path, tmp_path, capsys):
    words = [*arguments(path), "--out", str(tmp_path / "f")]
    assert run_command("figures", words) == 2
    assert "no run has curves of val/elbo" in capsys.readouterr().err
    loaded = plan_file.load(str(path))
    run = loaded.run({"size": 8, "head": "natural"}, {}, 1, "final")
    with SummaryWriter(str(tmp_path / "runs" / "tiny" / run.name() / "version_0")) as writer:
        for step in range(4):
            writer.add_scalar("val/elbo", -step, step)
    steps, values = figures.read_curve(tmp_path / "runs" / "tiny" / run.name(), "val/elbo")
    assert steps.tolist() == [0, 1, 2, 3] and values.tolist() == [0, -1, -2, -3]
    assert run_command("figures", words) == 0
    assert run_command("figures", [*words, "--only", "seed=2"]) == 2
