"""The plans of a user's own project: a program, data, a head and metrics of its own."""

from pathlib import Path

import pytest
from cases_sweep import run_command

from catnat.sweeps import runs

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples" / "own_project"


@pytest.fixture
def project(monkeypatch):
    monkeypatch.chdir(PROJECT)
    return PROJECT / "plans"


def words(plan, folder):
    return [str(plan), "--scale", "smoke", "--runs", str(folder)]


@pytest.mark.slow
def test_a_program_with_data_and_metrics_of_its_own_becomes_a_table(project, tmp_path, capsys):
    assert run_command("sweep", words(project / "patches.yaml", tmp_path)) == 0, (
        capsys.readouterr().out
    )
    assert run_command("tables", words(project / "patches.yaml", tmp_path)) == 0
    rows = {row["head"]: row for row in runs.read(tmp_path / "results/patches/runs.csv")}
    assert set(rows) == {"natural", "probit"}
    assert rows["probit"]["test/nll"] > 0
    assert rows["probit"]["test/fisher_mass"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_a_head_of_one_s_own_in_a_table_of_ours(project, tmp_path, data, capsys):
    extra = ["--", f"--data.root={data}", "--batch_size=10", "--accelerator=cpu"]
    assert run_command("sweep", [*words(project / "probit.yaml", tmp_path), *extra]) == 0
    assert run_command("tables", words(project / "probit.yaml", tmp_path)) == 0
    assert "| 10 | 8 | gray | probit |" in capsys.readouterr().out
