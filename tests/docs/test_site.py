"""The tools of the site find broken links and requests to other hosts, and read our docstrings."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "tools"))

docstrings = pytest.importorskip("docstrings")
hooks = pytest.importorskip("hooks")
links = pytest.importorskip("links")
import gallery  # noqa: E402


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ('<a href="other.html#there">', None),
        ('<a href="https://example.org/page">', None),  # a reader may follow it
        ('<a href="missing.html">', "missing.html, which is not there"),
        ('<a href="other.html#nowhere">', "which has no such anchor"),
        ('<a href="#nowhere">', "which has no such anchor"),
        ('<img src="gone.png">', "gone.png, which is not there"),
        ('<script src="https://example.org/x.js">', "loads https://example.org/x.js"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "loads //example.org/x.css"),
    ],
)
def test_a_link_to_nowhere_and_a_file_of_another_host_are_problems(tmp_path, link, said):
    (tmp_path / "index.html").write_text(f"<html>{link}</html>")
    (tmp_path / "other.html").write_text('<h1 id="there">')
    found = links.problems(tmp_path)
    assert found == [] if said is None else said in found[0]


def test_docstrings_become_markdown():
    text = docstrings.to_markdown(
        "Maps (*, S) to :class:`~catnat.distributions.HeadCategorical`::\n\n"
        ".. math:: p_k = \\frac1K,\n    \\quad k < K\n\n"
        "with :math:`2^k` terms\n\n"
        ">>> x = [\n...     1]\n>>> x\n[1]\n\nmore",
        "catnat.heads.flat.SoftmaxHead",
    )
    assert r"Maps (\*, S) to" in text
    assert '<autoref identifier="catnat.distributions.HeadCategorical" optional>' in text
    assert "$$\np_k = \\frac1K, \\quad k < K\n$$" in text
    assert "with $2^k$ terms" in text
    assert "```pycon\n>>> x = [\n...     1]\n>>> x\n[1]\n```\n\nmore" in text


def test_formulas_become_mathml_in_which_names_of_functions_stand_apart():
    page = hooks.on_page_content('<span class="arithmatex">\\(a &lt; b\\)</span> and more')
    assert page.startswith("<math") and page.endswith("</math> and more")
    assert "arithmatex" not in page and "&amp;" not in page
    page = hooks.on_page_content('<span class="arithmatex">\\(p \\log q\\)</span>')
    assert '<mo lspace="0.17em" rspace="0.17em">log</mo><mi>q</mi>' in page


def test_notebooks_are_those_of_the_examples():
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("jupytext")
    for script in gallery.scripts():
        path = gallery.OUTPUTS / f"{script.stem}.ipynb"
        if path.is_file():
            committed = [cell["source"] for cell in nbformat.read(path, 4)["cells"]]
            made = [cell["source"] for cell in gallery.notebook(script)["cells"]]
            command = f"python docs/tools/make_pictures.py {script.stem}"
            assert committed == made, f"{script.name} has changed: {command}"


@pytest.mark.parametrize("address", ["", "https://example.org/a/b", "https://github.com/a/b/"])
def test_notebooks_open_in_a_hosted_one_if_the_repository_has_an_address(address, monkeypatch):
    monkeypatch.setenv("CATNAT_REPOSITORY", address)
    hosted = "github" in address
    assert ("Open in a hosted notebook" in gallery.page()) is hosted
    assert ("/a/b/blob/main/docs/gallery/quickstart.ipynb" in gallery.page()) is hosted
