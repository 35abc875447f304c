"""The gallery: every script of examples/, with its picture and its output.

``python docs/tools/make_pictures.py`` makes pictures, lines and notebooks in docs/gallery.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = ROOT / "docs" / "gallery"
# From the first steps to larger ones; a script that is not named comes last.
ORDER = ("quickstart", "classify", "natural_gradient", "own_graph", "world_model", "masked_ppo")
INTRODUCTION = """# Gallery

Each example is one script that draws one picture in less than two minutes on two cores. Each
script is also available as a notebook.

"""


def scripts() -> list[Path]:
    """The scripts of the gallery, in teaching order."""
    places = {name: place for place, name in enumerate(ORDER)}
    examples = (ROOT / "examples").glob("*.py")
    return sorted(examples, key=lambda path: (places.get(path.stem, 99), path.stem))


def page() -> str:
    """The Markdown of the gallery."""
    names = [script.stem for script in scripts() if (OUTPUTS / f"{script.stem}.png").is_file()]
    thumbnails = [f"[![{name}]({name}.png){{ width=170 }}](#{name})" for name in names]
    return INTRODUCTION + "\n".join(thumbnails) + "\n\n" + "\n".join(map(entry, scripts()))


def entry(script: Path) -> str:
    """Title, picture, explanation, printed lines and code of one script."""
    name = script.stem
    text = script.read_text()
    title, _, explanation = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    parts = [f"## {title.rstrip('.')} {{ #{name} }}"]
    if (OUTPUTS / f"{name}.png").is_file():
        parts.append(f"![{title}]({name}.png)")
    buttons = [f"[Script]({name}.py){{download}}"]
    if (OUTPUTS / f"{name}.ipynb").is_file():
        buttons.append(f"[Notebook]({name}.ipynb){{download}}")
        if address := hosted(name):
            buttons.append(f"[Open in a hosted notebook]({address}){{ .md-button }}")
    parts += [explanation.strip(), " · ".join(buttons)]
    parts.append(f'??? example "examples/{name}.py"\n\n{_indented(text, "python")}')
    lines = OUTPUTS / f"{name}.txt"
    if lines.is_file():
        printed = _indented(lines.read_text(), "text")
        parts.append(f'??? example "What it prints"\n\n{printed}')
    return "\n\n".join(parts) + "\n"


def _indented(text: str, language: str) -> str:
    fenced = f"```{language}\n{text.rstrip()}\n```"
    return "".join(f"    {line}\n" if line else "\n" for line in fenced.splitlines())


def hosted(name: str) -> str | None:
    """The address that opens a notebook, if the repository has one (CATNAT_REPOSITORY)."""
    repository = os.environ.get("CATNAT_REPOSITORY", "").rstrip("/")
    _, host, path = repository.partition("github.com/")
    if not host:
        return None
    notebook_path = f"{path}/blob/main/docs/gallery/{name}.ipynb"
    return f"https://colab.research.google.com/github/{notebook_path}"


def notebook(script: Path) -> Any:
    """A script as a notebook that was not executed."""
    import jupytext
    from nbformat.v4 import new_code_cell

    cells = jupytext.read(script)
    extra = "train,jax" if script.stem.startswith("jax") else "train"
    install = f'%pip install -q "catnat[{extra}]"'
    arguments = [script.name, "--out", f"{script.stem}.png"]
    options = f"import sys\n\nsys.argv = {arguments!r}  # the words of a command line"
    cells.cells[:0] = [new_code_cell(install), new_code_cell(options)]
    for place, cell in enumerate(cells.cells):
        cell["id"] = f"{script.stem}-{place}"  # the same each time
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells.metadata = {"kernelspec": kernel}
    return cells


def write_notebook(script: Path) -> None:
    """Write docs/gallery/NAME.ipynb."""
    import nbformat

    nbformat.write(notebook(script), OUTPUTS / f"{script.stem}.ipynb")
