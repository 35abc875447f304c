"""The scripts of the gallery are short and take the same options. The site's build runs them."""

import ast
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_at_most_80_lines_and_says_what_it_shows(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 80
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
