"""The example that learns with masks of actions: four lines, and one figure."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture
def example():
    path = Path(__file__).parents[1] / "examples" / "masked_ppo.py"
    spec = importlib.util.spec_from_file_location("masked_ppo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(example, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["masked_ppo.py", *arguments])
    monkeypatch.setattr(example.torch, "set_num_threads", lambda count: None)
    example.main()


def test_both_heads_learn_with_and_without_masks(example, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "roads.png"
    run(example, monkeypatch, "--steps", "512", "--out", str(picture))
    lines = capsys.readouterr().out.splitlines()
    heads = ["softmax, masks", "softmax, no masks", "natural, masks", "natural, no masks"]
    assert [line[:20].strip() for line in lines] == heads
    first = [float(line.split()[-7]) for line in lines]
    assert min(first[0], first[2]) > max(first[1], first[3]), "masks waste no steps"
    assert picture.stat().st_size > 10_000
