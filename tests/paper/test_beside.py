"""Our means beside those of the paper's tables."""

import math
import sys
from pathlib import Path

import pytest

from catnat.sweeps import plan_file

PAPER = Path(__file__).parents[2] / "paper"
sys.path.append(str(PAPER))  # its programs are run from there

import beside  # noqa: E402


@pytest.mark.parametrize("name", beside.TABLES)
def test_the_paper_has_the_cells_of_a_plan(name):
    path = str(PAPER / "plans" / f"{name}.yaml")
    for loaded in (plan_file.load(path, scale) for scale in plan_file.scales(path)):
        first = next(iter(loaded.metrics))
        assert all(beside.published(loaded, cell)[first]["mean"] for cell in loaded.cells)


def test_our_means_lie_beside_the_paper_s(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", str(PAPER / "plans" / "vae_adam.yaml")])
    beside.main()
    assert "| 30 | 32 | gray | softmax | NLL | 3 | 100.4 | 99.3 | +1.1 |" in capsys.readouterr().out


def test_the_paper_s_elbo_of_the_mlp_vae_is_the_true_one():
    loaded = plan_file.load(str(PAPER / "plans" / "mlp_vae.yaml"))
    cell = next(cell for cell in loaded.cells if cell["num_latents"] == 20)
    row = beside.published(loaded, cell)
    left_out = 20 * math.log(cell["num_categories"]) * 127 / 128
    assert row["test/elbo"]["mean"] == pytest.approx(row["test/elbo_table"]["mean"] - left_out)
