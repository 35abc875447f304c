"""The example that learns with masks of actions: four lines, and one figure."""

import importlib.util
from pathlib import Path

import numpy as np
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
    run(example, monkeypatch, "--steps", "600", "--out", str(picture))
    lines = capsys.readouterr().out.splitlines()
    heads = ["softmax, masks", "softmax, no masks", "natural, masks", "natural, no masks"]
    assert [line[:20].strip() for line in lines] == heads
    first = [float(line.split()[-7]) for line in lines]
    assert min(first[0], first[2]) > max(first[1], first[3]), "masks waste no steps"
    assert picture.stat().st_size > 10_000


def test_every_town_has_a_road_and_a_way_to_the_last(example):
    roads = example.road_map()
    assert np.array_equal(roads, roads.T) and not roads.diagonal().any()
    assert roads[np.arange(31), np.arange(1, 32)].all()


def test_no_steps_are_an_error(example, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(example, monkeypatch, "--steps", "0")
    assert exit_.value.code == 2
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err
