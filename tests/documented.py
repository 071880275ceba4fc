"""The code blocks of README.md and docs/, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

__all__ = ["EVENT_TYPE", "PAGES", "PROJECT", "Block", "blocks", "lines", "prose", "texts"]

PROJECT = Path(__file__).parents[1]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
EVENT_TYPE = """
notification_schema:
  mars:
    topic: {base: mars, key_order: [class, date, step]}
    identifier:
      class: {type: StringHandler, required: true}
      date: {type: DateHandler, canonical_format: "%Y%m%d", required: true}
      step: {type: IntHandler, range: [0, 360], required: true}
    storage_policy: {allow_duplicates: true}
"""
"""The event type of the tutorial as a file has it, for pages whose programs and commands read a file."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(Struct, frozen=True):
    """One block of a page, such as docs/timers.md, and its language, which is empty where the page names none."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(language: str | None = None) -> list[Block]:
    """Return the blocks of all pages, or those in one language."""
    return [
        Block(str(page.relative_to(PROJECT)), text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for page in PAGES
        for text in [page.read_text()]
        for found in BLOCK.finditer(text)
        if language in (None, found[1])
    ]


def texts(page: str, language: str) -> list[str]:
    """Return the blocks of one page in one language."""
    return [block.text for block in blocks(language) if block.page == page]


def lines(page: str, number: int) -> list[str]:
    """Return the commands of a page's block in bash, where each stands on one line."""
    return texts(page, "bash")[number].replace("\\\n", " ").splitlines()


def prose(page: Path) -> str:
    """Return the text of a page without its blocks."""
    return BLOCK.sub("", page.read_text())
