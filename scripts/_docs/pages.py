"""Gathers the pages of the site: those of docs/, and what they link to outside of it, such as CHANGELOG.md.

In the site, docs/timers.md is timers.md and config/example.yaml stays config/example.yaml. So a link from one to the
other is rewritten; a link within docs/ stays as it is.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def gather(project: Path, target: Path) -> None:
    """Write every page of `docs/` below `target`, and every file that a page links to.

    Raises FileNotFoundError where a link leads to no file.
    """
    waiting = sorted((project / "docs").rglob("*.md"))
    seen = set(waiting)
    while waiting:
        file = waiting.pop()
        placed = target / _place(file, project)
        placed.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".md":
            shutil.copyfile(file, placed)
            continue
        text, linked = _moved(file, project)
        placed.write_text(text)
        waiting += sorted(linked - seen)
        seen |= linked


def _place(file: Path, project: Path) -> Path:
    """Return where a file of the project is in the site."""
    inside = file.relative_to(project)
    return inside.relative_to("docs") if inside.parts[0] == "docs" else inside


def _moved(page: Path, project: Path) -> tuple[str, set[Path]]:
    """Return the text of a page with its links as they are in the site, and the files that these lead to."""
    linked: set[Path] = set()
    here = _place(page, project).parent

    def moved(link: str) -> str:
        file = (page.parent / link).resolve()
        linked.add(file)
        return os.path.relpath(_place(file, project), here)

    return with_links(page.read_text(), moved), linked


def with_links(text: str, moved: Callable[[str], str]) -> str:
    """Return the text of a page with `moved(target)` in place of the target of each relative link."""
    parts = CODE.split(text)
    parts[::2] = [LINK.sub(lambda link: moved(link[1]), prose) for prose in parts[::2]]
    return "".join(parts)
