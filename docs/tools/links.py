"""Check every link of the finished site, and that pages ask nothing of other hosts."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"img", "script", "link", "iframe", "source", "video", "audio"}


class Page(HTMLParser):
    """Links, anchors and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember what the tag names and points to."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        target = values.get("href") or values.get("src")
        if target:
            self.links.append(target)
            if tag in _LOADED and values.get("rel") not in ("canonical", "next", "prev"):
                self.loaded.append(target)


def problems(site: Path) -> list[str]:
    """One line for each link to nowhere, and for each file that another host would serve."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    lines = []
    for path, page in pages.items():
        where = path.relative_to(site)
        lines += [f"{where} loads {link}" for link in page.loaded if urlsplit(link).netloc]
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                lines.append(f"{where} links to {link}, which is not there")
            elif parts.fragment and unquote(parts.fragment) not in _anchors(pages, target):
                lines.append(f"{where} links to {link}, which has no such anchor")
    return lines


def _anchors(pages: dict[Path, Page], target: Path) -> set[str]:
    return pages[target].anchors if target in pages else set()
