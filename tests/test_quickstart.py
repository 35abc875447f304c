"""The quickstart runs as the README says, and answers bad input with one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from catnat import head_names

ROOT = Path(__file__).resolve().parent.parent


def quickstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_prints_every_head_and_draws(tmp_path):
    out = tmp_path / "quickstart.png"
    done = quickstart("--steps", "3", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert set(head_names()) <= set(listed)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--learning-rate", "-1"), "--learning-rate"),
        (("--steps", "many"), "'many'"),
        (("--out", "no/such/folder/q.png"), "no folder"),
    ],
)
def test_bad_input_gets_one_line(arguments, said):
    done = quickstart(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert said in line
