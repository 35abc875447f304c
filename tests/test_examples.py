"""The scripts of the gallery are short and take the same options. The site's build runs them."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
WRONG = {
    "--out=no/x.png": "--out must be a .png, .pdf or .svg in a folder that exists, got",
    "--out=x.foo": "--out must be a .png, .pdf or .svg in a folder that exists, got",
    "--steps=-1": "--steps must be at least 1, got",
}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_at_most_86_lines_and_says_what_it_shows(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 86
    title = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    assert title.endswith(".") and len(title) <= 100


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_refuses_wrong_options_before_it_begins(script, capsys, tmp_path, monkeypatch):
    if script.name.startswith("jax"):
        pytest.importorskip("jax")
    monkeypatch.chdir(tmp_path)
    for option, said in WRONG.items():
        monkeypatch.setattr(sys, "argv", [script.name, option])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(script), run_name="__main__")
        assert stop.value.code == 2
        assert said in capsys.readouterr().err
