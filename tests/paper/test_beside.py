"""Our means beside those of the paper's tables."""

import sys
from pathlib import Path

import pytest

from catnat.sweeps import plan

PAPER = Path(__file__).parents[2] / "paper"
sys.path.append(str(PAPER))  # its programs are run from there

import beside  # noqa: E402


@pytest.mark.parametrize("name", beside.TABLES)
def test_the_paper_has_the_cells_of_a_plan(name):
    path = str(PAPER / "plans" / f"{name}.yaml")
    for loaded in (plan.load(path, scale) for scale in plan.scales(path)):
        first = next(iter(loaded.metrics))
        assert all(beside.published(loaded, cell)[first]["mean"] for cell in loaded.cells)


def test_our_means_lie_beside_the_paper_s(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", str(PAPER / "plans" / "vae_adam.yaml")])
    beside.main()
    assert "| 30 | 32 | gray | softmax | NLL | 3 | 100.4 | 99.3 | +1.1 |" in capsys.readouterr().out
