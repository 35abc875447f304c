"""The gallery: every script of examples/ as a notebook, run, with the picture that it draws."""

import ast
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cache import ROOT, fingerprint, is_fresh

EXAMPLES = ROOT / "examples"
# From the first steps to whole projects; a script that is not named comes last.
ORDER = ("quickstart", "classify", "natural_gradient", "own_graph", "world_model", "masked_ppo")
FAST = ("--steps", "3")  # every script takes --steps and --out
INTRODUCTION = """# Gallery

Each example is one script of at most 86 lines, which takes less than two minutes on two cores and
draws one picture. The pictures on this page were made by the build of the site, which runs every
script as the notebook that you can load here.

"""


def scripts() -> list[Path]:
    """The scripts of the gallery, in teaching order."""
    places = {name: place for place, name in enumerate(ORDER)}
    return sorted(EXAMPLES.glob("*.py"), key=lambda path: (places.get(path.stem, 99), path.stem))


def pages(cache: Path, fast: bool) -> dict[str, str]:
    """The Markdown of the gallery, by name, after all scripts were run where they changed."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda script: run(script, cache / "gallery", fast), scripts()))
    note = "!!! note\n    These pictures are from runs of a few steps, made by a check.\n\n"
    begin = INTRODUCTION + (note if fast else "")
    return {"gallery/index.md": begin + thumbnails() + "\n".join(map(entry, scripts()))}


def thumbnails() -> str:
    """A small picture of each script that leads to its part of the page."""
    shown = [f"[![{x.stem}]({x.stem}.png){{ width=170 }}](#{x.stem})" for x in scripts()]
    return "\n".join(shown) + "\n\n"


def files(cache: Path) -> list[Path]:
    """Pictures, notebooks and scripts of the gallery, in the cache."""
    names = {script.stem for script in scripts()}
    endings = {".png", ".ipynb", ".py"}
    made = sorted((cache / "gallery").iterdir())
    return [path for path in made if path.stem in names and path.suffix in endings]


def entry(script: Path) -> str:
    """Title, picture, explanation and code of one script."""
    text = script.read_text()
    title, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    name = script.stem
    code = "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())
    return (
        f"## {title.rstrip('.')} {{ #{name} }}\n\n![{title}]({name}.png)\n{rest}\n\n"
        f"[Script]({name}.py){{download}} · [Notebook]({name}.ipynb){{download}}\n\n"
        f'??? example "examples/{name}.py"\n\n    ```python\n{code}    ```\n'
    )


def run(script: Path, folder: Path, fast: bool) -> None:
    """Turn a script into a notebook, execute it, and keep both and the picture in the folder."""
    number, stamp = fingerprint(script, str(fast)), folder / f"{script.stem}.stamp"
    if is_fresh(stamp, number):
        return
    import jupytext
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell

    folder.mkdir(parents=True, exist_ok=True)
    notebook = jupytext.read(script)
    arguments = [script.name, "--out", f"{script.stem}.png", *(FAST if fast else ())]
    setting = f"import sys\n\nsys.argv = {arguments!r}  # the words of a command line"
    notebook.cells.insert(0, new_code_cell(setting))
    picture = folder / f"{script.stem}.png"
    picture.unlink(missing_ok=True)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],  # it would warn that it listens without encryption
    ).execute()
    if not picture.is_file():
        raise FileNotFoundError(f"{script.name} drew no picture {picture.name}")
    jupytext.write(notebook, folder / f"{script.stem}.ipynb")
    shutil.copy(script, folder)
    stamp.write_text(number)
