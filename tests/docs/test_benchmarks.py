"""The command that records the benchmarks of a release."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def record():
    spec = importlib.util.spec_from_file_location("record", BENCHMARKS / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_benchmark_exists_and_has_its_options(record, device):
    for program, *options in record.commands(device, "data"):
        text = (BENCHMARKS / program).read_text()
        assert all(f'"{word}"' in text for word in options if word.startswith("--")), program


def test_a_record_has_each_table_and_the_errors(record, tmp_path, monkeypatch, capsys):
    def run(words, **options):
        if words[0] != sys.executable:
            return subprocess.CompletedProcess(words, 0, "abc1234\n", "")
        failed = words[3].endswith("bench_gsl.py")
        return subprocess.CompletedProcess(words, int(failed), f"table of {words[3]}", "no graph")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["record.py", "--folder", str(tmp_path)])
    assert record.main() == 1
    (path,) = tmp_path.glob("*_cpu.txt")
    text = path.read_text()
    assert "commit abc1234" in text and "exit code 1: no graph" in text
    assert all(f"table of {BENCHMARKS / words[0]}" in text for words in record.commands("cpu", ""))
    assert str(path) in capsys.readouterr().out
