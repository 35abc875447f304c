"""The scripts of the gallery take the same options; two of them run here.

A scheduled job runs all.
"""

import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
WRONG = {
    "--out=no/x.png": "--out must be a .png, .pdf or .svg in a folder that exists, got",
    "--out=x.foo": "--out must be a .png, .pdf or .svg in a folder that exists, got",
    "--steps=-1": "--steps must be at least 1, got",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script with options, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def run(script, *options):
        monkeypatch.setattr(sys, "argv", [script.name, *options])
        return runpy.run_path(str(script), run_name="__main__")

    return run


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_refuses_wrong_options_before_it_begins(script, run, capsys):
    if script.name.startswith("jax"):
        pytest.importorskip("jax")
    for option, said in WRONG.items():
        with pytest.raises(SystemExit) as stop:
            run(script, option)
        assert stop.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_digits_are_classified_with_every_head(run, capsys):
    names = run(FOLDER / "classify.py", "--steps=2", "--out=digits.png")
    lines = capsys.readouterr().out.splitlines()
    heads = ["softmax", "sparsemax", "sigmoid", "natural", "natural, tail 0.05"]
    assert [line[:20].strip() for line in lines[1:]] == heads
    assert Path("digits.png").stat().st_size > 10_000
    rows = Path("digits.csv").read_text().splitlines()
    assert len(rows) == 1 + len(names["RATES"]) * len(heads)


def test_both_heads_learn_roads_with_and_without_masks(run, capsys):
    run(FOLDER / "masked_ppo.py", "--steps=512", "--out=roads.png")
    lines = capsys.readouterr().out.splitlines()
    heads = ["softmax, masks", "softmax, no masks", "natural, masks", "natural, no masks"]
    assert [line[:20].strip() for line in lines] == heads
    first = [float(line.split()[-7]) for line in lines]
    assert min(first[0], first[2]) > max(first[1], first[3]), "masks waste no steps"
    assert Path("roads.png").stat().st_size > 10_000
