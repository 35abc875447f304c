"""What the build of the site does beyond its Markdown: formulas, pictures, examples, link check."""

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent.parent
CACHE = ROOT / ".cache" / "docs"  # pictures and notebooks, made again when their source changes
sys.path[:0] = [str(TOOLS), str(ROOT)]

import gallery  # noqa: E402
import links  # noqa: E402
import pictures  # noqa: E402

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^):#]+)(#[^)]*)?\)")  # to a file
_FUNCTION = re.compile("<mi>(log|exp|sin|cos)</mi>")  # browsers put no space around these
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add pages and pictures that lie elsewhere, or are made here."""
    for name, text in {
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "paper/README.md": _in_site(ROOT / "paper" / "README.md"),
        **gallery.pages(CACHE, fast=bool(config.extra["fast"])),
    }.items():
        files.append(File.generated(config, name, content=text))
    made = [*pictures.draw(CACHE / "pictures"), *gallery.files(CACHE)]
    places = {path: path.relative_to(CACHE) for path in made}
    studies = [path for path in sorted((ROOT / "paper").glob("[!_.]*/*")) if path.is_file()]
    places |= {path: path.relative_to(ROOT) for path in studies if path.suffix != ".md"}
    reached = InclusionLevel.NOT_IN_NAV  # by links of other pages
    for path, place in places.items():
        files.append(File.generated(config, str(place), abs_src_path=str(path), inclusion=reached))
    for path in studies:
        if path.suffix == ".md":
            name = str(path.relative_to(ROOT))
            files.append(File.generated(config, name, content=_in_site(path), inclusion=reached))
    return files


def _in_site(page: Path) -> str:
    """A page of paper/, with links that stay in the site; others become plain text."""

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if target == ROOT / "paper" / "README.md":
            return f"[{found[1]}](../results.md)"
        if target.is_relative_to(ROOT / "docs"):
            up = "../" * len(page.parent.relative_to(ROOT).parts)
            return f"[{found[1]}]({up}{target.relative_to(ROOT / 'docs')}{found[3] or ''})"
        inside = target.is_relative_to(ROOT / "paper") and target.is_file()
        return found[0] if inside else found[1]

    return _LINK.sub(link, page.read_text())


def on_page_content(content: str, **_: Any) -> str:
    """Make MathML of formulas, which browsers draw without a script."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    formula = convert(html.unescape(found[2]).strip(), display=display)
    return _FUNCTION.sub(r'<mo lspace="0.17em" rspace="0.17em">\1</mo>', formula)


def on_post_build(config: Any) -> None:
    """Fail if a link leads nowhere."""
    found = links.problems(Path(config.site_dir))
    if found:
        raise PluginError("\n".join(found))
