"""Looks at a built site: every link leads to a file and an anchor, and nothing is loaded from another host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}
"""What a browser fetches by itself. Only `a` waits until somebody asks."""
STYLE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""")
NOT_FETCHED = {"canonical", "alternate", "next", "prev"}


class Page(HTMLParser):
    """What one page loads, what it links to, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.has_mermaid = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        self.has_mermaid |= "mermaid" in given.get("class", "").split()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if NOT_FETCHED & set(given.get("rel", "").split()):
            return
        self.loaded += [given[name] for wanted, name in LOADED if tag == wanted and name in given]


def read(path: Path) -> Page:
    """Return what is in one page."""
    page = Page()
    page.feed(path.read_text())
    return page


def problems(site: Path) -> Iterator[str]:
    """Yield a sentence for each link that leads nowhere, and for each thing that would come from another host."""
    pages = {path: read(path) for path in site.rglob("*.html")}
    for path, page in sorted(pages.items()):
        where = path.relative_to(site)
        yield from (f"{where} loads {address}" for address in page.loaded if urlsplit(address).netloc)
        if page.has_mermaid:
            yield f"{where} has a drawing of Mermaid, whose script would come from another host"
        for address in page.loaded + page.links:
            if path.name != "404.html" and (what := _missing(address, path, pages)):
                yield f"{where} links to {address}: {what}"
    for sheet in sorted(site.rglob("*.css")):
        for address in STYLE.findall(sheet.read_text()):
            yield f"{sheet.relative_to(site)} loads {address}"


def _missing(address: str, path: Path, pages: dict[Path, Page]) -> str:
    """Return what an address within the site lacks; empty where it lacks nothing."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return ""
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    file = file / "index.html" if file.is_dir() else file
    if not file.exists():
        return "there is no such file"
    if parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
        return "it has no such anchor"
    return ""
