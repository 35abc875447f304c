"""What the build of the site does beyond its Markdown: formulas, pictures, examples, link check."""

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent.parent
CACHE = ROOT / ".cache" / "docs"  # pictures and notebooks, made again when their source changes
sys.path[:0] = [str(TOOLS), str(ROOT)]

import gallery  # noqa: E402
import links  # noqa: E402
import pictures  # noqa: E402
import tag_pages  # noqa: E402

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add pages and pictures that lie elsewhere, or are made here."""
    for name, text in {
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "results/results.md": (ROOT / "results" / "README.md").read_text(),
        "tags.md": tag_pages.page(),
        **gallery.pages(CACHE, fast=bool(config.extra["fast"])),
    }.items():
        files.append(File.generated(config, name, content=text))
    made = [*pictures.draw(CACHE / "pictures"), *gallery.files(CACHE)]
    places = {path: path.relative_to(CACHE) for path in made}
    places |= {path: path.relative_to(ROOT) for path in (ROOT / "results").glob("*.png")}
    for path, place in places.items():
        files.append(File.generated(config, str(place), abs_src_path=str(path)))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Make MathML of formulas, which browsers draw without a script."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return convert(html.unescape(found[2]).strip(), display=display)


def on_post_build(config: Any) -> None:
    """Fail if a link leads nowhere."""
    found = links.problems(Path(config.site_dir))
    if found:
        raise PluginError("\n".join(found))
