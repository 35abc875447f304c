"""The scripts of the gallery are short and take the same options. The site's build runs them."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_at_most_86_lines_and_says_what_it_shows(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 86
    title = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    assert title.endswith(".") and len(title) <= 100


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_takes_a_picture_file_and_a_number_of_steps(script):
    options = {
        node.args[0].value
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    }
    assert {"--out", "--steps"} <= options


@pytest.mark.parametrize("name", ["no/x.png", "x.foo"])
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_refuses_a_bad_picture_file_before_it_begins(script, name, capsys, tmp_path):
    if script.name.startswith("jax"):
        pytest.importorskip("jax")
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.name, "--out", str(tmp_path / name)])
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 2
    expected = "--out must be a .png, .pdf or .svg in a folder that exists, got"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_takes_at_least_one_step(script, capsys, tmp_path):
    if script.name.startswith("jax"):
        pytest.importorskip("jax")
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.name, "--steps=-1", "--out", str(tmp_path / "x.png")])
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 2
    assert "--steps must be at least 1, got -1" in capsys.readouterr().err
