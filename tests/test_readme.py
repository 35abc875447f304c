"""What the README and the site show runs: code in full, commands up to their configuration."""

import re
from pathlib import Path

import cases_docs
import pytest
from cases_fresh import one_server, run_fresh

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def run_pages(what: str) -> str:
    """Run what the README and all pages of the site show, in another process."""
    done = run_fresh(ROOT / "tests" / "cases_docs.py", what, *PAGES)
    assert done.returncode == 0, done.stderr
    return done.stdout


@one_server
def test_every_python_block_of_the_readme_and_the_site_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "natural" in run_pages("blocks")


@one_server
def test_every_command_of_the_readme_and_the_site_is_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_pages("commands")


def test_a_wrong_command_or_block_of_a_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\npython train.py --model vae --head naturl\n```\n")
    with pytest.raises(SystemExit, match="naturl"):
        cases_docs.check_command(*cases_docs.commands(page))
    page.write_text('1. First\n\n    ```python title="a.py"\n    x = 1\n    ```\n')
    assert cases_docs.blocks(page, "python") == [(' title="a.py"', "x = 1\n")]


def test_ci_runs_the_test_command():
    tests = next(block for block in blocks("bash") if "pytest" in block)
    checked = (ROOT / ".ci" / "run").read_text().splitlines()
    for command in re.split(r"\s*&&\s*\\?\n?\s*", tests.strip()):
        assert command in checked
