"""The table of gaps: which rate a head gets, and the published file."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import vae_gaps
from experiments.train_interface import ROOT

HEADER = "head,N,K,data,lr,seed,status,val/loss,test/nll\n"


def write(folder: Path, name: str, rows: list[tuple[object, ...]]) -> None:
    lines = [",".join(map(str, ("softmax", 10, 8, "gray", *row))) + "\n" for row in rows]
    (folder / f"{name}_runs.csv").write_text(HEADER + "".join(lines))


def test_a_head_gets_the_rate_with_the_lowest_validation_loss_of_three_seeds(tmp_path):
    """Not the lowest NLL, not a rate with fewer seeds; of two equal runs the first file's."""
    known = [(0.002, s, "finished", 110 + s, 90) for s in (1, 2, 3)]
    write(tmp_path, "vae_adam", known)
    second = [(0.001, s, "finished", 109 + s, 95 + s) for s in (1, 2, 3)]
    few = [(0.0005, 1, "finished", 50, 50), (0.0005, 2, "failed", "", "")]
    write(tmp_path, "vae_second_rate", second + few)
    write(tmp_path, "vae_recipe", [(0.001, s, "finished", 1, 1) for s in (1, 2, 3)])
    (cell,) = vae_gaps.best_cells(tmp_path).values()
    assert (cell.rate, cell.nll) == (0.001, [96, 97, 98])


def test_the_published_gaps_follow_from_the_published_runs(capsys: pytest.CaptureFixture[str]):
    vae_gaps.main()
    assert capsys.readouterr().out == (ROOT / "results" / "vae_gaps.md").read_text()
