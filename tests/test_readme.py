"""The README's commands are the ones that are checked, and its code runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def _path_with_checkout() -> str:
    """Where Python looks for modules, for a checkout that is not installed."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def test_every_python_block_runs_on_its_own(tmp_path):
    code = "\n".join(f"exec({block!r}, {{}})" for block in blocks("python"))
    command = [sys.executable, "-c", code]  # another process, because a block registers a head
    env = os.environ | {"PYTHONPATH": _path_with_checkout()}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "natural" in done.stdout


def test_ci_runs_the_test_command():
    tests = next(block for block in blocks("bash") if "pytest" in block)
    checked = (ROOT / ".ci" / "run").read_text().splitlines()
    for command in re.split(r"\s*&&\s*\\?\n?\s*", tests.strip()):
        assert command in checked
