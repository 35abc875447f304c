"""The suite itself: a file's doctests stand alone, and tests have the same names at any time."""

import gzip
import importlib.util
from pathlib import Path

import pytest
from cases_fresh import one_server, run_fresh

ROOT = Path(__file__).parents[1]


@one_server
def test_the_doctests_of_one_file_pass_alone(monkeypatch):
    monkeypatch.chdir(ROOT)
    code = "import pytest, sys; sys.exit(pytest.main(['-q', '-n0', 'catnat/heads.py']))"
    done = run_fresh("-c", code)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@one_server
@pytest.mark.slow  # four processes with pytest
def test_slow_tests_run_when_they_are_asked_for_or_named(tmp_path, monkeypatch):
    """In a project of two tests with the hooks of ours."""
    hooks = (ROOT / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(hooks)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    tests = "import pytest\n\ndef test_a(): pass\n\n@pytest.mark.slow\ndef test_b(): pass\n"
    (tmp_path / "test_x.py").write_text(tests)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    code = "import pytest, sys; sys.exit(pytest.main(['-v', '-p', 'no:xdist', *sys.argv[1:]]))"
    for words, wanted in (
        ((), {"test_a"}),
        (("-m", "slow"), {"test_b"}),
        (("test_x.py::test_b",), {"test_b"}),
    ):
        done = run_fresh("-c", code, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert {name for name in ("test_a", "test_b") if f"{name} PASSED" in done.stdout} == wanted


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


@pytest.fixture(scope="module")
def shared():
    """Of this file: one worker makes it."""


@one_server
def test_the_group_of_a_mark_stands_in_the_id(request):
    assert_grouped(request, "fresh")


def test_tests_with_a_fixture_of_their_file_are_a_group(request, shared):
    assert_grouped(request, "test_suite")


def assert_grouped(request, name):
    """pytest-xdist goes by the id: tests whose ids have one group run in one worker."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith(f"@{name}")
