"""CHANGELOG.md and the files of changes/, as changes/README.md says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import aviso_workers
from tests.test_documented_links import LINK, headings

PROJECT = Path(__file__).parents[1]
CHANGELOG = (PROJECT / "CHANGELOG.md").read_text()
CHANGES = PROJECT / "changes"
NAME = re.compile(r"(upgrade|new|fixed)(-[a-z0-9]+)+\.md")


def mistakes(changes: Path) -> Iterator[str]:
    """Yield what is wrong with each file of a folder of changes."""
    for file in sorted(changes.iterdir()):
        if file.name == "README.md":
            continue
        if not NAME.fullmatch(file.name):
            yield f"{file.name} does not begin with upgrade-, new- or fixed-"
        elif not re.fullmatch(r"[^#\s-].*[.)]\n", file.read_text()):
            yield f"{file.name} is not one paragraph on one line that ends with a full stop"
        for target, anchor in LINK.findall(file.read_text()):
            if not (PROJECT / target).is_file() or (anchor and anchor not in headings(PROJECT / target)):
                yield f"{file.name} links to {target}{anchor and f'#{anchor}'}, which is not there from the root"


def test_every_change_can_be_joined_into_the_changelog() -> None:
    assert list(mistakes(CHANGES)) == []


def test_a_change_that_cannot_be_joined_is_told(tmp_path: Path) -> None:
    (tmp_path / "new-timers-ls.md").write_text("`timers ls` lists [timers](docs/timers.md). It is new.\n")
    (tmp_path / "timers.md").write_text("`timers ls` lists timers.\n")
    (tmp_path / "new-two.md").write_text("One paragraph.\n\nAnd another one.\n")
    (tmp_path / "fixed-link.md").write_text("[Timers](../docs/timers.md) end.\n")
    assert list(mistakes(tmp_path)) == [
        "fixed-link.md links to ../docs/timers.md, which is not there from the root",
        "new-two.md is not one paragraph on one line that ends with a full stop",
        "timers.md does not begin with upgrade-, new- or fixed-",
    ]


def test_the_changelog_begins_with_what_is_not_released() -> None:
    first, version, *_ = re.findall(r"^## (\S+)", CHANGELOG, re.MULTILINE)
    assert (first, version) == ("Unreleased", aviso_workers.__version__)


def test_the_first_release_is_told_on_one_page() -> None:
    assert len(CHANGELOG.partition("\n## 0.1.0")[2].partition("\n## ")[0].splitlines()) <= 60
