"""The plans of a user's own project: a program, data, a head and metrics of its own."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import sweep, tables

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "examples" / "own_project"


@pytest.fixture
def project(monkeypatch):
    monkeypatch.chdir(PROJECT)
    return PROJECT / "plans"


def words(plan, folder):
    return [str(plan), "--scale", "smoke", "--runs", str(folder)]


@pytest.mark.slow
def test_a_program_with_data_and_metrics_of_its_own_becomes_a_table(project, tmp_path, capsys):
    assert sweep.main(words(project / "patches.yaml", tmp_path)) == 0, capsys.readouterr().out
    assert tables.main(words(project / "patches.yaml", tmp_path)) == 0
    with (tmp_path / "patches" / "smoke" / "patches.csv").open() as file:
        lines = {(each["head"], each["metric"]): each for each in csv.DictReader(file)}
    assert {head for head, _ in lines} == {"natural", "probit"}
    assert float(lines["probit", "test/nll"]["mean"]) > 0
    assert float(lines["probit", "test/fisher_mass"]["mean"]) == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_a_head_of_one_s_own_in_a_table_of_ours_and_its_samples(project, tmp_path, data, capsys):
    extra = ["--", f"--data.root={data}", "--batch_size=10", "--accelerator=cpu"]
    assert sweep.main([*words(project / "probit.yaml", tmp_path), *extra]) == 0
    assert tables.main(words(project / "probit.yaml", tmp_path)) == 0
    assert "| 10 | 8 | gray | probit |" in capsys.readouterr().out
    figures = [sys.executable, str(ROOT / "experiments" / "figures.py"), "samples"]
    done = subprocess.run(  # a process of its own: the head stays known where it is imported
        [*figures, *words(project / "probit.yaml", tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "probit" / "smoke" / "probit_samples.png").is_file()
