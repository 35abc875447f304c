"""Every row of a run names a commit, and every file of timings has a command."""

import csv
import re
from pathlib import Path

import pytest

PAPER = Path(__file__).parents[2] / "paper"
SPEED = sorted(path.name for path in (PAPER / "speed").iterdir() if path.name != "README.md")


@pytest.mark.parametrize(
    "path", sorted(PAPER.rglob("*runs.csv")), ids=lambda path: path.parent.name
)
def test_every_row_names_its_commit(path):
    with path.open(newline="") as file:
        missing = [
            number for number, row in enumerate(csv.DictReader(file), 2) if not row["commit"]
        ]
    assert not missing, f"{path} has rows without a commit, first in line {missing[0]}"


@pytest.mark.parametrize("name", SPEED)
def test_every_file_of_timings_has_a_command_and_a_commit(name):
    (row,) = re.findall(
        rf"^\| `{re.escape(name)}` \| (.*) \| (.*) \|$",
        (PAPER / "speed" / "README.md").read_text(),
        re.MULTILINE,
    )
    command, commit = row
    assert re.search(r"`(python|catnat) \S+", command)
    text = (PAPER / "speed" / name).read_text()
    if commit == "in the file":
        assert re.search(r"\b[0-9a-f]{7}\b", text)
    elif commit == "column `commit`":
        assert all(line["commit"] for line in csv.DictReader(text.splitlines()))
    else:
        assert re.fullmatch(r"before `[0-9a-f]{7}`", commit)
