"""What the build of the site adds to its Markdown: pages from elsewhere, formulas, link check."""

import html
import re
import struct
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent.parent
sys.path.insert(0, str(TOOLS))

import gallery  # noqa: E402
import links  # noqa: E402

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^):#]+)(#[^)]*)?\)")  # to a file
_FUNCTION = re.compile("<mi>(log|exp|sin|cos)</mi>")  # browsers put no space around these
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
_IMAGE = re.compile(r'<img ([^>]*?)src="([^":]+\.png)"([^>]*)>')


def on_files(files: Files, config: Any) -> Files:
    """Add pages and files that are outside of docs/."""
    linked = InclusionLevel.NOT_IN_NAV  # other pages link to these
    studies = [path for path in sorted((ROOT / "paper").glob("[!_.]*/*")) if path.is_file()]
    pages = {str(path.relative_to(ROOT)): path for path in studies if path.suffix == ".md"}
    for name, text in {
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "paper/README.md": _in_site(ROOT / "paper" / "README.md"),
        "gallery/index.md": gallery.page(),
    }.items():
        files.append(File.generated(config, name, content=text))
    for name, path in pages.items():
        files.append(File.generated(config, name, content=_in_site(path), inclusion=linked))
    places = {path: path.relative_to(ROOT) for path in studies if path.suffix != ".md"}
    places |= {script: Path("gallery", script.name) for script in gallery.scripts()}
    for path, place in sorted(places.items()):
        files.append(File.generated(config, str(place), abs_src_path=str(path), inclusion=linked))
    return files


def _in_site(page: Path) -> str:
    """A page of paper/, with links that stay in the site; others become plain text."""

    def link(match: re.Match[str]) -> str:
        words, place, anchor = match.groups()
        target = (page.parent / place).resolve()
        if target.is_relative_to(ROOT / "docs"):
            up = "../" * len(page.parent.relative_to(ROOT).parts)
            return f"[{words}]({up}{target.relative_to(ROOT / 'docs')}{anchor or ''})"
        inside = target.is_relative_to(ROOT / "paper") and target.is_file()
        return match[0] if inside else words

    return _LINK.sub(link, page.read_text())


def on_page_content(content: str, page: Any = None, **_: Any) -> str:
    """Make MathML of formulas, which browsers draw without a script; mark wide pictures."""
    content = _FORMULA.sub(_mathml, content)
    if page is None:
        return content

    def image(match: re.Match[str]) -> str:
        before, source, after = match.groups()
        name = (Path(page.file.src_uri).parent / source).as_posix()
        path = Path(*_normalized(name))
        file = next(iter(p for p in (ROOT / "docs" / path, ROOT / path) if p.is_file()), None)
        if file is None or not _is_wide(file) or "width=" in before + after:
            return match[0]
        return f'<span class="wide">{match[0]}</span>'

    return _IMAGE.sub(image, content)


def _normalized(name: str) -> list[str]:
    """The parts of a path without ``..``."""
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return parts


def _is_wide(picture: Path) -> bool:
    """Whether a PNG has several panels side by side, and so needs room to be read."""
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return bool(width > 2.3 * height)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    formula = convert(html.unescape(match[2]).strip(), display=display)
    return _FUNCTION.sub(r'<mo lspace="0.17em" rspace="0.17em">\1</mo>', formula)


def on_post_build(config: Any) -> None:
    """Fail if a link leads nowhere."""
    broken_links = links.problems(Path(config.site_dir))
    if broken_links:
        raise PluginError("\n".join(broken_links))
