"""The scripts of the gallery are short and take the same options. The site's build runs them."""

import ast
import runpy
import sys
from pathlib import Path

import pytest
import torch

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


def test_the_exact_elbo_is_the_mean_of_many_sampled_ones():
    kind = runpy.run_path(str(EXAMPLES[0].parent / "mechanism" / "small_vae.py"))["SmallVAE"]
    torch.manual_seed(0)
    model, images = kind("sigmoid", num_latents=2, num_categories=3), torch.rand(4, 1, 28, 28)
    assert model.codes.shape == (9, 2, 3)
    with torch.no_grad():
        for each in model.decoder.parameters():
            each *= 5  # latents matter
        q = model(images)
        exact, model.exact = model.loss(images, q), False
        sampled = torch.stack([model.loss(images, q) for _ in range(400)])
    error = float(sampled.std()) / 400**0.5
    assert float(exact) == pytest.approx(float(sampled.mean()), abs=4 * error)
    assert sampled.std() > 1
