"""The suite itself: the doctests of a file stand alone."""

from pathlib import Path

from cases_fresh import one_server, run_fresh

ROOT = Path(__file__).parents[1]


@one_server
def test_the_doctests_of_one_file_pass_alone(monkeypatch):
    monkeypatch.chdir(ROOT)
    code = "import pytest, sys; sys.exit(pytest.main(['-q', '-n0', 'catnat/head.py']))"
    done = run_fresh("-c", code)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
