"""The suite itself: a file's doctests stand alone, and tests have the same names at any time."""

import gzip
import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_doctests_of_one_file_pass_alone():
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "catnat/heads.py"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_parameters_do_not_depend_on_the_time_of_collection(monkeypatch):
    """pytest-xdist compares them between workers, which collect one after the other."""

    def parameters():
        spec = importlib.util.spec_from_file_location("again", ROOT / "tests" / "test_mnist.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tests = (each for name, each in vars(module).items() if name.startswith("test_"))
        return [
            str(mark.args)
            for test in tests
            for mark in getattr(test, "pytestmark", ())
            if mark.name == "parametrize" and "content" in mark.args[0]
        ]

    now = parameters()
    monkeypatch.setattr(gzip.time, "time", lambda: 1e9)
    assert now and parameters() == now
