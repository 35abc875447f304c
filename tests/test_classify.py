"""The example that classifies digits: a table with every head, and one figure."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture
def example():
    path = Path(__file__).parents[1] / "examples" / "classify.py"
    spec = importlib.util.spec_from_file_location("classify", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_head_is_trained_and_drawn(example, tmp_path, monkeypatch, capsys):
    argv = ["classify.py", "--steps", "2", "--out", str(tmp_path / "digits.png")]
    monkeypatch.setattr("sys.argv", argv)
    example.main()
    lines = capsys.readouterr().out.splitlines()
    heads = ["softmax", "sparsemax", "sigmoid", "natural", "natural, tail 0.05"]
    assert [line[:20].strip() for line in lines[1:]] == heads
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    assert len((tmp_path / "digits.csv").read_text().splitlines()) == 1 + len(example.RATES) * len(
        heads
    )


def test_a_number_of_seeds_below_1_is_refused_before_the_training(example, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["classify.py", "--seeds", "0"])
    with pytest.raises(SystemExit) as exit_:
        example.main()
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "must be at least 1, got 0" in err
