"""Writes each page of the site as Markdown beside its HTML, and `llms.txt`, which lists these files.

Both follow https://llmstxt.org: the Markdown of `metrics/index.html` is `metrics/index.html.md`, and `llms.txt` has
the title, a summary, and a section of links for each part of the navigation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from _docs import pages

NAME = "llms.txt"
BEGIN = "Begin"
"""The section of the pages that are in no part of the navigation."""
Navigation = Sequence[Mapping[str, Any]]


def write(gathered: Path, site: Path, project: Mapping[str, Any], version: str) -> None:
    """Write the Markdown of all `gathered` pages into the built `site`, and `llms.txt` from its configuration."""
    for file in gathered.rglob("*.md"):
        place = file.relative_to(gathered)
        (site / twin(place)).write_text(pages.with_links(file.read_text(), partial(_moved, place)))
    head = f"# {project['site_name']}\n\n> {project['site_description']}\n\nThis is version {version}.\n"
    sections: dict[str, list[str]] = {}
    for part, title, page in _entries(project["nav"]):
        sections.setdefault(part, []).append(f"- [{title}]({twin(PurePath(page))})")
    lists = [f"## {part}\n\n{chr(10).join(links)}\n" for part, links in sections.items()]
    (site / NAME).write_text("\n".join([head, *lists]))


def twin(page: PurePath) -> PurePath:
    """Return where the Markdown of a page is in the site, such as `metrics/index.html.md` of `metrics.md`."""
    directory = page.parent if page.name in ("README.md", "index.md") else page.with_suffix("")
    return directory / "index.html.md"


def _moved(page: PurePath, link: str) -> str:
    """Return the target of a page's link as it is for the Markdown of that page."""
    target = PurePath(os.path.normpath(page.parent / link))
    return os.path.relpath(twin(target) if target.suffix == ".md" else target, twin(page).parent)


def _entries(navigation: Navigation, *above: str) -> Iterator[tuple[str, str, str]]:
    """Yield the part of the navigation, the title and the page of each entry."""
    for title, target in (pair for entry in navigation for pair in entry.items()):
        if isinstance(target, str):
            part, *between = above or [BEGIN]
            yield part, ": ".join([*between, title]), target
        else:
            yield from _entries(target, *above, title)
