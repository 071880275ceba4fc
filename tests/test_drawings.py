"""The drawings of the documentation: each is shown by a page, says in words what it shows, and needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.test_documented_links import CODE, PAGES, PROJECT

PICTURES = sorted((PROJECT / "docs" / "pictures").iterdir())
DRAWINGS = sorted((PROJECT / "docs" / "drawings").iterdir())
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
SVG = "{http://www.w3.org/2000/svg}"
LARGEST_BYTES = 8_192
LETTER = 0.52
"""The width of a letter in parts of its size, as in sentences of DejaVu Sans, which is a wide typeface."""


def images() -> Iterator[tuple[Path, str, Path]]:
    """Yield each image of a page: the page, the text that stands for it, and its file."""
    for page in PAGES:
        for alternative, target in IMAGE.findall(CODE.sub("", page.read_text())):
            yield page, alternative, (page.parent / target).resolve()


def test_every_drawing_and_picture_is_shown_and_there_are_no_others() -> None:
    assert {file for _, _, file in images()} == {*DRAWINGS, *PICTURES}


def test_every_image_says_in_words_what_it_shows() -> None:
    assert [f"{page.name}: {file.name}" for page, alternative, file in images() if len(alternative.split()) < 6] == []


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: str(drawing.name))
def test_a_drawing_can_be_read_by_everybody(drawing: Path) -> None:
    text = drawing.read_text()
    root = ElementTree.fromstring(text)
    assert (root.get("role"), root.get("aria-labelledby")) == ("img", "title desc")
    said = {each.get("id"): each.text or "" for tag in ("title", "desc") for each in root.iter(f"{SVG}{tag}")}
    assert len(said["title"].split()) >= 3
    assert len(said["desc"].split()) >= 20
    assert "@media (prefers-color-scheme: dark)" in text
    assert len(text.encode()) <= LARGEST_BYTES


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: str(drawing.name))
def test_a_drawing_loads_nothing_and_runs_nothing(drawing: Path) -> None:
    root = ElementTree.fromstring(drawing.read_text())
    assert {each.tag for each in root.iter()} <= {
        f"{SVG}{tag}" for tag in ("svg", "title", "desc", "style", "marker", "rect", "path", "text")
    }
    (style,) = (each.text or "" for each in root.iter(f"{SVG}style"))
    assert "@import" not in style
    assert "url(" not in style
    attributes = {name: value for each in root.iter() for name, value in each.items()}
    assert [name for name in attributes if name.startswith("on") or name.endswith("href")] == []


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: str(drawing.name))
def test_no_text_of_a_drawing_is_outside_of_it(drawing: Path) -> None:
    root = ElementTree.fromstring(drawing.read_text())
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
    for each in root.iter(f"{SVG}text"):
        written, classes = each.text or "", each.get("class", "").split()
        long = len(written) * LETTER * (12 if "note" in classes else 14)
        x, y = float(each.attrib["x"]), float(each.attrib["y"])
        left = x - (long / 2 if "c" in classes else long if "e" in classes else 0)
        assert left >= 0, written
        assert left + long <= width, written
        assert y <= height, written
