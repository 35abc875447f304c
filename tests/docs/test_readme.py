"""What the README and the site show runs: code in full, commands up to their configuration."""

import re
from pathlib import Path

import cases_docs
import pytest
from cases import slow
from cases_fresh import one_server, run_fresh

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def run_pages(what, pages):
    """Run what the README and pages of the site show, in another process."""
    done = run_fresh(ROOT / "tests" / "cases_docs.py", what, *pages)
    assert done.returncode == 0, done.stderr
    return done.stdout


@one_server
@pytest.mark.parametrize("pages", [PAGES[:1], slow(PAGES[1:])], ids=["readme", "site"])
def test_every_python_block_of_the_readme_and_the_site_runs(pages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "tensor" in run_pages("blocks", pages)  # some print


@one_server
def test_every_command_of_the_readme_and_the_site_is_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_pages("commands", PAGES)


def test_a_wrong_command_or_block_of_a_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\npython train.py --model vae --head naturl\n```\n")
    with pytest.raises(SystemExit, match="naturl"):
        cases_docs.check_command(*cases_docs.commands(page))
    text = '1. First\n\n    ```python title="a.py"\n    x = 1\n    ```\n'
    assert cases_docs.blocks(text, "python") == [(' title="a.py"', "x = 1\n")]


def test_ci_runs_the_test_command():
    tests = next(block for block in blocks("bash") if "pytest" in block)
    checked = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    for command in re.split(r"\s*&&\s*\\?\n?\s*", tests.strip()):
        assert command in checked
