"""The pages of the documentation: each relative link leads to a file of the project, and to a heading that it has, and
no page is too long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PAGES = [*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    prose = CODE.sub("", page.read_text())
    titles = re.findall(r"^#+ +(.+?) *$", prose, re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    again = {f"{anchor}-{count}" for anchor in anchors for count in range(1, anchors.count(anchor))}
    return {*anchors, *again}


def broken(page: Path) -> Iterator[str]:
    for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
        file = page.parent / target if target else page
        if not file.exists():
            yield f"{target} is not a file"
        elif anchor and anchor not in headings(file):
            yield f"{target}#{anchor} is not a heading"


REFERENCES = {"docs/operations/checks.md"}
"""Pages to look something up in, which may be longer."""
MAX_WORDS = 2_500
MAX_WORDS_OF_ALL = 79_950
"""Of README.md and docs/ together, which may only become smaller."""
MAX_LINES_OF_THE_README = 60


def test_a_page_is_short_enough_to_be_read() -> None:
    words = {str(page.relative_to(PROJECT)): len(page.read_text().split()) for page in PAGES}
    assert {page: count for page, count in words.items() if count > MAX_WORDS and page not in REFERENCES} == {}
    assert len((PROJECT / "README.md").read_text().splitlines()) <= MAX_LINES_OF_THE_README
    assert sum(count for page, count in words.items() if page.startswith(("README", "docs/"))) <= MAX_WORDS_OF_ALL


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []
